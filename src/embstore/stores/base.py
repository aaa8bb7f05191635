"""Stores: what keeps rows by key below a table.

    store = MemoryStore(row_bytes(dim=2, optimizer=Adam()))
    table = Table("user", dim=2, optimizer=Adam(), max_capacity=128, store=store)

The table is then a write-back cache of its store. A row is kept as bytes, [embedding | optimizer state], and
travels with its score:

    keys    (n) int64      rows  (n, row_bytes) uint8      scores  (n) uint64      found  (n) bool

Subclass `Store` to write a store in Python; the built-in ones run in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_keys, as_scores
from embstore.optimizers import SGD, Optimizer
from embstore.options import DType

KeyArray = npt.NDArray[np.int64]
RowArray = npt.NDArray[np.uint8]
ScoreArray = npt.NDArray[np.uint64]
FoundArray = npt.NDArray[np.bool_]


def row_bytes(dim: int, optimizer: Optimizer | None = None, dtype: DType = DType.FLOAT32) -> int:
    """Bytes of a stored row: the embedding and its optimizer state."""
    return _core.stored_row_bytes(dim, int(dtype), (optimizer or SGD()).engine_name)


class Store:
    """Base of stores written in Python: implement `get`, `put`, `erase`, `scan` and `__len__`.

    The engine calls these methods with the GIL held, from whatever thread needs rows, mostly while it holds
    the lock of the table: a method must not use that table. Look-ahead and dumps call `get`, `scan` and
    `scan_keys` while other threads put and erase. A method may keep the arrays it receives. An exception in
    `get` or `put` reaches the caller of the table, and no row is lost.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    # ---- required

    def get(self, keys: KeyArray) -> tuple[RowArray, ScoreArray, FoundArray]:
        """Rows, scores and which keys exist; the rows of missing keys may hold anything."""
        raise NotImplementedError(f"{type(self).__name__} should implement get")

    def put(self, keys: KeyArray, rows: RowArray, scores: ScoreArray) -> None:
        """Stores rows; of duplicate keys the last one wins."""
        raise NotImplementedError(f"{type(self).__name__} should implement put")

    def erase(self, keys: KeyArray) -> None:
        """Removes keys; missing ones are skipped."""
        raise NotImplementedError(f"{type(self).__name__} should implement erase")

    def scan(self) -> Iterator[tuple[KeyArray, RowArray, ScoreArray]]:
        """All rows in blocks, each key once. Rows may be put and erased between two blocks: a key that exists
        from the first block to the last must appear, others may."""
        raise NotImplementedError(f"{type(self).__name__} should implement scan")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} should implement __len__")

    # ---- optional: override where the store can do better

    def scan_keys(self) -> Iterator[KeyArray]:
        """All keys in blocks. A key that is not put or erased during the scan appears at least once."""
        for keys, _, _ in self.scan():
            yield keys

    def contains(self, keys: KeyArray) -> FoundArray:
        """Which keys exist."""
        return self.get(keys)[2]

    def clear(self) -> None:
        """Removes every key."""
        for keys, _, _ in list(self.scan()):
            self.erase(keys)

    def flush(self) -> None:
        """Makes stored rows durable."""

    def snapshot(self, name: str) -> None:
        """Saves the contents under a name."""
        raise NotImplementedError(f"{type(self).__name__} keeps no snapshots")

    def load_snapshot(self, name: str) -> None:
        """Replaces the contents with a snapshot; if that fails, raises and changes nothing."""
        raise NotImplementedError(f"{type(self).__name__} keeps no snapshots")

    # ---- for the engine

    def handle(self) -> _core.Store:
        """The engine's view of this store. Not cached here: the handle keeps this store alive, and a cycle
        through the engine would never be collected."""
        return _core.python_store(self, self.row_bytes)


class EngineStore(Store):
    """Base of the stores that run in the engine; use one of the subclasses."""

    def __init__(self, handle: _core.Store) -> None:
        super().__init__(handle.row_bytes)
        self._handle = handle

    def handle(self) -> _core.Store:
        return self._handle

    def __repr__(self) -> str:
        return f"<{self._handle.describe()}: {len(self)} rows of {self.row_bytes} bytes>"

    def __len__(self) -> int:
        return self._handle.size()

    def get(self, keys: object, *, with_scores: bool = True) -> tuple[RowArray, ScoreArray, FoundArray]:
        """Rows, scores and which keys exist; the rows of missing keys may hold anything. Scores may cost an
        extra read: with_scores=False skips them and returns an empty array."""
        k = as_keys(keys)
        rows = _core.empty_bytes(k.n * self.row_bytes).reshape(k.n, self.row_bytes)
        scores, found = np.zeros(k.n if with_scores else 0, np.uint64), np.empty(k.n, np.uint8)
        self._handle.get(k.address, k.n, address(rows), address(scores) if with_scores else 0, address(found))
        return rows, scores, found.view(np.bool_)

    def put(self, keys: object, rows: object, scores: object = None) -> None:
        """Stores rows: bytes, or numbers of any type with row_bytes bytes a row. scores default to 1."""
        k = as_keys(keys)
        r = np.ascontiguousarray(rows)
        if r.ndim != 2 or r.shape[0] != k.n or r.itemsize * r.shape[1] != self.row_bytes:
            raise ValueError(
                f"rows should have the shape ({k.n}, {self.row_bytes}) in bytes "
                f"but have: {r.shape} of {r.dtype}"
            )
        s = np.ones(k.n, np.uint64) if scores is None else as_scores(scores, k.n)
        self._handle.put(k.address, k.n, address(r), address(s))

    def contains(self, keys: object) -> FoundArray:
        k = as_keys(keys)
        found = np.empty(k.n, np.uint8)
        self._handle.contains(k.address, k.n, address(found))
        return found.astype(bool)

    def erase(self, keys: object) -> None:
        k = as_keys(keys)
        self._handle.erase(k.address, k.n)

    def clear(self) -> None:
        self._handle.clear()

    def flush(self) -> None:
        self._handle.flush()

    def scan(self, block_rows: int = 65536) -> Iterator[tuple[KeyArray, RowArray, ScoreArray]]:
        yield from scan_handle(self._handle, block_rows)

    def snapshot(self, name: str) -> None:
        self._handle.snapshot(name)

    def load_snapshot(self, name: str) -> None:
        self._handle.load_snapshot(name)


def scan_handle(
    handle: _core.Store, block_rows: int = 65536
) -> Iterator[tuple[KeyArray, RowArray, ScoreArray]]:
    """All rows of an engine store, in blocks."""
    if block_rows < 1:
        raise ValueError(f"block_rows should be at least 1 but is: {block_rows}")
    scanner = handle.scan()
    while (block := scanner.next(block_rows, handle.row_bytes)) is not None:
        keys, rows, scores = block
        yield keys, rows, scores
