"""Copies of whole tables: blocks of rows, the state for checkpoints of torch, pickles, exchange."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_floats, as_integer, as_keys, as_scores, empty_floats
from embstore.options import ScoreStrategy, TableOptions
from embstore.rows import Rows
from embstore.table_views import TableViews

if TYPE_CHECKING:
    from embstore.table import Table


class TableCopies(TableViews):
    """Base of `Table`."""

    def export(
        self,
        *,
        min_score: int = 0,
        block_rows: int = 65536,
        with_values: bool = True,
        with_states: bool = True,
    ) -> Iterator[Rows]:
        """All rows whose score is at least min_score, in blocks. What is left out has no rows.

        They are the rows at the call, of the table and of the store below it, whatever happens to them while
        the blocks are read. Until the iterator is done or dropped, rows that change are copied first.
        """
        table = self._table
        block_rows = as_integer(block_rows, 1, (1 << 63) - 1, "block_rows")
        min_score = as_integer(min_score, 0, (1 << 64) - 1, "min_score")
        return table._blocks(table.snapshot(), min_score, block_rows, with_values, with_states)

    def _blocks(
        self,
        snapshot: _core.Snapshot,
        min_score: int,
        block_rows: int,
        with_values: bool,
        with_states: bool,
    ) -> Iterator[Rows]:
        table = self._table
        n = min(block_rows, max(snapshot.rows, 1))
        last = False
        while not last:
            rows = Rows(
                np.empty(n, np.int64),
                empty_floats(n if with_values else 0, table.dim),
                empty_floats(n if with_states else 0, table.state_width),
                np.empty(n, np.uint64),
            )
            got = snapshot.read(
                n,
                address(rows.keys),
                address(rows.values) if with_values else 0,
                address(rows.states) if with_states and table.state_width else 0,
                address(rows.scores),
                min_score,
            )
            last = got < n
            yield Rows(rows.keys[:got], rows.values[:got], rows.states[:got], rows.scores[:got])

    def resident(
        self,
        *,
        min_score: int = 0,
        block_rows: int = 65536,
        with_values: bool = True,
        with_states: bool = True,
    ) -> Iterator[Rows]:
        """Like `export`, of the rows in memory alone. Raises RuntimeError when the table grows, is cleared or
        evicts rows to a store meanwhile."""
        table = self._table
        cursor = _core.Cursor()
        while cursor.next >= 0:
            rows = Rows(*table._core.export(cursor, block_rows, min_score, with_values, with_states))
            if len(rows) or cursor.next < 0:
                yield rows

    def rows(self, *, min_score: int = 0) -> Rows:
        """`export` in one piece, sorted by key."""
        table = self._table
        whole = Rows.concatenate(list(table.export(min_score=min_score)))
        order = np.argsort(whole.keys, kind="stable")
        return whole[order]

    def state(self) -> dict[str, Any]:
        """Rows and counters as numpy arrays and integers; `load_state` is the inverse."""
        table = self._table
        rows = table.rows()
        counters: dict[str, Any] = {
            "optimizer_step": table.optimizer_step,
            "learning_rate": table._learning_rate,
            "seed": table.seed,
        }
        admission = table.admission_counters()
        if admission is not None:
            counters["admission_counters"] = admission.view(np.int16)  # older torch has no uint16
        strategy = table.options.score_strategy
        if strategy in (ScoreStrategy.STEP, ScoreStrategy.CUSTOMIZED) or strategy.ages:
            counters["score"] = table.score
        shared = table.shared_rows()
        if len(shared):
            counters |= {
                "shared_numbers": shared.keys,
                "shared_values": shared.values,
                "shared_states": shared.states,
            }
        return {
            "keys": rows.keys,
            "values": rows.values,
            "states": rows.states,
            "scores": rows.scores.view(np.int64),
            **counters,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replaces everything with what `state` returned on a table of the same dim and optimizer."""
        table = self._table
        keys = as_keys(state["keys"])
        values = as_floats(state["values"], (keys.n, table.dim), "values")
        states = as_floats(state["states"], (keys.n, table.state_width), "states")
        scores = as_scores(np.asarray(state["scores"]).view(np.uint64), keys.n)
        step, rate = int(state["optimizer_step"]), float(state["learning_rate"])
        seed = int(state.get("seed", table.seed))
        replace(table.options, seed=seed)  # raises when it is no seed, before anything changes
        len(table)  # raises when closed
        max_capacity = table.stats().max_capacity
        bounded = table.store is None and table.options.score_strategy != ScoreStrategy.NO_EVICTION
        if bounded and keys.n > max_capacity:
            raise ValueError(
                f"state should hold at most max_capacity ({max_capacity}) rows but holds: {keys.n}"
            )
        if not np.all(scores):
            raise ValueError("scores should be at least 1 but the smallest is: 0")
        shared = np.asarray(state.get("shared_numbers", np.empty(0, np.int64)))
        if len(shared) and shared.max() >= table.options.shared_rows:
            raise ValueError(
                f"state should hold at most shared_rows ({table.options.shared_rows}) shared rows but holds "
                f"number: {shared.max()}"
            )
        table.clear()
        if keys.n:
            table.reserve(min(keys.n, max_capacity))
        # A batch is pinned as a whole, so over a store it has to be small beside the cache.
        rows = keys.n if table.store is None else max(1, max_capacity // 4)
        for at in range(0, keys.n, max(rows, 1)):
            n = min(rows, keys.n - at)
            table._core.assign(
                keys.address + 8 * at,
                n,
                address(values[at : at + n]),
                address(states[at : at + n]),
                address(scores[at : at + n]),
            )
        table.optimizer_step = step
        table._learning_rate = rate
        table.reseed(seed)
        if state.get("score"):
            table.score = int(state["score"])
        if "admission_counters" in state:
            table._restore_admission(np.asarray(state["admission_counters"]).view(np.uint16))
        if len(shared):
            table.assign_shared_rows(shared, state["shared_values"], state["shared_states"])

    def _restore_admission(self, counters: npt.NDArray[np.uint16]) -> None:
        table = self._table
        if not table.restore_admission_counters(counters):
            warnings.warn(
                f"admission counters of table {table.name!r} are not loaded: those of the state are for "
                "another admission_threshold; keys without a row are counted from 0",
                stacklevel=3,
            )

    def exchange(self, other: Table) -> None:
        """Swaps everything with another table of the same shape, in one step for those who read it: how rows
        that were built aside become the rows of a table in use."""
        table = self._table
        ours, theirs = table.options, other.options
        if table.store is not None or other.store is not None:
            raise ValueError(f"table {table.name!r} should not be exchanged: its rows live in a store")
        if (ours.dim, ours.dtype, ours.optimizer.engine_name) != (
            theirs.dim,
            theirs.dtype,
            theirs.optimizer.engine_name,
        ):
            raise ValueError(f"other should have the dim, dtype and optimizer of table {table.name!r}")
        for name in ("options", "optimizer_step", "_learning_rate", "_core", "shared_by"):
            mine = getattr(table, name)
            setattr(table, name, getattr(other, name))
            setattr(other, name, mine)

    def __reduce__(self) -> tuple[Any, ...]:
        table = self._table
        if table.store is not None:
            raise TypeError(f"table {table.name!r} should not be copied or pickled: its rows live in a store")
        return _rebuild, (table.options, table.state())


def _rebuild(options: TableOptions, state: dict[str, Any]) -> Table:
    from embstore.table import Table

    table = Table(options)
    table.load_state(state)
    return table
