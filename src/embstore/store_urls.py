"""Stores by URL.

memory://NAME              one set of tables for each name, in this process
ssd:///path                files below a directory
redis://host:6379/?…       see embstore.redis_store
TYPE://…                   what a plug-in of that type makes of it
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from embstore import _core
from embstore.plugin_store import PluginStore
from embstore.redis_store import SCHEMES, RedisStore
from embstore.stores import MemoryStore, Store

_memory: dict[tuple[str, str, int], Store] = {}
_memory_lock = threading.Lock()


def _split(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError("url should be scheme://… but has no scheme")
    if scheme not in ("memory", *SCHEMES, *_core.plugin_types()):
        known = ["memory", *SCHEMES, *_core.plugin_types()]
        raise ValueError(f"the scheme of url should be one of {known} but is: {scheme}")
    return scheme, rest


def is_shared(url: str) -> bool:
    """Whether all processes that open this URL meet the same rows."""
    return _split(url)[0] != "memory"


def open_store(
    url: str, *, table: str, tensor_bytes: Sequence[int], column: int = 0, layout: str = "compatible"
) -> Store:
    """The store of one table, whose rows are tensors of these sizes one after the other.

    `column` numbers the parts of tables that are split by columns. `layout` is how Redis keeps rows when the
    URL does not say.

    >>> open_store("memory://doc", table="user", tensor_bytes=[8]) is open_store(
    ...     "memory://doc", table="user", tensor_bytes=[8])
    True
    """
    scheme, rest = _split(url)
    if scheme in SCHEMES:
        return RedisStore(url, table=table, tensor_bytes=tensor_bytes, column=column, layout=layout)
    if scheme != "memory":
        return PluginStore(scheme, rest, table, tensor_bytes, column)
    with _memory_lock:
        store = _memory.setdefault((rest, table, column), MemoryStore(sum(tensor_bytes)))
    if store.row_bytes != sum(tensor_bytes):
        raise ValueError(
            f"rows of {table} at memory://{rest} should have {store.row_bytes} bytes, as they were stored, "
            f"but have: {sum(tensor_bytes)}"
        )
    return store
