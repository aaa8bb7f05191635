"""What a dump keeps beside rows, for variables whose options decide which rows stay.

    weights/user_0-score                          header, then the score of each row (uint64)
    weights/user_0-shared.rank_0.world_size_2     records: int64 number | float32 vector | float32 state
    weights/user_0-admission.rank_0.world_size_2  counters of keys without a row (uint16)

The manifest has the clock of the scores. The last two are in the format of embstore's own dumps; see
docs/formats.md. A plain variable has none of them: its files are those of the original.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import embstore
from embstore.checkpoint.admission import restore_counters
from embstore.checkpoint.shared import as_records, chosen, read_records
from embstore.checkpoint.spec import TableSpec
from embstore.formats.sok import TableReader

# Options of a variable that the original package does not have; see embstore.TableOptions.
OPTIONS = ("shared_rows", "start_from_shared", "admission", "half_life", "ttl", "max_bytes")
EVICT_STRATEGIES = {"kLru": "timestamp", "kLfu": "lfu", "kStep": "step", "kImportance": "importance"}

_CLOCKS = (embstore.ScoreStrategy.TIMESTAMP, embstore.ScoreStrategy.NO_EVICTION)


def keeps_more(table: embstore.Table) -> bool:
    """Whether rows alone do not say what the table does next."""
    options = table.options
    return options.score_strategy not in _CLOCKS or options.ttl is not None or options.shared_rows > 0


def require_clock(table: embstore.Table) -> None:
    """Raises ValueError unless scores are moments, which thresholds can be compared with."""
    strategy = table.options.score_strategy
    if strategy not in _CLOCKS:
        raise ValueError(
            f"sok_vars should have evict_strategy 'kLru', whose rows know when they were used, but "
            f"{table.name!r} follows: {strategy.name.lower()!r}"
        )


def facts_of(table: embstore.Table, with_states: bool) -> dict[str, Any]:
    """What the manifest says about a table."""
    options = table.options
    facts: dict[str, Any] = {"score_strategy": options.score_strategy.name.lower()}
    if options.score_strategy not in (*_CLOCKS, embstore.ScoreStrategy.LFU):
        facts["score"] = table.score
    if options.shared_rows:
        facts["shared_rows"] = options.shared_rows
        facts["state_width"] = table.state_width if with_states else 0
    return facts


def arrays_of(table: embstore.Table, with_states: bool) -> dict[str, np.ndarray]:
    """What this rank has besides rows and scores, by the kind of file."""
    arrays = {}
    if table.options.shared_rows:
        arrays["shared"] = as_records(table.shared_rows(), with_states).reshape(-1).view(np.uint8)
    counters = table.admission_counters()
    if counters is not None:
        arrays["admission"] = counters.view(np.uint8)
    return arrays


def largest_scores(table: embstore.Table, rows: int) -> np.ndarray | None:
    """The keys of the so many largest scores; None where they are all."""
    if len(table) <= rows:
        return None
    blocks = list(table.export(with_values=False, with_states=False))
    keys, scores = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("keys", "scores"))
    return keys[np.lexsort((keys, scores))[-rows:]]


def copy_kept(old: embstore.Table, new: embstore.Table) -> None:
    """What a table knows besides its rows, for one that takes its place with another optimizer."""
    if old.options.score_strategy not in (*_CLOCKS, embstore.ScoreStrategy.LFU):
        new.score = old.score
    shared, counters = old.shared_rows(), old.admission_counters()
    if len(shared):
        new.assign_shared_rows(shared.keys, shared.values, None)
    if counters is not None:
        new.restore_admission_counters(counters)


def same_scores(table: embstore.Table, facts: dict[str, Any]) -> bool:
    """Whether scores of a dump mean the same in this table."""
    return facts.get("score_strategy") == table.options.score_strategy.name.lower()


def restore(
    table: embstore.Table, stored: TableReader, facts: dict[str, Any], rank: int, world: int, wrote: int
) -> None:
    """Goes on as the table that was dumped, once its rows are there."""
    if same_scores(table, facts) and "score" in facts:
        table.score = max(int(facts["score"]), table.score)
    counters = stored.part("admission", rank, world) if wrote == world else None
    if counters is not None and table.options.counts_keys:
        restore_counters(table, counters, stored.part_path("admission", rank, world))
    if table.options.shared_rows and "shared_rows" in facts:
        wanted = TableSpec.of(table)
        spec = dataclasses.replace(wanted, shared_rows=int(facts["shared_rows"]))
        width = int(facts["state_width"])
        parts = {
            stored.part_path("shared", of, wrote): stored.part("shared", of, wrote) for of in range(wrote)
        }
        ranks = [read_records(part, spec, width, path) for path, part in parts.items() if part is not None]
        if len(ranks) == wrote:
            rows = chosen(spec, ranks, wanted, rank, world, alike=wrote == world)
            fits = width == table.state_width
            table.assign_shared_rows(rows.keys, rows.values, rows.states if fits else None)
