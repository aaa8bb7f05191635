"""Ranks that dump or load together (see embstore.distributed.ranks), and the error of a bad dump."""

from __future__ import annotations

from embstore.distributed.ranks import Ranks, ranks_of

__all__ = ["CheckpointError", "Ranks", "ranks_of"]


class CheckpointError(RuntimeError):
    """A dump is damaged, incomplete or does not fit; the message names the file and the reason."""
