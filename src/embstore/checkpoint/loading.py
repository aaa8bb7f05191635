"""Loading a dump of any layout and world size into tables.

Descriptions, sizes and counters are checked on all ranks before the first row is placed, and checksums too
where the tables have rows. Empty tables are filled while the checksums are taken, and emptied again if one is
wrong.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from embstore.checkpoint.dumping import OwnershipOf, Tables, ownership_of
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.fitting import Match, fit
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.parts import Array, Choose, Pieces
from embstore.checkpoint.reading import Dump, DumpTable, verify
from embstore.checkpoint.remote import RemoteFolder, is_remote, local_copy
from embstore.checkpoint.sources import block_rows
from embstore.checkpoint.spec import TableSpec
from embstore.distributed.ranks import Ranks, ranks_of
from embstore.durations import measured
from embstore.options import ScoreStrategy
from embstore.ownership import Ownership, owner
from embstore.progress import Progress, Wanted, shown
from embstore.rows import Rows
from embstore.table import Table

ORDERED_ROWS = 65536  # read at once where rows are placed in the order of their scores


def load(
    path: str | os.PathLike[str],
    tables: Tables,
    *,
    optim: bool = False,
    group: Any = None,
    ownership: OwnershipOf = Ownership.ROUNDROBIN,
    check: bool = True,
    allow_missing: bool = False,
    allow_other_optimizer: bool = False,
    counts: bool = True,
    progress: Wanted = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Reads tables from a dump: rows of keys that are there are replaced, others are added.

    Called on all ranks of `group`, each with its own tables; a row goes to the rank that owns its key,
    whatever the world size of the dump. The dtype of the table may be another than that of the dump. Where
    the score strategies differ, scores start fresh. Warns with the number of rows that found no room.

    Args:
        path: folder of a dump.
        tables: tables by collection and name: {"model": {"user": table}}.
        optim: with optimizer states, step, learning rate and seed, so that training continues as if it had
            not stopped; without, states start fresh.
        group: a torch process group; None is the default one, or this process alone.
        ownership: how keys are spread over ranks: one rule, or one for each table.
        check: compares checksums.
        allow_missing: a table of which the dump has no file stays as it is, with a warning.
        allow_other_optimizer: states of another optimizer than the table's start fresh, with a warning.
        counts: `Table.exact_counts` of tables that have them become those of the dump.
        progress: True for a bar of tqdm on rank 0, or a function of (rows done, rows in all).
        storage_options: with a URL, passed to fsspec.

    Raises:
        CheckpointError: the dump is damaged or does not fit; no row has changed.
        FileNotFoundError: `path` is no folder.

    `path` may be a URL of fsspec, which gets storage_options; each host downloads the dump once.

    Examples:
        >>> import embstore, tempfile
        >>> table = embstore.Table("user", dim=2)
        >>> vectors = table.find_or_insert([7, -1])
        >>> folder = tempfile.mkdtemp() + "/monday"
        >>> embstore.dump(folder, {"model": {"user": table}}, optim=True)
        >>> again = embstore.Table("user", dim=2)
        >>> embstore.load(folder, {"model": {"user": again}}, optim=True)
        >>> sorted(again)
        [-1, 7]
    """
    ranks = ranks_of(group, "load()")
    with measured("load"), contextlib.ExitStack() as stack:
        if is_remote(path):
            remote = ranks.together(lambda: RemoteFolder(str(path), **(storage_options or {})))
            document = ranks.lead(remote.require_current)  # the same for all, whatever comes meanwhile
            folder = ranks.together(lambda: stack.enter_context(local_copy(remote, document)))
        elif storage_options:
            raise TypeError(f"storage_options should be given with a URL alone but path is: {path}")
        else:
            folder = Path(path)
        _load(
            folder,
            tables,
            optim,
            ranks,
            ownership,
            check,
            allow_missing,
            allow_other_optimizer,
            counts,
            progress,
        )


