"""Loading a dump of any layout and world size into tables.

Sizes and descriptions are checked on all ranks before the first row is placed, and checksums too where the
tables have rows. Empty tables are filled while the checksums are taken, and emptied again if one is wrong.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.dumping import OwnershipOf, Tables, ownership_of
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.ranks import CheckpointError, Ranks, ranks_of
from embstore.checkpoint.reading import Dump, DumpTable, PartReader, PartSums, Pieces, verify
from embstore.checkpoint.sources import block_rows
from embstore.checkpoint.spec import ORIGINAL_TYPES, TableSpec
from embstore.checkpoint.writing import admission_file
from embstore.options import ScoreStrategy
from embstore.ownership import Ownership, owner
from embstore.table import Rows, Table


def load(
    path: str | os.PathLike[str],
    tables: Tables,
    *,
    optim: bool = False,
    group: Any = None,
    ownership: OwnershipOf = Ownership.ROUNDROBIN,
    check: bool = True,
) -> None:
    """Reads tables from a dump: rows of keys that are there are replaced, others are added.

    Called on all ranks of `group`, each with its own tables; a row goes to the rank that owns its key,
    whatever the world size of the dump. With optim, optimizer states, step, learning rate and seed are
    read too, so that training continues as if it had not stopped; without, states start fresh.

        embstore.load("/data/monday", {"model": {"user": table}}, optim=True)
    """
    ranks = ranks_of(group, "load()")
    pairs: list[tuple[DumpTable, Table]] = []

    def open_all() -> None:
        pairs.extend(open_tables(Path(path), tables, optim))

    def owners() -> list[Ownership]:
        return [ownership_of(ownership, stored.collection, stored.name) for stored, _ in pairs]

    def may_undo() -> bool:
        return all(
            stored.entry is not None
            and table.store is None
            and len(table) == 0
            and written_alike(stored, ranks, by)
            and not may_overflow(stored, table, ranks, by)
            for (stored, table), by in zip(pairs, owners())
        )

    ranks.agree(open_all)
    everything = [stored for stored, _ in pairs]
    # Empty tables can be made empty again, so their rows may come before the verdict about the files.
    one_pass = check and all(ranks.agree(may_undo))
    if check and not one_pass:
        verify(everything, ranks)

    def place_all() -> Pieces:
        sums: Pieces = {}
        for (stored, table), by in zip(pairs, owners()):
            place(stored, table, optim, ranks, by, sums if one_pass else None)
        return sums

    try:
        sums = ranks.agree(place_all)
        if one_pass:
            verify(everything, ranks, sums)
    except BaseException:
        if one_pass:
            for _, table in pairs:
                table.clear()
        raise

    def restore_all() -> None:
        for (stored, table), by in zip(pairs, owners()):
            restore_counters(stored, table, optim)
            restore_admission(stored, table, ranks, by)

    ranks.agree(restore_all)


def open_tables(path: Path, tables: Tables, optim: bool) -> list[tuple[DumpTable, Table]]:
    """The stored twin of every table. Raises CheckpointError where one is missing or does not fit."""
    if not path.is_dir():
        raise FileNotFoundError(f"path should be the folder of a dump but is: {path}")
    expected = {c: {n: TableSpec.of(t) for n, t in named.items()} for c, named in tables.items()}
    wanted = Dump(path, expected, states=optim)
    pairs = []
    for collection, named in tables.items():
        if collection not in wanted:
            raise CheckpointError(f"{path / file_stem(collection)}: is missing, the folder of a collection")
        for name, table in named.items():
            if name not in wanted[collection]:
                raise CheckpointError(
                    f"{path / file_stem(collection) / file_stem(name)}_keys: is missing, table {name!r} "
                    f"is not in the dump"
                )
            stored = wanted[collection][name]
            require_fit(stored, expected[collection][name], optim)
            pairs.append((stored, table))
    return pairs


def require_fit(stored: DumpTable, table: TableSpec, optim: bool) -> None:
    """Raises unless rows of the dump may become rows of the table."""
    place_of = f"{stored.folder / file_stem(stored.name)}"

    def check(what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise CheckpointError(
                f"{place_of}: {what} of table {table.name!r} is {ours!r} but that of the dump is: {theirs!r}"
            )

    arguments = stored.found.arguments
    if stored.spec:
        check("dim", table.dim, stored.spec.dim)
        check("dtype", table.dtype, stored.spec.dtype)
        check("score_strategy", table.score_strategy, stored.spec.score_strategy)
        if optim:
            check("optimizer", table.engine_optimizer, stored.spec.engine_optimizer)
    else:
        ours = table.original_arguments("")
        if "evict_strategy" in arguments:
            check("evict_strategy", ours["evict_strategy"], arguments["evict_strategy"])
        if optim and "opt_type" in arguments and table.engine_optimizer in ORIGINAL_TYPES:
            check("opt_type", ours["opt_type"], arguments["opt_type"])
    if optim:
        names = [name for name, _, _ in table.file_states()]
        missing = [name for name in names if name not in stored.found.parts[0].states]
        if missing and stored.rows:
            raise CheckpointError(
                f"{place_of}: has no optimizer states ({', '.join(missing)}): it was dumped without optim"
            )
        for name, _, width in table.file_states():
            for part in stored.found.parts if stored.rows else []:
                if part.states[name].width < width or (part.rows and not part.states[name].row_width):
                    raise CheckpointError(
                        f"{part.states[name].path}: state {name!r} should be {width} wide but is: "
                        f"{part.states[name].width}"
                    )


def place(
    stored: DumpTable,
    table: Table,
    optim: bool,
    ranks: Ranks,
    ownership: Ownership,
    sums: Pieces | None = None,
) -> None:
    """Puts the rows of this rank into the table. Adds the checksums of what was read to `sums`."""
    room = min(table.stats().max_capacity, max(len(table), stored.rows // ranks.world))
    table.reserve(room)
    place_blocks(stored, table, optim, ranks, ownership, fresh_state(TableSpec.of(table)), sums)


def place_blocks(
    stored: DumpTable,
    table: Table,
    optim: bool,
    ranks: Ranks,
    ownership: Ownership,
    fresh: npt.NDArray[np.float32],
    sums: Pieces | None = None,
) -> None:
    """Assigns the rows of this rank. Without optim their states become `fresh`."""
    spec = TableSpec.of(table)
    default_score = max(table.score, 1) if spec.score_strategy != "lfu" else 1
    if may_overflow(stored, table, ranks, ownership):
        blocks = ascending_blocks(stored, ranks, ownership, table.options.bucket_capacity)
    else:
        blocks = owned_blocks(stored, ranks, ownership, block_rows(spec), sums)
    # The next block is read while this one is placed.
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, blocks, None)
        while (rows := ahead.result()) is not None:
            ahead = pool.submit(next, blocks, None)
            scores = rows.scores if stored.has_scores else np.full(len(rows), default_score, np.uint64)
            states = rows.states if optim else np.broadcast_to(fresh, (len(rows), len(fresh)))
            table.insert_or_assign(rows.keys, rows.values, states=states, scores=np.maximum(scores, 1))


def fresh_state(spec: TableSpec) -> npt.NDArray[np.float32]:
    """The optimizer state of a new row."""
    optimizer = spec.optimizer_object()
    state = [
        np.full(width, optimizer.initial_accumulator if name in ("sum", "accumulator") else 0.0, np.float32)
        for name, width in spec.states
    ]
    return np.concatenate(state) if state else np.empty(0, np.float32)


def written_alike(stored: DumpTable, ranks: Ranks, ownership: Ownership) -> bool:
    """Whether the dump keeps the rows of this rank together: as many ranks wrote it, with the same owners."""
    of, entry = stored.manifest, stored.entry
    return of is not None and of.world == ranks.world and entry is not None and entry.ownership == ownership


def may_overflow(stored: DumpTable, table: Table, ranks: Ranks, ownership: Ownership) -> bool:
    """Whether buckets may be too small for the rows that come: not where they come from the same buckets, nor
    where the table stays half empty."""
    most, spec = table.stats().max_capacity, stored.spec
    if not stored.has_scores or table.options.score_strategy == ScoreStrategy.NO_EVICTION:
        return False
    same_buckets = (
        spec is not None
        and len(table) == 0
        and written_alike(stored, ranks, ownership)
        and (spec.max_capacity, spec.bucket_capacity)
        == (table.options.max_capacity, table.options.bucket_capacity)
    )
    return not same_buckets and len(table) + stored.rows // ranks.world > most // 2


def owned_blocks(
    stored: DumpTable,
    ranks: Ranks,
    ownership: Ownership,
    rows_at_once: int,
    sums: Pieces | None = None,
) -> Iterator[Rows]:
    """The rows that belong to this rank, in blocks."""
    entry, same = stored.entry, written_alike(stored, ranks, ownership)
    for reader in stored.readers:
        begin, end = 0, reader.part.rows
        if same and entry and reader.part.rank is None:
            begin = sum(entry.rows_of_rank[: ranks.rank])
            end = begin + entry.rows_of_rank[ranks.rank]
        elif same and reader.part.rank != ranks.rank:
            continue
        summing = None if sums is None else PartSums(reader.part)
        try:
            for first in range(begin, end, rows_at_once):
                last = min(first + rows_at_once, end)
                if summing is not None:
                    summing.add(first, last)
                mine = None if same else _mine(reader, first, last, ranks, ownership)
                rows = reader.read(first, last, mine)
                if len(rows):
                    yield rows
        finally:
            if summing is not None and sums is not None:
                summing.close()
                sums |= summing.pieces


def ascending_blocks(
    stored: DumpTable, ranks: Ranks, ownership: Ownership, rows_at_once: int
) -> Iterator[Rows]:
    """The rows of this rank, the smallest scores first, so that a full bucket ends with its highest. No more
    at once than a bucket has room for: keys of one call do not make way for each other."""
    parts, places, scores = [], [], []
    for number, reader in enumerate(stored.readers):
        mine = _mine(reader, 0, reader.part.rows, ranks, ownership)
        of_part = np.arange(reader.part.rows) if mine is None else np.flatnonzero(mine)
        parts.append(np.full(len(of_part), number, np.int32))
        places.append(of_part)
        scores.append(reader.scores(0, reader.part.rows)[of_part])
    part, row = np.concatenate(parts), np.concatenate(places)
    order = np.argsort(np.concatenate(scores), kind="stable")
    for first in range(0, len(order), rows_at_once):
        now = order[first : first + rows_at_once]
        yield Rows.concatenate(
            [stored.readers[n].take(row[now[part[now] == n]]) for n in np.unique(part[now])]
        )


def _mine(
    reader: PartReader, begin: int, end: int, ranks: Ranks, ownership: Ownership
) -> npt.NDArray[np.bool_] | None:
    if ranks.world == 1:
        return None
    mask: npt.NDArray[np.bool_] = owner(reader.keys[begin:end], ranks.world, ownership) == ranks.rank
    return mask


def restore_counters(stored: DumpTable, table: Table, optim: bool) -> None:
    """Score, step, learning rate and seed, as far as the dump has them."""
    spec, arguments = stored.spec, stored.found.arguments
    strategy = table.options.score_strategy
    score = spec.score if spec else int(arguments.get("step_score", 0))
    if strategy == ScoreStrategy.STEP and not score and stored.rows and stored.has_scores:
        score = int(max(reader.scores(0, reader.part.rows).max() for reader in stored.readers)) + 1
    if score and strategy in (ScoreStrategy.STEP, ScoreStrategy.CUSTOMIZED):
        table.score = score
    if not optim:
        return
    if spec:
        table.optimizer_step = spec.optimizer_step
        table.learning_rate = spec.learning_rate
        table.reseed(spec.seed)
        return
    table.optimizer_step = int(arguments.get("iters", table.optimizer_step))
    table.learning_rate = float(arguments.get("lr", table.learning_rate))


def restore_admission(stored: DumpTable, table: Table, ranks: Ranks, ownership: Ownership) -> None:
    """How often keys without a row were seen. Counters know no keys, so they can not be shared out anew."""
    if not table.options.admission_threshold or stored.manifest is None:
        return
    world = stored.manifest.world
    names = [admission_file(stored.name, rank, world) for rank in range(world)]
    if not any(name in stored.files() for name in names):
        return
    fits = written_alike(stored, ranks, ownership) and names[ranks.rank] in stored.files()
    if fits and table.restore_admission_counters(np.fromfile(stored.folder / names[ranks.rank], "<u2")):
        return
    if ranks.rank == 0:
        warnings.warn(
            f"admission counters of table {stored.name!r} are not loaded: those of {stored.folder} are for "
            "another world size, ownership or admission_threshold; keys without a row are counted anew",
            stacklevel=2,
        )
