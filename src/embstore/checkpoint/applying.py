"""Entries of an increment log on their way into tables: checked, read, and only then applied.

Change         one increment into tables that are at the number before
Replacement    a whole chain, built beside the tables that it replaces
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from embstore.checkpoint.dumping import Tables
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.fitting import Match, fit
from embstore.checkpoint.loading import ascending_rows, may_overflow, owned_blocks, place
from embstore.checkpoint.log_entries import identities, optim_of, ownership_in
from embstore.checkpoint.merging import all_keys, removed_keys
from embstore.checkpoint.reading import Dump, verify
from embstore.checkpoint.sources import block_rows
from embstore.checkpoint.spec import TableSpec
from embstore.distributed.ranks import Ranks
from embstore.exact_counts import Counts, with_changes
from embstore.ownership import owner
from embstore.rows import Rows
from embstore.table import Table


class Change:
    """An increment in memory. `state` names what the tables are at when it is applied."""

    def __init__(self, path: Path, number: int, tables: Tables, ranks: Ranks, optim: bool) -> None:
        self._ranks = ranks
        self._matches: list[Match] = []
        self._read: list[list[Rows]] = []
        self.state: frozenset[str] = frozenset()

        def open_increment() -> None:
            dump = Dump(path)
            self.state = identities(dump, number)
            self._matches = _matches(dump, tables, ranks, optim)

        def read() -> None:
            self._read = [list(_blocks(match, ranks)) for match in self._matches]

        ranks.agree(open_increment)
        verify([match.stored for match in self._matches], ranks)
        ranks.agree(read)

    def apply(self) -> None:
        """Changes the tables. Where this fails, for want of memory or in a store, it may be tried again."""

        def apply_all() -> None:
            for match, blocks in zip(self._matches, self._read):
                _apply(match, blocks, self._ranks)
                match.restore()
                match.restore_counts()

        self._ranks.agree(apply_all)


class Replacement:
    """Tables as the entries of a log say. The tables themselves change in `publish` alone, but for those over
    a store, whose rows are replaced one by one."""

    def __init__(self, chain: list[Dump], tables: Tables, ranks: Ranks, optim: bool) -> None:
        self._rank = ranks.rank
        self._built: list[tuple[Table, Match]] = []  # what is replaced, and the newest entry by what
        self._counts: list[tuple[Table, Counts]] = []
        entries: list[list[Match]] = []

        def check() -> None:
            entries.extend(_matches(dump, tables, ranks, optim) for dump in chain)

        def build() -> None:
            for base, *increments in zip(*entries):
                self._counts.extend(_counts(base, increments))
                self._built.append((base.table, _build(base, increments, ranks)))

        ranks.agree(check)
        verify([match.stored for entry in entries for match in entry], ranks)
        self._notes = entries[0]
        ranks.agree(build)

    def publish(self) -> None:
        """Gives the tables their new rows, each in one step."""
        for table, newest in self._built:
            if newest.table is not table:
                table.exchange(newest.table)
        for table, counts in self._counts:
            assert table.exact_counts is not None
            table.exact_counts.replace(*counts)
        if self._rank == 0:
            for match in self._notes:
                match.warn()


def _matches(dump: Dump, tables: Tables, ranks: Ranks, optim: bool) -> list[Match]:
    ownership, found = ownership_in(dump), []
    optim = optim and optim_of(dump)
    for collection, named in tables.items():
        for name, table in named.items():
            if collection not in dump or name not in dump[collection]:
                raise CheckpointError(f"{dump.path}: table {name!r} of {collection!r} is missing")
            found.append(fit(dump[collection][name], table, optim, ranks, ownership[collection][name]))
    return found


def _counts(base: Match, increments: list[Match]) -> Iterator[tuple[Table, Counts]]:
    """What the exact counts of a table become, if it has any."""
    if base.counts is not None:
        counts = base.counts
        for increment in increments:
            assert increment.counts is not None
            counts = with_changes(counts, increment.counts)
        yield base.table, counts


def _build(base: Match, increments: list[Match], ranks: Ranks) -> Match:
    table = base.table
    if table.store is None:
        table = Table(table.options)
        base = replace(base, table=table)
    else:
        _erase_others(table, base, increments)
    place(base, ranks)
    base.restore()
    newest = base
    for increment in increments:
        newest = replace(increment, table=table)
        _apply(newest, _blocks(newest, ranks), ranks)
        if increment is not increments[-1]:
            newest.restore_admission()
    newest.restore()
    return newest


def _erase_others(table: Table, base: Match, increments: list[Match]) -> None:
    """Erases the keys that are not in the log."""
    keys = np.unique(all_keys(base.stored))
    for increment in increments:
        keys = np.setdiff1d(keys, removed_keys(increment.stored), assume_unique=True)
        keys = np.union1d(keys, all_keys(increment.stored))
    here = [rows.keys for rows in table.export(with_values=False, with_states=False)]
    table.erase(np.setdiff1d(np.concatenate(here), keys))


def _blocks(match: Match, ranks: Ranks) -> Iterable[Rows]:
    return owned_blocks(match, ranks, block_rows(TableSpec.of(match.table)))


def _apply(match: Match, blocks: Iterable[Rows], ranks: Ranks) -> None:
    table, removed = match.table, removed_keys(match.stored)
    table.erase(removed[owner(removed, ranks.world, match.ownership) == ranks.rank])
    if may_overflow(match, ranks):
        blocks = list(blocks)
        rows = Rows.concatenate(blocks) if blocks else None
        blocks = ascending_rows(rows, table.options.bucket_capacity) if rows else []
    for block in blocks:
        match.assign(block)
