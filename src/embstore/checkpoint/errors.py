"""Errors of dumps that cannot be used."""


class CheckpointError(RuntimeError):
    """A dump is damaged, incomplete or does not fit; the message names the file and the reason.

    Examples:
        >>> import embstore, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "dump"
        >>> embstore.dump(folder, {"model": {"user": embstore.Table("user", dim=2)}})
        >>> (folder / "model" / "user_keys").unlink()
        >>> try:
        ...     embstore.open_dump(folder)
        ... except embstore.CheckpointError as error:
        ...     print("user_keys: is missing" in str(error))
        True
    """


class NotADumpError(CheckpointError):
    """The folder holds something else than a dump.

    Examples:
        >>> import embstore, tempfile
        >>> try:
        ...     embstore.open_dump(tempfile.mkdtemp())
        ... except embstore.NotADumpError as error:
        ...     print("is not a dump" in str(error))
        True
    """
