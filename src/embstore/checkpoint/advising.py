"""What a dump or a log tells about the size of its tables.

for advice in advise(open_any("/data/log")):
    print(advice)

A log says which ids changed in each increment, so an id that comes back is seen. A dump says how often the
ids that it holds were used, if their scores count that; else only when they were used last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.advice import Advice, MissSample, Point, advice_from, capacities
from embstore.arrays import address
from embstore.checkpoint.merging import all_keys, removed_keys
from embstore.checkpoint.reading import DumpTable
from embstore.checkpoint.replaying import Replay
from embstore.checkpoint.spec import CLOCK_STRATEGIES
from embstore.formats.columns import Columns
from embstore.optimizers import SGD
from embstore.options import DEFAULT_MAX_CAPACITY, DType, ScoreStrategy, TableOptions
from embstore.readable import duration_text

_FEW_INCREMENTS = 2  # an id has to be able to come back


def advise(stored: Replay) -> Iterator[Advice]:
    """Of each table."""
    for table in stored.tables:
        steps = [entry[table.collection][table.name] for entry in stored.entries[1:]]
        yield _from_increments(table, steps) if len(steps) >= _FEW_INCREMENTS else _from_scores(table)


def _capacity(table: Columns) -> int:
    """Rows of the table at most; of one without a bound, or of which nothing is known, the rows it has."""
    most = table.spec.max_capacity if table.spec else 0
    return most if 0 < most < DEFAULT_MAX_CAPACITY else max(table.rows, 1)


def _row_bytes(table: Columns) -> float:
    """Of a full table in memory, with its share of the index."""
    rows, spec = _capacity(table), table.spec
    optimizer = spec.optimizer_object() if spec else SGD()
    dtype = DType[spec.dtype.upper()] if spec else DType.FLOAT32
    options = TableOptions(name=table.name, dim=table.dim, dtype=dtype, optimizer=optimizer)
    return options.full_bytes(rows) / rows


def _from_increments(table: Columns, steps: Sequence[DumpTable]) -> Advice:
    capacity = _capacity(table)
    sampler = _core.MissSampler(8 * capacity)
    for step in steps:
        keys, removed = all_keys(step), removed_keys(step)
        sampler.use(address(keys), len(keys))
        sampler.evict(address(removed), len(removed))
    sample = MissSample(*sampler.sample())
    if sample.uses == 0:
        return _without_curve(table, f"nothing: no id of it changed in the {len(steps)} increments")
    return advice_from(
        sample,
        capacity,
        _row_bytes(table),
        table.spec is not None and ScoreStrategy[table.spec.score_strategy.upper()].keeps_frequent,
        table=table.label,
        rows=table.rows,
        capacity=capacity,
        hit_rate=None,
        based_on=f"ids that changed in {len(steps)} increments, each counted once in one",
    )


def _from_scores(table: Columns) -> Advice:
    strategy = table.spec.score_strategy if table.spec else ""
    scores = np.asarray(table.scores) if table.has_scores else np.zeros(0, np.uint64)
    capacity = _capacity(table)
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()
    if strategy in ("lfu", "aged_lfu") and len(scores):
        lately = " lately" if strategy == "aged_lfu" else ""
        based_on = f"how often the ids of the dump were used{lately}; ids without a row are not in it"
        counts = _aged_counts(scores) if lately else scores.astype(np.float64)
        points = _by_frequency(table, np.sort(counts)[::-1], capacity)
    elif strategy in (*CLOCK_STRATEGIES, "step") and len(scores):
        based_on = "when the ids of the dump were used last; that gives no hit rates"
        notes = _ages(scores, strategy)
    else:
        based_on = "nothing: the scores of the dump do not tell how ids are used"
    return _without_curve(table, based_on, points, notes)


def _without_curve(
    table: Columns, based_on: str, points: tuple[Point, ...] = (), notes: tuple[str, ...] = ()
) -> Advice:
    return Advice(
        table=table.label,
        rows=table.rows,
        capacity=_capacity(table),
        hit_rate=None,
        based_on=based_on,
        ids=table.rows,
        evicted=0,
        returned=0,
        points=points,
        notes=notes,
    )


def _aged_counts(scores: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Sums of aged scores beside the largest; see core/include/embstore/aged_score.h."""
    exponents = (scores >> np.uint64(40)).astype(np.int64)
    fractions = (scores & np.uint64((1 << 40) - 1)).astype(np.float64)
    return np.asarray(np.ldexp(1 + fractions / 2**40, exponents - exponents.max()), np.float64)


def _by_frequency(table: Columns, counts: npt.NDArray[np.float64], capacity: int) -> tuple[Point, ...]:
    found = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
    return tuple(
        Point(n, round(n * _row_bytes(table)), None, float(found[min(n, len(counts))]))
        for n in capacities(capacity, len(counts))
    )


def _ages(scores: npt.NDArray[np.uint64], strategy: str) -> tuple[str, ...]:
    """How many rows a table needs to keep what was used within a time."""
    newest = int(scores.max())
    oldest_first = np.sort(scores)
    notes = []
    for share in (0.25, 0.5, 0.75, 0.9, 1.0):
        rows = max(round(share * len(scores)), 1)
        age = newest - int(oldest_first[-rows])
        text = f"{age:,} batches" if strategy == "step" else duration_text(age / 1e9)
        notes.append(f"{rows:,} rows hold what was used in the last {text}")
    return tuple(notes)
