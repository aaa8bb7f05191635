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
        """All rows at the call, of the table and of the store below it, in blocks.

        Training may go on: until the iterator is done or dropped, rows that change are copied first.

        Args:
            min_score: only rows with at least this score.
            block_rows: rows of a block; the last one may have fewer.
            with_values: with vectors; without, `values` of a block is empty.
            with_states: with optimizer states; without, `states` of a block is empty.

        Returns:
            An iterator of `Rows`, in no order.

        Raises:
            ValueError: min_score or block_rows is out of range.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> vectors = table.find_or_insert(range(97))
            >>> [len(block) for block in table.export(block_rows=50)]
            [50, 47]
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

    def snapshot(self) -> _core.Snapshot:
        """The rows as they are now, to be read while training goes on; `export` reads one in blocks.

        Raises:
            RuntimeError: the table is closed.
        """
        return _core.Snapshot(self._table._core)

    def track_changes(self, on: bool = True) -> None:
        """Starts to record which rows change, for `take_changes`, or stops.

        Args:
            on: True starts with nothing changed so far.

        Raises:
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> vectors = table.find_or_insert([7, 8])
            >>> table.track_changes()
            >>> table.insert_or_assign([8], [[1, 2]]), table.erase([7])
            (None, 1)
            >>> changed, removed = table.take_changes()
            >>> changed.keys.tolist(), removed.tolist()
            ([8], [7])
        """
        self._table._core.track_changes(on)

    def take_changes(self) -> tuple[Rows, npt.NDArray[np.int64]]:
        """What changed since the last call, or since `track_changes`.

        Returns:
            The rows whose vector, state or score changed, and the keys that are gone.

        Raises:
            RuntimeError: the table is closed, or does not track changes.
        """
        table = self._table
        changes = table.snapshot_changes()
        blocks = list(table._blocks(changes, 0, 65536, True, True))
        return Rows.concatenate(blocks), changes.removed()

    def snapshot_changes(self) -> _core.Snapshot:
        """Like `take_changes`, to be read while training goes on; `restore` of the result puts them back.

        Raises:
            RuntimeError: the table is closed, or does not track changes.
        """
        return _core.Snapshot(self._table._core, changes=True)

    def resident(
        self,
        *,
        min_score: int = 0,
        block_rows: int = 65536,
        with_values: bool = True,
        with_states: bool = True,
    ) -> Iterator[Rows]:
        """Like `export`, of the rows in memory alone and without a copy.

        Args:
            min_score: only rows with at least this score.
            block_rows: rows of a block at most.
            with_values: with vectors.
            with_states: with optimizer states.

        Returns:
            An iterator of `Rows`, in no order.

        Raises:
            RuntimeError: the table is closed, or grows, is cleared or evicts rows to a store meanwhile.
        """
        table = self._table
        cursor = _core.Cursor()
        while cursor.next >= 0:
            rows = Rows(*table._core.export(cursor, block_rows, min_score, with_values, with_states))
            if len(rows) or cursor.next < 0:
                yield rows

    def rows(self, *, min_score: int = 0) -> Rows:
        """All rows in one piece, sorted by key.

        Args:
            min_score: only rows with at least this score.

        Returns:
            `Rows` of the table and of the store below it.

        Raises:
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.insert_or_assign([7, -1], [[1, 2], [3, 4]])
            >>> table.rows().keys.tolist()
            [-1, 7]
        """
        table = self._table
        whole = Rows.concatenate(list(table.export(min_score=min_score)))
        order = np.argsort(whole.keys, kind="stable")
        return whole[order]

    def state(self) -> dict[str, Any]:
        """Rows and counters as numpy arrays and numbers; `load_state` is the inverse.

        Returns:
            A dict that torch.save and numpy.savez take.

        Raises:
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table, other = (embstore.Table(name, dim=2) for name in ("user", "copy"))
            >>> table.insert_or_assign([7], [[1, 2]])
            >>> other.load_state(table.state())
            >>> other.find([7])[0].tolist()
            [[1.0, 2.0]]
        """
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
        """Replaces everything with the state of another table.

        Args:
            state: what `state` returned on a table of the same dim and optimizer.

        Raises:
            ValueError: shapes differ, or there are more rows than max_capacity; nothing has changed then.
            RuntimeError: the table is closed.
        """
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
        """Swaps everything with another table, in one step for those who read it.

        So rows that were built aside become the rows of a table in use.

        Args:
            other: a table of the same dim, dtype and optimizer, without a store.

        Raises:
            ValueError: it is of another shape, or one of the two has a store.
        """
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
