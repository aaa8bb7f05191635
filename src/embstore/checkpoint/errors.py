"""Errors of dumps that cannot be used."""


class CheckpointError(RuntimeError):
    """A dump is damaged, incomplete or does not fit; the message names the file and the reason."""


class NotADumpError(CheckpointError):
    """The folder holds something else than a dump."""
