"""Stores in a shared library; embstore/parameter_server_plugin.h is the interface.

load_plugin("libmy_ps.so")          # IO_type "my-ps"
open_store("my-ps://host:99", table="emb.user", tensor_bytes=[256])
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embstore import _core
from embstore.arrays import address
from embstore.stores import FoundArray, KeyArray, RowArray, ScoreArray, Store

BUILT_IN = ("memory", "ssd", "redis", "rediss")  # schemes of stores that need no plug-in
TIMEOUT_SECONDS = 60.0  # for one call to complete


def include_dir() -> str:
    """The directory that a compiler needs (-I) for `#include <embstore/parameter_server_plugin.h>`."""
    return str(Path(_core.__file__).parent / "include")


def load_plugin(path: str | os.PathLike[str]) -> str:
    """Loads the library for the rest of the process and returns its type, which is the scheme of its URLs.

    `path` is a file, or a name that the dynamic linker finds. A plug-in may take over a built-in scheme such
    as memory:// or redis://.
    """
    path = os.fspath(path)
    kind, is_new = _core.load_plugin(os.path.abspath(path) if os.path.exists(path) else path)
    log = logging.getLogger(__name__)
    if not is_new:
        log.warning("%s: a plug-in of the type %s is loaded already and stays in use", path, kind)
    elif kind in BUILT_IN:
        log.warning("%s: this plug-in opens %s:// from now on, instead of the built-in store", path, kind)
    return kind


class PluginStore(Store):
    """Rows of one table behind a plug-in. It can put and get; it keeps no scores."""

    def __init__(self, kind: str, cfg: str, table: str, tensor_bytes: Sequence[int], column: int = 0) -> None:
        super().__init__(sum(tensor_bytes))
        self._what = f"{kind}:// of {table}"
        self._instance = _core.PluginInstance(kind, cfg, table, column, list(tensor_bytes))

    def __repr__(self) -> str:
        return f"<plug-in {self._what}>"

    def get(self, keys: KeyArray) -> tuple[RowArray, ScoreArray, FoundArray]:
        rows = np.empty((len(keys), self.row_bytes), np.uint8)
        found = np.zeros(len(keys), np.uint8)
        self._instance.pull(address(keys), len(keys), address(rows), address(found), TIMEOUT_SECONDS)
        return rows, np.ones(len(keys), np.uint64), found.astype(bool)

    def put(self, keys: KeyArray, rows: RowArray, scores: ScoreArray) -> None:
        self._instance.push(address(keys), len(keys), address(rows), TIMEOUT_SECONDS)
