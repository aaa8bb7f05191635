"""The error of a dump that cannot be used."""


class CheckpointError(RuntimeError):
    """A dump is damaged, incomplete or does not fit; the message names the file and the reason."""
