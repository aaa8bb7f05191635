"""Whether rows of a dump may become rows of a table, and how: decided before the first row is placed.

| differs          | rows                     | optimizer states (optim=True)                          |
|------------------|--------------------------|--------------------------------------------------------|
| dim              | refused                  |                                                        |
| dtype            | rounded                  | read                                                   |
| optimizer        | read                     | refused, or fresh with `allow_other_optimizer`         |
| score strategy   | read, with fresh scores  | read                                                   |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.admission import (
    Counters,
    admission_file,
    changes_file,
    require_counters,
    stored_counters,
    stored_counts,
)
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.reading import DumpTable
from embstore.checkpoint.shared import chosen, stored_shared
from embstore.checkpoint.spec import CLOCK_STRATEGIES, ORIGINAL_TYPES, TableSpec
from embstore.distributed.ranks import Ranks
from embstore.exact_counts import Counts
from embstore.formats.dynamicemb import other_optimizer
from embstore.ownership import AnyOwnership, owner
from embstore.rows import Rows
from embstore.table import Table

MOST_SCORE = (1 << 64) - 1
# Strategies whose next score goes on from that of the dump.
CARRIED_SCORES = ("step", "customized", "aged_lfu", "importance")
MOST_STEP = (1 << 62) - 1


@dataclass(frozen=True)
class Match:
    """A stored table and the table that its rows go to.

    optim          whether the states of the dump are used; else they start fresh
    keep_scores    whether the scores of the dump are used; else they start fresh
    same_partition  whether the dump keeps the rows of this rank together
    fresh          the optimizer state of a new row
    counters       attributes of the table to set when its rows are there
    admission      counters of keys without a row, or None
    admission_changes  of an increment: what changed of these counters, or None
    shared         shared rows by number, or None to leave those of the table
    counts         for Table.exact_counts: all of a dump, or what an increment changes; None to leave them
    notes          what the user should know: not everything came along
    """

    stored: DumpTable
    table: Table
    ownership: AnyOwnership
    optim: bool
    keep_scores: bool
    same_partition: bool
    fresh: npt.NDArray[np.float32]
    counters: dict[str, Any]
    admission: Counters | None = None
    admission_changes: Counters | None = None
    counts: Counts | None = None
    shared: Rows | None = None
    notes: list[str] = field(default_factory=list)

    def assign(self, rows: Rows) -> None:
        """Writes rows of the dump into the table."""
        table = self.table
        default = 1 if table.options.score_strategy.name == "LFU" else max(table.score, 1)
        scores = np.full(len(rows), default, np.uint64)
        if self.keep_scores:
            scores = np.where(rows.scores == 0, scores, rows.scores)
        states = rows.states if self.optim else np.broadcast_to(self.fresh, (len(rows), len(self.fresh)))
        table.insert_or_assign(rows.keys, rows.values, states=states, scores=scores)
        if table.counts_uses and rows.uses is not None:
            known = rows.uses > 0  # 0: of a row that was in a store
            table.set_uses(rows.keys[known], rows.uses[known])

    def restore(self) -> None:
        """Sets the counters of the table; `fit` has checked them."""
        table = self.table
        for name, value in self.counters.items():
            if name == "seed":
                table.reseed(value)
            else:
                setattr(table, name, value)
        self.restore_admission()
        if self.shared is not None:
            states = self.shared.states if self.optim else None
            table.assign_shared_rows(self.shared.keys, self.shared.values, states)

    def restore_admission(self) -> None:
        """Sets the counters of keys without a row, or applies what an increment says of them."""
        table = self.table
        if self.admission is not None and not table.restore_admission_counters(self.admission):
            self.notes.append(_recounted(self.stored))
        if self.admission_changes is not None:  # the base has told if they do not fit
            table.apply_admission_changes(self.admission_changes)

    def restore_counts(self) -> None:
        """Makes the exact counts of the table those of the dump, or changes them as an increment says."""
        exact = self.table.exact_counts
        if exact is None or self.counts is None:
            return
        if self.stored.is_increment:
            exact.apply_changes(*self.counts)
        else:
            exact.replace(*self.counts)

    def warn(self) -> None:
        for note in self.notes:
            warnings.warn(note, stacklevel=3)


def fit(
    stored: DumpTable,
    table: Table,
    optim: bool,
    ranks: Ranks,
    ownership: AnyOwnership,
    *,
    allow_other_optimizer: bool = False,
    counts: bool = True,
) -> Match:
    """How the rows go into the table. Raises CheckpointError where they do not fit."""
    spec = TableSpec.of(table)
    notes: list[str] = []
    other = _optimizer_of(stored) if optim and allow_other_optimizer and _differs(stored, spec) else ""
    if other:
        optim = False
        notes.append(
            f"optimizer states of table {spec.name!r} start fresh: those of {stored.folder} are of "
            f"{other!r}, the table's of {spec.engine_optimizer!r}"
        )
    _require_rows(stored, spec, optim)
    theirs, keep_scores = _scores_fit(stored, spec)
    if stored.found.other_scores:
        notes.append(
            f"scores of table {spec.name!r} start fresh: those of {stored.folder} have another number of "
            f"words a key"
        )
    if not keep_scores and theirs and stored.rows:
        notes.append(
            f"scores of table {spec.name!r} start fresh: those of {stored.folder} follow the strategy "
            f"{theirs!r}, those of the table {spec.score_strategy!r}"
        )
    of, entry = stored.manifest, stored.entry
    alike = of is not None and of.world == ranks.world and entry is not None and entry.ownership == ownership
    match = Match(
        stored,
        table,
        ownership,
        optim,
        keep_scores and stored.has_scores,
        alike,
        _fresh_state(spec),
        _counters(stored, table, optim, keep_scores),
        notes=notes,
        counts=_counts(stored, ranks, ownership) if counts and table.exact_counts is not None else None,
    )
    return replace(
        match,
        admission=_admission(match, admission_file, ranks),
        admission_changes=_admission(match, changes_file, ranks),
        shared=_shared(match, ranks),
    )


def _optimizer_of(stored: DumpTable) -> str:
    if stored.spec:
        return stored.spec.engine_optimizer
    return str(stored.found.arguments.get("opt_type", "")) or "another optimizer"


def _differs(stored: DumpTable, table: TableSpec) -> bool:
    """Whether the dump has states of another optimizer than the table's."""
    if stored.spec:
        return table.engine_optimizer != stored.spec.engine_optimizer
    if "opt_type" in stored.found.arguments:
        return other_optimizer(stored.found.arguments, table)
    ours = {name for name, _, _ in table.file_states()}
    return any(part.states and set(part.states) != ours for part in stored.found.parts)


