"""One budget of memory for the tables of a collection.

    collection = EmbeddingCollection([users, items], memory_budget=2 << 30)

Every table begins with an equal share. Each samples its misses, and every `EVERY` training batches the shares
move to where another row finds most ids, half of the way at a time:

    uses found by a table          users  ▁▃▅▆▇▇      items  ▁▁▂▃▅▆▇
    of so many rows                           ↑ slope            ↑ slope

Rows leave the table that shrinks as in any eviction. The moves depend on the ids alone: the same stream gives
the same shares for any number of threads. What was observed is not part of dumps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embstore.options import DEFAULT_MAX_CAPACITY, ScoreStrategy, TableOptions
from embstore.table import Table

EVERY = 256  # training batches
_PARTS = 256  # of the budget, for the search
_WORTH_MOVING = 0.05  # of a table's rows
_FORGET = 0.5  # what was observed counts half after each move


def split_equally(options: Sequence[TableOptions], budget_bytes: int) -> list[TableOptions]:
    """The options of each table with the rows that fit its share. A table with a max_capacity of its own gets
    no more than that, and the others get the rest."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:
        raise ValueError(f"memory_budget should be a number of bytes but is: {budget_bytes!r}")
    for table in options:
        if table.score_strategy == ScoreStrategy.NO_EVICTION:
            raise ValueError(
                f"memory_budget needs tables that evict but {table.name!r} has the strategy: 'no_eviction'"
            )
    least = [table.full_bytes(table.bucket_capacity) for table in options]
    if sum(least) > budget_bytes:
        raise ValueError(
            f"memory_budget should be at least {sum(least)}, for a bucket of each table, "
            f"but is: {budget_bytes}"
        )
    given: dict[int, int] = {}
    left = budget_bytes
    # The most modest first: what they leave is shared by the others.
    wishes = [
        max(low, table.full_bytes(table.max_capacity)) if table.max_capacity < DEFAULT_MAX_CAPACITY else None
        for table, low in zip(options, least, strict=True)
    ]
    order = sorted(range(len(options)), key=lambda i: (wishes[i] is None, wishes[i] or 0, -least[i]))
    for position, i in enumerate(order):
        waiting = sum(least[j] for j in order[position + 1 :])
        share = max(left // (len(order) - position), least[i])
        wish = wishes[i]
        given[i] = min(share, left - waiting, share if wish is None else wish)
        left -= given[i]
    return [
        replace(table, max_capacity=min(table.rows_within(given[i]), table.max_capacity))
        for i, table in enumerate(options)
    ]


class MemoryBudget:
    """Moves the limits of tables so that together they need at most `budget_bytes` when they are full.

    most  rows of a table at most, by name, where somebody wants less than what the budget allows
    """

    def __init__(
        self, tables: Mapping[str, Table], budget_bytes: int, most: Mapping[str, int], every: int = EVERY
    ) -> None:
        self.budget_bytes = budget_bytes
        self.every = every
        self._tables = dict(tables)
        self._most = dict(most)
        self._batches = 0
        for table in self._tables.values():
            table.sample_misses()

    def before_batch(self) -> None:
        """To be called before each training batch."""
        self._batches += 1
        if self._batches % self.every == 0:
            self.rebalance()

    def needed_bytes(self) -> int:
        """Of all tables when they are full."""
        return sum(t.options.full_bytes(t.options.max_capacity) for t in self._tables.values())

    def make_room(self, rows: Mapping[str, int]) -> None:
        """Limits for tables that are about to hold so many rows, by name. Those that need more take it from
        those that need less, as far as the budget goes."""
        tables = [(t, rows.get(name, 0)) for name, t in self._tables.items()]
        if all(n <= t.options.max_capacity for t, n in tables):
            return
        for table, n in tables:
            if n <= table.options.max_capacity:
                table.set_max_capacity(max(n, table.options.bucket_capacity))
        for table, n in tables:
            if n > table.options.max_capacity:
                table.set_max_capacity(max(table.options.max_capacity, min(n, self._room_for(table))))

    def rebalance(self) -> None:
        """Moves the limits half of the way to the best shares, unless every table has room."""
        tables = list(self._tables.values())
        # A load builds tables aside and puts them in place, which ends what was observed of the old ones.
        if unwatched := [table for table in tables if not table._core.samples_misses()]:
            for table in unwatched:
                table.sample_misses()
            return
        if all(len(table) < table.options.max_capacity for table in tables):
            return
        target = self._best_rows(tables)
        now = [table.options.max_capacity for table in tables]
        moved = [(a + b) // 2 for a, b in zip(now, target, strict=True)]
        for table in tables:
            table._core.age_miss_sample(_FORGET)
        if all(abs(a - b) < _WORTH_MOVING * a for a, b in zip(now, moved, strict=True)):
            return
        changes = sorted(zip(tables, now, moved, strict=True), key=lambda change: change[2] - change[1])
        for table, before, rows in changes:  # those that shrink come first
            if rows > before:
                rows = min(rows, self._room_for(table))
            table.set_max_capacity(max(rows, table.options.bucket_capacity))

    def _room_for(self, table: Table) -> int:
        own = table.options.full_bytes(table.options.max_capacity)
        return table.options.rows_within(self.budget_bytes - self.needed_bytes() + own)

    def _best_rows(self, tables: Sequence[Table]) -> list[int]:
        """Gives the budget away in parts, each to the table that finds most uses with it."""
        part = self.budget_bytes / _PARTS
        costs = [t.options.full_bytes(t.options.max_capacity) / t.options.max_capacity for t in tables]
        parts_of = [
            np.minimum(np.arange(_PARTS + 1) * part / cost, self._most.get(t.name, DEFAULT_MAX_CAPACITY))
            for t, cost in zip(tables, costs, strict=True)
        ]
        curves = [
            _concave(_found_by(table)(rows.tolist())) for table, rows in zip(tables, parts_of, strict=True)
        ]
        shares = [max(1, -(-t.options.full_bytes(t.options.bucket_capacity) // int(part))) for t in tables]
        heap = [
            (-(c[s + 1] - c[s]), i) for i, (c, s) in enumerate(zip(curves, shares, strict=True)) if s < _PARTS
        ]
        heapq.heapify(heap)
        for _ in range(_PARTS - sum(shares)):
            gain, i = heapq.heappop(heap)
            shares[i] += 1
            if shares[i] < _PARTS:
                heapq.heappush(heap, (-(curves[i][shares[i] + 1] - curves[i][shares[i]]), i))
        return [int(rows[share]) for rows, share in zip(parts_of, shares, strict=True)]


def _found_by(table: Table) -> Callable[[Sequence[float]], npt.NDArray[np.float64]]:
    """Uses that a table finds, by its rows, under its way to choose who stays."""
    sample = table.miss_sample()
    return sample.by_frequency if table.options.keeps_frequent else sample.by_recency


def _concave(curve: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The smallest concave curve above: a plateau before a rise must not end the search."""
    hull: list[int] = []
    for i in range(len(curve)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (curve[b] - curve[a]) * (i - b) > (curve[i] - curve[b]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    return np.asarray(np.interp(np.arange(len(curve)), hull, curve[hull]), np.float64)
