"""How the rows of a table are trained: gradients, the optimizer, shared rows, keys that wait for a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_floats, as_keys
from embstore.optimizers import Optimizer
from embstore.rows import Rows
from embstore.table_sizing import TableSizing


class TableTraining(TableSizing):
    """Base of `Table`."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Another rule, or other numbers, from the next update on.

        Args:
            optimizer: one whose state is as wide as the present one. Rows in memory whose state was not used
                yet get its initial state.

        Raises:
            ValueError: its state has another width.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, optimizer=embstore.Adam(lr=0.1))
            >>> table.set_optimizer(embstore.AdamW(lr=0.01))
            >>> table.learning_rate
            0.01
        """
        table = self._table
        before = table.options.optimizer
        if (optimizer.engine_name, optimizer.initial_accumulator) != (
            before.engine_name,
            before.initial_accumulator,
        ):
            table._core.set_optimizer(optimizer.engine_name, optimizer.initial_accumulator)
        table.options = replace(table.options, optimizer=optimizer)
        table._learning_rate = float(optimizer.lr)

    def step_options(self, *, count: bool = True) -> _core.StepOptions:
        """The engine's options for the next update.

        Args:
            count: count the update now; without, the caller does so once it is done.
        """
        table = self._table
        options = table.options.optimizer.step_options(table._learning_rate, table.optimizer_step + 1)
        table.optimizer_step += count
        return options

    def apply_gradients(
        self, keys: object, gradients: object, *, missing: str = "ignore", renew_scores: bool = False
    ) -> None:
        """One optimizer step: gradients of duplicate keys are summed in order, then every row moves once.

        Args:
            keys: integers (n).
            gradients: (n, dim).
            missing: "ignore" skips keys without a row, "error" raises before anything moves.
            renew_scores: rows count as used now, as in a training lookup.

        Raises:
            TypeError: keys are not integers.
            ValueError: gradients have another shape, or missing is neither of the two.
            KeyError: missing is "error" and some keys have no row.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> start, rule = embstore.Constant(1.0), embstore.SGD(lr=0.5)
            >>> table = embstore.Table("user", dim=2, initializer=start, optimizer=rule)
            >>> vectors = table.find_or_insert([7])
            >>> table.apply_gradients([7, 7, 5], [[1, 0], [1, 0], [1, 1]])
            >>> table.find([7])[0].tolist()
            [[0.0, 1.0]]
        """
        table = self._table
        if missing not in ("ignore", "error"):
            raise ValueError(f"missing should be 'ignore' or 'error' but is: {missing!r}")
        k = as_keys(keys)
        g = as_floats(gradients, (*k.shape, table.dim), "gradients")
        if missing == "error" and not np.all(table.contains(k.numpy())):
            raise KeyError(f"keys should all be in table {table.name!r} but some are not")
        step = table.step_options(count=False)
        request = _core.KeyGradients(table._core, k.address, k.n, 0, 0, address(g), step)
        _core.apply_gradients_by_key([request], renew_scores)
        table.optimizer_step += 1

    def apply_gradients_to_shared(self, numbers: object, gradients: object) -> None:
        """The part of an optimizer step that moves shared rows; the step is not counted.

        Args:
            numbers: of the shared rows (n).
            gradients: (n, dim).

        Raises:
            ValueError: gradients have another shape, or a number is out of range.
            RuntimeError: the table is closed.
        """
        table = self._table
        k = as_keys(numbers)
        g = as_floats(gradients, (k.n, table.dim), "gradients")
        table._core.apply_gradients_to_shared(k.address, k.n, address(g), table.step_options(count=False))

    def shared_rows(self) -> Rows:
        """The shared rows that training has used so far.

        Returns:
            `Rows` with their numbers as keys and without scores.

        Raises:
            RuntimeError: the table is closed.
        """
        return Rows(*self._table._core.shared_rows())

    def assign_shared_rows(self, numbers: object, values: object, states: object = None) -> None:
        """Replaces the shared rows.

        Args:
            numbers: which ones (n), below the shared_rows of the options.
            values: vectors (n, dim).
            states: optimizer states (n, state_width); without, they start fresh.

        Raises:
            ValueError: a number is out of range, or a shape is another one.
            RuntimeError: the table is closed.
        """
        table = self._table
        k = as_keys(numbers)
        v = as_floats(values, (k.n, table.dim), "values")
        s = None if states is None else as_floats(states, (k.n, table.state_width), "states")
        table._core.assign_shared(k.address, k.n, address(v), 0 if s is None else address(s))

    def admission_counters(self) -> npt.NDArray[np.uint16] | None:
        """How often keys without a row were seen, in a form for `restore_admission_counters` alone.

        Returns:
            The counters, or None where nothing counts keys.
        """
        table = self._table
        return table._core.admission_counters() if table.options.counts_keys else None

    def restore_admission_counters(self, counters: npt.NDArray[np.uint16]) -> bool:
        """Goes on counting keys without a row from there.

        Args:
            counters: what `admission_counters` returned.

        Returns:
            False, and nothing changes, where they are for another threshold.

        Raises:
            RuntimeError: the table is closed.
        """
        counters = np.ascontiguousarray(counters, np.uint16)
        return self._table._core.restore_admission_counters(address(counters), len(counters))

    def take_admission_changes(self) -> npt.NDArray[np.uint16] | None:
        """What changed of `admission_counters` since the last call, or since `track_changes`.

        Returns:
            The changes, for `apply_admission_changes` alone, or None where nothing counts keys.

        Raises:
            RuntimeError: the table is closed, or does not track changes.
        """
        table = self._table
        return table._core.take_counter_changes() if table.options.counts_keys else None

    def return_admission_changes(self, taken: npt.NDArray[np.uint16]) -> None:
        """Makes changes that could not be used part of the next ones.

        Args:
            taken: what `take_admission_changes` returned.
        """
        self._table._core.return_counter_changes(address(taken), len(taken))

    def apply_admission_changes(self, changes: npt.NDArray[np.uint16]) -> bool:
        """Counts on as the table that the changes come from.

        Args:
            changes: what `take_admission_changes` returned, in the same order.

        Returns:
            False, and nothing changes, where they are for another threshold or capacity.

        Raises:
            ValueError: they are not what a table gave.
            RuntimeError: the table is closed.
        """
        changes = np.ascontiguousarray(changes, np.uint16)
        return self._table._core.apply_counter_changes(address(changes), len(changes))
