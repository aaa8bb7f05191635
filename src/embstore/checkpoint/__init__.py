"""Dumps of tables: written by all ranks together, published when complete, read at any world size.

embstore.dump(path, {"model": {"user": table}}, optim=True)
embstore.load(path, {"model": {"user": table}}, optim=True)
embstore.open_dump(path)["model"]["user"].values
"""

from embstore.checkpoint.dumping import DumpHandle, dump
from embstore.checkpoint.errors import CheckpointError, NotADumpError
from embstore.checkpoint.increments import IncrementLog
from embstore.checkpoint.loading import load
from embstore.checkpoint.reading import Dump, DumpTable, open_dump
from embstore.checkpoint.rewriting import convert, merge, reshard
from embstore.distributed.ranks import Ranks, ranks_of

__all__ = [
    "CheckpointError",
    "Dump",
    "DumpHandle",
    "DumpTable",
    "IncrementLog",
    "NotADumpError",
    "Ranks",
    "convert",
    "dump",
    "load",
    "merge",
    "open_dump",
    "ranks_of",
    "reshard",
]