def _counts(stored: DumpTable, ranks: Ranks, ownership: AnyOwnership) -> Counts:
    """How often the keys of this rank were seen that have no row."""
    keys, counts = stored_counts(stored)
    mine = owner(keys, ranks.world, ownership) == ranks.rank
    return keys[mine], counts[mine]


def _require_rows(stored: DumpTable, table: TableSpec, optim: bool) -> None:
    place_of = f"{stored.folder / file_stem(stored.name)}"

    def check(what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise CheckpointError(
                f"{place_of}: {what} of table {table.name!r} is {ours!r} but that of the dump is: {theirs!r}"
            )

    if stored.spec:
        check("dim", table.dim, stored.spec.dim)
        if optim:
            check("optimizer", table.engine_optimizer, stored.spec.engine_optimizer)
    elif optim and "opt_type" in stored.found.arguments and table.engine_optimizer in ORIGINAL_TYPES:
        check("opt_type", table.original_arguments("")["opt_type"], stored.found.arguments["opt_type"])
    if not optim or not stored.rows:
        return
    for part in stored.found.parts:
        missing = [name for name, _, _ in table.file_states() if name not in part.states]
        if missing:
            raise CheckpointError(
                f"{place_of}: has no optimizer states ({', '.join(missing)}): it was dumped without optim"
            )
        for name, _, width in table.file_states():
            state = part.states[name]
            if state.width != width or (part.rows and not state.row_width):
                raise CheckpointError(
                    f"{state.path}: state {name!r} of table {table.name!r} is {width} wide "
                    f"but that of the dump is: {state.width}"
                )


def _scores_fit(stored: DumpTable, table: TableSpec) -> tuple[str, bool]:
    """The strategy of the dump, if it says so, and whether its scores mean something in the table."""
    if stored.spec:
        theirs = stored.spec.score_strategy
        return theirs, scores_carry(theirs, table.score_strategy)
    theirs = str(stored.found.arguments.get("evict_strategy", ""))
    if table.score_strategy == "no_eviction":  # its scores are row numbers in the original package
        return "", stored.keeps_ages
    same = theirs in ("", table.original_arguments("")["evict_strategy"])
    return theirs, same or table.score_strategy == "customized"


def scores_carry(theirs: str, ours: str) -> bool:
    """Whether scores of one strategy mean something under another: moments of a clock do under the other
    strategy with a clock, and customized scores are any numbers, so that all keep their order."""
    clocks = theirs in CLOCK_STRATEGIES and ours in CLOCK_STRATEGIES
    return theirs == ours or clocks or ours == "customized"


def _counters(stored: DumpTable, table: Table, optim: bool, keep_scores: bool) -> dict[str, Any]:
    """Score, step, learning rate and seed, as far as the dump has them."""
    spec, arguments = stored.spec, stored.found.arguments
    path = stored.folder / f"{file_stem(stored.name)}_opt_args.json"

    def number(name: str, most: int) -> int:
        value = arguments.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise CheckpointError(f"{path}: {name} should be a number from 0 to {most} but is: {value!r}")
        return int(value)

    found: dict[str, Any] = {}
    strategy = table.options.score_strategy.name.lower()
    score = spec.score if spec and spec.score_strategy == strategy else 0
    if spec is None:
        step_score = number("step_score", MOST_SCORE)  # of LFU it is how much a use counts, and no moment
        score = 0 if table.options.score_strategy.ages else step_score
    if strategy == "step" and keep_scores and not score and stored.rows and stored.has_scores:
        score = int(max(r.scores(0, r.part.rows).max(initial=0) for r in stored.readers)) + 1
    if score and keep_scores and strategy in CARRIED_SCORES:
        found["score"] = min(score, MOST_SCORE)
    if not optim:
        return found
    if spec:
        found["seed"], found["optimizer_step"] = spec.seed, spec.optimizer_step
        rate: object = spec.learning_rate
    else:
        if "iters" in arguments:
            found["optimizer_step"] = number("iters", MOST_STEP)
        rate = arguments.get("lr", table.learning_rate)
    try:
        replace(table.options.optimizer, lr=rate)  # type: ignore[arg-type]
        replace(table.options, seed=found.get("seed", table.options.seed))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    found["learning_rate"] = float(rate)  # type: ignore[arg-type]
    return found


def _admission(match: Match, file_of: Callable[[str, int, int], str], ranks: Ranks) -> Counters | None:
    """How often keys without a row were seen. Counters know no keys, so they cannot be redistributed."""
    stored = match.stored
    if not match.table.options.counts_keys or stored.manifest is None:
        return None
    world = stored.manifest.world
    names = [file_of(stored.name, rank, world) for rank in range(world)]
    if not any(name in stored.files() for name in names):
        return None
    if not match.same_partition or names[ranks.rank] not in stored.files():
        match.notes.append(_recounted(stored))
        return None
    counters = stored_counters(stored, names[ranks.rank])
    path = stored.folder / names[ranks.rank]
    require_counters(match.table, counters, file_of is changes_file, path)
    return counters


def _shared(match: Match, ranks: Ranks) -> Rows | None:
    """What the shared rows of the table become."""
    found, spec = stored_shared(match.stored), match.stored.spec
    if found is None or spec is None:
        return None
    if not match.table.options.shared_rows:
        if any(len(rows) for rows in found):
            match.notes.append(
                f"shared rows of {match.stored.folder} are not loaded: table {match.stored.name!r} has none; "
                "ids without a row of their own read 0.0"
            )
        return None
    wanted = TableSpec.of(match.table)
    return chosen(spec, found, wanted, ranks.rank, ranks.world, match.same_partition)


def _recounted(stored: DumpTable) -> str:
    return (
        f"admission counters of table {stored.name!r} are not loaded: those of {stored.folder} are for "
        "another world size, ownership or admission_threshold; keys without a row are counted from 0"
    )


def _fresh_state(spec: TableSpec) -> npt.NDArray[np.float32]:
    """The optimizer state of a new row."""
    optimizer = spec.optimizer_object()
    state = [
        np.full(width, optimizer.initial_accumulator if name in ("sum", "accumulator") else 0.0, np.float32)
        for name, width in spec.states
    ]
    return np.concatenate(state) if state else np.empty(0, np.float32)