def _load(
    path: Path,
    tables: Tables,
    optim: bool,
    ranks: Ranks,
    ownership: OwnershipOf,
    check: bool,
    allow_missing: bool,
    allow_other_optimizer: bool,
    counts: bool,
    progress: Wanted,
) -> None:
    matches: list[Match] = []
    absent: list[tuple[str, Path]] = []

    def open_all() -> None:
        found, missing = find_tables(path, tables, optim)
        if missing and not allow_missing:
            (what, file), *_ = missing
            raise CheckpointError(f"{file}: is missing, {what} is not in the dump{_contents(path)}")
        absent.extend(missing)
        for collection, stored, table in found:
            matches.append(
                fit(
                    stored,
                    table,
                    optim,
                    ranks,
                    ownership_of(ownership, collection, table.name),
                    allow_other_optimizer=allow_other_optimizer,
                    counts=counts,
                )
            )

    def may_undo() -> bool:
        return all(
            match.stored.entry is not None
            and match.table.store is None
            and len(match.table) == 0
            and match.same_partition
            and not may_overflow(match, ranks)
            for match in matches
        )

    ranks.agree(open_all)
    everything = [match.stored for match in matches]
    # Empty tables can be made empty again, so their rows may come before the verdict about the files.
    one_pass = check and all(ranks.agree(may_undo))
    if check and not one_pass:
        with shown(progress, "verifying", rank=ranks.rank) as report:
            verify(everything, ranks, progress=report)

    def place_all(report: Progress | None) -> Pieces:
        sums: Pieces = {}
        placed = Placed(report, everything, ranks.world)
        for match in matches:
            place(match, ranks, sums if one_pass else None, placed)
        placed.end()
        return sums

    try:
        with shown(progress, "loading", rank=ranks.rank, unit=" rows") as report:
            sums = ranks.agree(lambda: place_all(report))
        if one_pass:
            verify(everything, ranks, sums)
    except BaseException:
        if one_pass:
            for match in matches:
                match.table.clear()
        raise
    for match in matches:
        match.restore()
        match.restore_counts()
        if ranks.rank == 0:
            match.warn()
    for what, file in absent if ranks.rank == 0 else []:
        warnings.warn(f"{what} is not in the dump and keeps its rows: {file} is missing", stacklevel=3)


def _contents(path: Path) -> str:
    """What a dump has, for a message; nothing where that is not known."""
    with contextlib.suppress(OSError, CheckpointError):
        labels = [table.label for table in Dump(path).tables]
        return f", which has: {', '.join(labels[:8])}{', …' if len(labels) > 8 else ''}"
    return ""


def find_tables(
    path: Path, tables: Tables, optim: bool
) -> tuple[list[tuple[str, DumpTable, Table]], list[tuple[str, Path]]]:
    """The collection and the stored twin of every table, and the tables without one with a file they lack."""
    expected = {c: {n: TableSpec.of(t) for n, t in named.items()} for c, named in tables.items()}
    stored = Dump(path, expected, states=optim)
    found, missing = [], []
    for collection, named in tables.items():
        folder = path / file_stem(collection)
        for name, table in named.items():
            if collection in stored and name in stored[collection]:
                found.append((collection, stored[collection][name], table))
            elif collection in stored:
                missing.append((f"table {name!r}", folder / f"{file_stem(name)}_keys"))
            else:
                missing.append((f"the collection of table {name!r}", folder))
    return found, missing


class Placed:
    """Counts the rows of this rank that are in their tables. Which rows belong to it is not known before, so
    the whole is a guess, put right at the end."""

    def __init__(self, report: Progress | None, tables: list[DumpTable], world: int) -> None:
        self._report, self._rows = report, 0
        self._expected = sum(table.rows for table in tables) // world

    def add(self, rows: int) -> None:
        self._rows += rows
        if self._report:
            self._report(self._rows, max(self._expected, self._rows))

    def end(self) -> None:
        if self._report:
            self._report(self._rows, self._rows)


