"""Where the rows of a dump come from: a table that is being trained, or blocks of other dumps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.arrays import address
from embstore.checkpoint.spec import TableSpec
from embstore.exact_counts import Counts
from embstore.ownership import AnyOwnership, Ownership
from embstore.rows import Rows
from embstore.table import Table

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Source:
    """Rows of a table that one rank writes: how many, and a reader that several threads may call until
    it fills a buffer with no more rows. `gone` gives the tombstones of an increment. Of keys that have no
    row yet, `admission` has the counters of the table (Table.admission_counters), `admission_changes` what
    changed of them, and `counts` are those of Table.exact_counts, or their changes."""

    collection: str
    spec: TableSpec
    count: Callable[[], int]  # may take long: over a store it lists the keys
    read: Callable[[Rows], int]
    end: Callable[[], None] = lambda: None
    gone: Callable[[], npt.NDArray[np.int64]] | None = None  # may take long, too
    ownership: AnyOwnership = Ownership.ROUNDROBIN
    admission: npt.NDArray[np.uint16] | None = None
    admission_changes: npt.NDArray[np.uint16] | None = None
    counts: Counts | None = None
    shared: Rows | None = None  # by number; None: the table has none

    @property
    def name(self) -> tuple[str, str]:
        return self.collection, self.spec.name

    @cached_property
    def rows(self) -> int:
        return self.count()

    @cached_property
    def removed(self) -> npt.NDArray[np.int64] | None:
        return None if self.gone is None else self.gone()


def table_source(
    collection: str, table: Table, optim: bool, ownership: AnyOwnership, with_counts: bool = True
) -> Source:
    """The rows of a table, and of the store below it, as they are now, whatever happens to them later."""
    snapshot: list[Any] = [table.snapshot()]
    return Source(
        collection,
        TableSpec.of(table),
        lambda: int(snapshot[0].rows),
        lambda buffer: _read(snapshot[0], buffer),
        snapshot.clear,
        ownership=ownership,
        admission=table.admission_counters(),
        counts=table.exact_counts.items() if table.exact_counts is not None and with_counts else None,
        shared=Rows(*snapshot[0].shared) if table.options.shared_rows else None,
    )


@dataclass
class Taken:
    """Changes of a table: a snapshot of its rows, and of the counters of keys without a row."""

    collection: str
    spec: TableSpec
    table: Table
    rows: Any
    counters: npt.NDArray[np.uint16] | None = None
    counts: Counts | None = None


def changes_source(taken: Taken, ownership: AnyOwnership) -> Source:
    """What a snapshot of changes has. The snapshot can still put its changes back after the end."""
    spec, snapshot = taken.spec, taken.rows
    return Source(
        taken.collection,
        spec,
        lambda: int(snapshot.rows),
        lambda buffer: _read(snapshot, buffer),
        snapshot.detach,
        gone=snapshot.removed,
        ownership=ownership,
        admission_changes=taken.counters,
        counts=taken.counts,
        shared=Rows(*snapshot.shared) if spec.shared_rows else None,
    )


def _read(snapshot: Any, buffer: Rows) -> int:
    return int(
        snapshot.read(
            len(buffer.keys),
            address(buffer.keys),
            address(buffer.values),
            address(buffer.states) if buffer.states.shape[1] else 0,
            address(buffer.scores),
            uses=0 if buffer.uses is None else address(buffer.uses),
        )
    )


def block_source(
    collection: str,
    spec: TableSpec,
    rows: int,
    blocks: Iterable[Rows],
    ownership: AnyOwnership = Ownership.ROUNDROBIN,
    shared: Rows | None = None,
    admission: npt.NDArray[np.uint16] | None = None,
    counts: Counts | None = None,
) -> Source:
    """Rows that come in blocks, such as those of another dump."""
    lock = threading.Lock()
    coming = iter(blocks)
    rest: list[Rows] = []

    def read(buffer: Rows) -> int:
        with lock:
            block = rest.pop() if rest else next(coming, None)
            while block is not None and len(block) == 0:
                block = next(coming, None)
            if block is None:
                return 0
            n = min(len(block), len(buffer))
            buffer.keys[:n], buffer.values[:n] = block.keys[:n], block.values[:n]
            buffer.scores[:n] = block.scores[:n]
            if buffer.states.shape[1]:
                buffer.states[:n] = block.states[:n]
            if buffer.uses is not None:
                buffer.uses[:n] = 0 if block.uses is None else block.uses[:n]
            if n < len(block):
                rest.append(block[n:])
            return n

    return Source(
        collection,
        spec,
        lambda: rows,
        read,
        ownership=ownership,
        admission=admission,
        counts=counts,
        shared=shared,
    )


def block_rows(spec: TableSpec) -> int:
    return max(1024, min(65536, BLOCK_BYTES // (4 * (spec.dim + spec.state_width) + 16)))


def empty_block(spec: TableSpec, optim: bool) -> Rows:
    n = block_rows(spec)
    return Rows(
        np.empty(n, np.int64),
        np.empty((n, spec.dim), np.float32),
        np.empty((n, spec.state_width if optim else 0), np.float32),
        np.empty(n, np.uint64),
        np.empty(n, np.uint32) if spec.counts_uses else None,
    )
