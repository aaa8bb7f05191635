"""Stores by URL.

memory://NAME              one set of tables for each name, in this process
ssd:///path                files in a directory, for one process at a time; the next finds flushed rows
redis://host:6379/?…       see embstore.stores.redis.store
TYPE://…                   a plug-in of that type, also where it replaces one of the above
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from embstore import _core
from embstore.options import TableOptions
from embstore.stores import MemoryStore, SsdStore, Store, TieredStore, row_bytes
from embstore.stores.plugin import BUILT_IN, PluginStore
from embstore.stores.redis.store import SCHEMES, RedisStore

LOCAL = ("memory", "ssd")  # of one process: whoever opens the same table in it gets the same store
assert set(BUILT_IN) == {*LOCAL, *SCHEMES}

_FLUSHED = "flushed"
_OLDER = re.compile(r"saved-[0-9]+")  # what `flush` made before there was one name

_opened: dict[tuple[str, str, int], Store] = {}
_opened_lock = threading.Lock()


def _split(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError("url should be scheme://… but has no scheme")
    known = list(dict.fromkeys([*BUILT_IN, *_core.plugin_types()]))
    if scheme not in known:
        shown = scheme if re.fullmatch(r"[\w.+-]+", scheme) else "something with other characters"
        raise ValueError(f"the scheme of url should be one of {known} but is: {shown}")
    return scheme, rest


def is_shared(url: str) -> bool:
    """Whether all processes that open this URL share the same rows."""
    scheme = _split(url)[0]
    return scheme not in LOCAL or _has_plugin(scheme)


def _has_plugin(scheme: str) -> bool:
    return scheme in _core.plugin_types()


def open_store(
    url: str, *, table: str, tensor_bytes: Sequence[int], column: int = 0, layout: str = "compatible"
) -> Store:
    """Opens the store of one table. A row consists of tensors of these sizes, one after the other.

    `column` numbers the parts of tables that are split by columns. `layout` is how Redis keeps rows when the
    URL does not say.

    >>> open_store("memory://doc", table="user", tensor_bytes=[8]) is open_store(
    ...     "memory://doc", table="user", tensor_bytes=[8])
    True
    """
    scheme, rest = _split(url)
    if _has_plugin(scheme):
        return PluginStore(scheme, rest, table, tensor_bytes, column)
    if scheme in SCHEMES:
        return RedisStore(url, table=table, tensor_bytes=tensor_bytes, column=column, layout=layout)
    size = sum(tensor_bytes)
    with _opened_lock:
        store = _opened.get((url, table, column))
        if store is None:
            store = MemoryStore(size) if scheme == "memory" else _SavedSsdStore(rest, table, column, size)
            _opened[url, table, column] = store
    if store.row_bytes != size:
        raise ValueError(
            f"rows of {table} at {url} should have {store.row_bytes} bytes, as they were stored, "
            f"but have: {size}"
        )
    return store


def tiers(*urls: str, upper_rows: int) -> Callable[[TableOptions, int], Store]:
    """A factory of the stores below a table, the nearest first; each but the last keeps about `upper_rows`
    rows and moves the oldest on. The factory takes the options of the table and the rank: it can be passed to
    dynamicemb as `external_storage`.

    >>> below = tiers("memory://near", "memory://far", upper_rows=1000)
    >>> options = TableOptions(name="user", dim=4)
    >>> below(options, 0)
    <memory store over memory store: 0 rows of 16 bytes>

    Each rank has its own table in every tier; use a dump to change the number of ranks. An upper SSD tier
    starts empty: only what `flush` moved to the last tier outlives the process.
    """
    if not urls:
        raise ValueError("urls should name at least one store but there is none")
    schemes = [_split(url)[0] for url in urls]

    def make(options: TableOptions, rank: int) -> Store:
        size = row_bytes(options.dim, options.optimizer, options.dtype)
        name = f"{options.name}-{rank}"  # a scan of the store, and so a dump, must not see the rows of others
        store = open_store(urls[-1], table=name, tensor_bytes=[size], layout="packed")
        for url, scheme in reversed(list(zip(urls[:-1], schemes[:-1]))):
            store = TieredStore(_upper(url, scheme, name, size), store, upper_rows)
        return store

    return make


def _upper(url: str, scheme: str, table: str, size: int) -> Store:
    if _has_plugin(scheme):
        raise ValueError(f"an upper tier should be a built-in store but {scheme}:// is that of a plug-in")
    if scheme == "memory":
        return MemoryStore(size)
    if scheme == "ssd":
        return SsdStore(_folder(_split(url)[1], table), size)
    raise ValueError(f"an upper tier should be memory:// or ssd:// but is: {scheme}://")


def _folder(path: str, table: str) -> Path:
    if not path.startswith("/"):
        raise ValueError(f"an ssd URL should be ssd:///path but its path is: {path!r}")
    return Path(unquote(path)) / quote(table, safe="")


class _SavedSsdStore(SsdStore):
    """An SSD store that starts with what was last flushed. It leaves other snapshots alone."""

    def __init__(self, path: str, table: str, column: int, row_bytes: int) -> None:
        super().__init__(_folder(path, f"{table}-{column}"), row_bytes, flush_snapshot=_FLUSHED)
        if _FLUSHED in self.snapshots():
            self.load_snapshot(_FLUSHED)
        elif older := [name for name in self.snapshots() if _OLDER.fullmatch(name)]:
            self.load_snapshot(max(older, key=lambda name: int(name.removeprefix("saved-"))))
            self.flush()
            for name in older:
                self.delete_snapshot(name)

    def close(self) -> None:
        super().close()
        with _opened_lock:
            for opened in [key for key, store in _opened.items() if store is self]:
                del _opened[opened]