def place(match: Match, ranks: Ranks, sums: Pieces | None = None, placed: Placed | None = None) -> None:
    """Puts the rows of this rank into the table. Adds the checksums of what was read to `sums`."""
    table, stored = match.table, match.stored
    table.reserve(min(table.stats().max_capacity, max(len(table), stored.rows // ranks.world)))
    if may_overflow(match, ranks):
        blocks = ascending_blocks(match, ranks)
    else:
        blocks = owned_blocks(match, ranks, block_rows(TableSpec.of(table)), sums)
    # The next block is read while this one is placed.
    with ThreadPoolExecutor(1) as pool, losses_told(table, stored.folder) as count:
        ahead = pool.submit(next, blocks, None)
        while (rows := ahead.result()) is not None:
            ahead = pool.submit(next, blocks, None)
            match.assign(rows)
            count(len(rows))
            if placed:
                placed.add(len(rows))


@contextlib.contextmanager
def losses_told(table: Table, whence: object) -> Iterator[Callable[[int], None]]:
    """Warns at the end of the block when rows found no room in a table without a store below it. Yields a
    function that counts the rows that came."""
    before, came = table.stats(), [0]

    def count(rows: int) -> None:
        came[0] += rows

    yield count
    now = table.stats()
    lost = now.evictions + now.refusals - before.evictions - before.refusals
    if lost and table.store is None:
        warnings.warn(
            f"table {table.name!r} has no room for {lost} of {came[0]} rows of {whence}: those with the "
            f"smallest scores were dropped; a larger max_capacity (now {now.max_capacity}) helps",
            stacklevel=4,
        )


def may_overflow(match: Match, ranks: Ranks) -> bool:
    """Whether buckets may be too small for the rows that come: not where they come from the same buckets, nor
    where the table stays half empty."""
    stored, table = match.stored, match.table
    most, spec = table.stats().max_capacity, stored.spec
    if not match.keep_scores or table.options.score_strategy == ScoreStrategy.NO_EVICTION:
        return False
    same_buckets = (
        spec is not None
        and len(table) == 0
        and match.same_partition
        and (spec.max_capacity, spec.bucket_capacity)
        == (table.options.max_capacity, table.options.bucket_capacity)
    )
    return not same_buckets and len(table) + stored.rows // ranks.world > most // 2


def owned_blocks(match: Match, ranks: Ranks, rows_at_once: int, sums: Pieces | None = None) -> Iterator[Rows]:
    """The rows that belong to this rank, in blocks."""
    entry, same = match.stored.entry, match.same_partition
    for reader in match.stored.readers:
        begin, end = 0, reader.part.rows
        if same and entry and reader.part.rank is None:
            begin = sum(entry.rows_of_rank[: ranks.rank])
            end = begin + entry.rows_of_rank[ranks.rank]
        elif same and reader.part.rank != ranks.rank:
            continue
        choose = None if same else _choose(match, ranks)
        with reader.kept_open():
            for first in range(begin, end, rows_at_once):
                rows = reader.read(first, min(first + rows_at_once, end), choose, sums)
                if len(rows):
                    yield rows


def ascending_blocks(match: Match, ranks: Ranks) -> Iterator[Rows]:
    """The rows of this rank, the smallest scores first, so that a full bucket ends with its highest. No more
    at once than a bucket has room for: keys of one call do not make way for each other."""
    readers, choose = match.stored.readers, _choose(match, ranks)
    parts, places, scores = [], [], []
    for number, reader in enumerate(readers):
        of_part = np.arange(reader.part.rows)
        if choose is not None:
            of_part = np.flatnonzero(choose(reader.keys(0, reader.part.rows)))
        parts.append(np.full(len(of_part), number, np.int32))
        places.append(of_part)
        worth = reader.worths if match.table.counts_uses else reader.scores
        scores.append(worth(0, reader.part.rows)[of_part])
    part, row = np.concatenate(parts), np.concatenate(places)
    order = np.argsort(np.concatenate(scores), kind="stable")
    for first in range(0, len(order), ORDERED_ROWS):
        now = order[first : first + ORDERED_ROWS]
        taken = [readers[n].take(row[now[part[now] == n]]) for n in np.unique(part[now])]
        yield from ascending_rows(Rows.concatenate(taken), match.table.options.bucket_capacity)


def ascending_rows(rows: Rows, rows_at_once: int) -> Iterator[Rows]:
    """Rows in small blocks, the smallest scores first."""
    order = np.argsort(rows.scores if rows.uses is None else rows.uses, kind="stable")
    for first in range(0, len(order), rows_at_once):
        yield rows[order[first : first + rows_at_once]]


def _choose(match: Match, ranks: Ranks) -> Choose | None:
    if ranks.world == 1:
        return None

    def mine(keys: Array) -> Array:
        return np.asarray(owner(keys, ranks.world, match.ownership) == ranks.rank)

    return mine
