"""embstore keeps trainable vectors for an unbounded set of int64 ids.

`Table` needs numpy alone; the modules (`Embedding`, `EmbeddingBag`, `EmbeddingCollection`,
`EmbeddingBagCollection`) need torch, which is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from embstore import (
    metrics,
    old_paths,  # noqa: F401
    serving,
    stores,
)
from embstore.checkpoint import (
    CheckpointError,
    IncrementLog,
    NotADumpError,
    convert,
    dump,
    load,
    merge,
    open_dump,
    reshard,
)
from embstore.initializers import Constant, Debug, Initializer, Normal, TruncatedNormal, Uniform
from embstore.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    EpsPlacement,
    Ftrl,
    Optimizer,
    RowwiseAdagrad,
    SmartDecayAdam,
)
from embstore.options import (
    Admission,
    CheckMode,
    DType,
    EvictionLog,
    RefusedKeysError,
    ScoreStrategy,
    TableOptions,
)
from embstore.ownership import Ownership, owner
from embstore.rows import Rows, Stats
from embstore.slot_map import SlotMap
from embstore.string_ids import ids_from
from embstore.table import Table
from embstore.threads import get_num_threads, isa, set_num_threads

if TYPE_CHECKING:
    from embstore import nn
    from embstore.nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection

__version__ = metadata.version("embstore")  # pyproject.toml says it

_MODULES = ("Embedding", "EmbeddingBag", "EmbeddingCollection", "EmbeddingBagCollection")


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("embstore.nn")
    if name in _MODULES:
        return getattr(importlib.import_module("embstore.nn"), name)
    raise AttributeError(f"module 'embstore' has no attribute {name!r}")


__all__ = [
    "Admission",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CheckMode",
    "CheckpointError",
    "Constant",
    "DType",
    "Debug",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "EpsPlacement",
    "EvictionLog",
    "Ftrl",
    "IncrementLog",
    "Initializer",
    "Normal",
    "NotADumpError",
    "Optimizer",
    "Ownership",
    "RefusedKeysError",
    "Rows",
    "RowwiseAdagrad",
    "ScoreStrategy",
    "SmartDecayAdam",
    "SlotMap",
    "Stats",
    "Table",
    "TableOptions",
    "TruncatedNormal",
    "Uniform",
    "convert",
    "dump",
    "get_num_threads",
    "ids_from",
    "isa",
    "load",
    "merge",
    "metrics",
    "nn",
    "open_dump",
    "owner",
    "reshard",
    "serving",
    "set_num_threads",
    "stores",
]
