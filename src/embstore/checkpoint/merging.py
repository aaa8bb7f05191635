"""Dumps made of dumps: a base with its increments, other layouts, other world sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.admission import Counters, merged_counters, merged_counts
from embstore.checkpoint.dumping import start
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.parts import RowFile
from embstore.checkpoint.reading import Dump, DumpTable
from embstore.checkpoint.shared import chosen, stored_shared
from embstore.checkpoint.sources import Source, block_rows, block_source
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.writing import DumpOptions, removed_file
from embstore.distributed.ranks import Ranks
from embstore.exact_counts import Counts
from embstore.formats.dynamicemb import WRITTEN
from embstore.ownership import Ownership, owner
from embstore.progress import Progress
from embstore.rows import Rows

Array = npt.NDArray[Any]


def removed_keys(stored: DumpTable) -> npt.NDArray[np.int64]:
    """The tombstones of a table of an increment."""
    name = removed_file(stored.name)
    if name not in stored.files():
        raise CheckpointError(f"{stored.folder / name}: is missing, the removed keys of an increment")
    rows = stored.files()[name]["bytes"] // 8
    return RowFile(stored.folder / name, "<i8", rows, 1).all()[:, 0]


def all_keys(stored: DumpTable) -> npt.NDArray[np.int64]:
    """The keys of a table in memory, in the order of its files."""
    return np.concatenate([reader.keys(0, reader.part.rows) for reader in stored.readers])


def _shape(table: DumpTable) -> tuple[int, list[str]]:
    return table.dim, table.state_names


class Merged:
    """The rows of a table after its increments: the last word on each key counts."""

    def __init__(self, base: DumpTable, increments: Sequence[DumpTable]) -> None:
        self._base = base
        self._increments = increments
        self.collection = base.collection
        newest = increments[-1] if increments else base
        if newest.spec is None:
            raise CheckpointError(f"{newest.folder}: has no embstore.json, which merging needs")
        for increment in increments:
            ours, theirs = (_shape(table) for table in (base, increment))
            if ours != theirs:
                raise CheckpointError(
                    f"{increment.folder}: dim and states of table {base.name!r} are {theirs} but those "
                    f"of the base are: {ours}"
                )
        self.spec: TableSpec = newest.spec
        self._newest = newest
        self.world = newest.world
        self.ownership = newest.entry.ownership if newest.entry else Ownership.ROUNDROBIN
        # For every changed key: the increment that has its row, or -1 when it is gone.
        keys: list[Array] = []
        last: list[Array] = []
        for number, increment in enumerate(increments):
            for changed, where in ((all_keys(increment), number), (removed_keys(increment), -1)):
                keys.append(changed)
                last.append(np.full(len(changed), where))
        joined = np.concatenate(keys) if keys else np.empty(0, np.int64)
        whence = np.concatenate(last) if last else np.empty(0, np.int64)
        # Of equal keys the stable sort keeps the order in time, so the last of each run counts.
        order = np.argsort(joined, kind="stable")
        joined, whence = joined[order], whence[order]
        final = np.append(joined[1:] != joined[:-1], True) if len(joined) else np.empty(0, bool)
        self._changed, self._whence = joined[final], whence[final]

    def _source_of(self, keys: Array) -> Array:
        """Where the row of each key is: the number of an increment, -1 gone, -2 unchanged."""
        if len(self._changed) == 0:
            return np.full(len(keys), -2)
        at = np.minimum(np.searchsorted(self._changed, keys), len(self._changed) - 1)
        return np.where(self._changed[at] == keys, self._whence[at], -2)

    def blocks(self, rank: int = 0, world: int = 1) -> Iterator[Rows]:
        """The rows of one rank."""
        sources = [(-2, self._base), *enumerate(self._increments)]
        for number, stored in sources:
            for rows in stored.blocks(block_rows(self.spec)):
                mine = self._source_of(rows.keys) == number
                if world > 1:
                    mine &= owner(rows.keys, world, self.ownership) == rank
                if mine.all():
                    yield rows
                elif mine.any():
                    yield rows[mine]

    def shared(self, rank: int = 0, world: int = 1) -> Rows | None:
        """The shared rows of one rank, None where there are none. Every increment has all of them."""
        found = stored_shared(self._newest)
        if found is None:
            return None
        return chosen(self.spec, found, self.spec, rank, world, alike=world == self._newest.world)

    def admission(self, rank: int, world: int) -> Counters | None:
        """The counters of one rank; None where there are none, or another number of ranks counted."""
        if world != self.world or self._base.world != world:
            return None
        return merged_counters(self._base, self._increments, rank, world)

    def counts(self, rank: int, world: int) -> Counts | None:
        """The exact counts of keys without a row that one rank owns; None where no entry has any."""
        if self._counts is None:
            return None
        mine = owner(self._counts[0], world, self.ownership) == rank
        return self._counts[0][mine], self._counts[1][mine]

    @cached_property
    def _counts(self) -> Counts | None:
        return merged_counts(self._base, self._increments)

    def empty(self) -> Rows:
        """No rows, as wide as the others."""
        width = sum(w for _, w in self.spec.states) if self._base.state_names else 0
        return Rows(
            np.empty(0, np.int64),
            np.empty((0, self.spec.dim), np.float32),
            np.empty((0, width), np.float32),
            np.empty(0, np.uint64),
        )

    def rows_of_rank(self, world: int) -> list[int]:
        counts = np.zeros(world, np.int64)
        for number, stored in [(-2, self._base), *enumerate(self._increments)]:
            for reader in stored.readers:
                keys = reader.keys(0, reader.part.rows)
                kept = keys[self._source_of(keys) == number]
                counts += np.bincount(owner(kept, world, self.ownership), minlength=world)
        return [int(count) for count in counts]


def rewrite(
    base: Dump,
    increments: Sequence[Dump],
    out: Path,
    *,
    layout: str | None = None,
    world: int | None = None,
    increment: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> str:
    """Writes a dump that holds what `base` and then `increments` say; returns the identity of it.

    Without increments this converts between layouts and world sizes. Rows are streamed; only the keys of
    the increments are held in memory.
    """
    of = base.manifest
    if of is None:
        raise CheckpointError(f"{base.path}: has no embstore.json, so it does not say what its tables are")
    layout = of.layout if layout is None else layout
    if layout not in WRITTEN:
        raise ValueError(f"layout should be one of {', '.join(WRITTEN)} but is: {layout!r}")
    world = of.world if world is None else world
    if world < 1:
        raise ValueError(f"world should be at least 1 but is: {world}")
    merged = [table for table, _ in merge_tables([base, *increments])]
    sizes = [table.rows_of_rank(world) for table in merged]
    parts: dict[int, list[Source]] = {
        rank: [
            block_source(
                t.collection,
                t.spec,
                rows[rank],
                t.blocks(rank, world),
                ownership=t.ownership,
                shared=t.shared(rank, world),
                admission=t.admission(rank, world),
                counts=t.counts(rank, world),
            )
            for t, rows in zip(merged, sizes)
        ]
        for rank in range(world)
    }
    options = DumpOptions(layout, of.optim, increment or {}, overwrite)
    ranks = Ranks()
    job = start(out, parts, world, options, ranks)
    job.run(ranks, progress=progress)
    return job.id


def merge_tables(entries: Sequence[Dump]) -> Iterator[tuple[Merged, int]]:
    """Every table of a base with the increments after it, and the bytes of its files."""
    base, *increments = entries
    for table in base.tables:
        twins = [_twin(table, increment) for increment in increments]
        yield Merged(table, twins), sum(stored.bytes for stored in (table, *twins))


def _twin(table: DumpTable, increment: Dump) -> DumpTable:
    named = increment.get(table.collection, {})
    if table.name not in named:
        raise CheckpointError(f"{increment.path}: table {table.name!r} of {table.collection!r} is missing")
    return named[table.name]
