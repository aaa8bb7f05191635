"""OptimizerWrapper: the update of an optimizer of Keras or TensorFlow, run by the engine on touched rows.

    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
    optimizer.apply_gradients(zip(tape.gradient(loss, sok_vars), sok_vars))

Every optimizer is lazy: a row without a gradient keeps its place and its state.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import embstore
from embstore.lookup import Update, apply_gradients
from sparse_operation_kit import bridge
from sparse_operation_kit.bridge import unconverted
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.keys import as_keys
from sparse_operation_kit.rows import BagSlices
from sparse_operation_kit.rules import Rule, read_rule, sgd_rule
from sparse_operation_kit.static import StaticVariable


class DynamicSlot:
    """One state of all rows of a dynamic variable on this rank; `sok.export` reads it."""

    def __init__(self, variable: DynamicVariable, name: str, number: int) -> None:
        self.variable, self.name = variable, f"{variable.name.partition(':')[0]}/{name}"
        self._columns = slice(number * variable.dimension, (number + 1) * variable.dimension)

    @property
    def dimension(self) -> int:
        return self.variable.dimension

    def keys(self) -> np.ndarray:
        """The keys, sorted."""
        return self.variable.table.rows().keys

    def values(self) -> np.ndarray:
        """(n, dimension) in the order of `keys`."""
        return np.ascontiguousarray(self.variable.table.rows().states[:, self._columns])

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The state of these keys; zeros for one that is not there."""
        bridge.require_eager("sparse_read of a slot")
        keys = as_keys(indices, "indices").numpy()
        states = self.variable.table.read(keys.reshape(-1)).states[:, self._columns]
        return tf.convert_to_tensor(states.reshape(*keys.shape, self.dimension))

    def __repr__(self) -> str:
        return f"<sok.DynamicSlot '{self.name}' shape=(None, {self.dimension}) dtype=float32>"


class RowOptimizer:
    """Applies a rule to rows of sok variables, and counts its updates."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        with tf.init_scope():
            self._iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="sok_iterations")
        # Rows of static variables pass through a table of their width, where the engine updates them.
        self._passages: dict[int, embstore.Table] = {}
        self._passage_lock = threading.Lock()  # a session runs the updates of several variables at once

    @property
    def iterations(self) -> tf.Variable:
        """Calls of apply_gradients so far."""
        return self._iterations

    def get_slot_names(self) -> list[str]:
        """The names of the states, as Keras 2 has them."""
        return list(self.rule.slots)

    def get_slot(self, var: Any, name: str) -> Any:
        """A state: a tf.Variable for a static variable, a `DynamicSlot` for a dynamic one."""
        if name not in self.rule.slots:
            raise ValueError(f"name should be one of {', '.join(self.rule.slots)} but is: {name!r}")
        self.create_slots([var])
        if isinstance(var, DynamicVariable):
            return DynamicSlot(var, name, self.rule.slots.index(name))
        return var.slots[name]

    def reset_slots(self, vars: Iterable[Any]) -> None:
        """Gives sok variables fresh state of this optimizer; what another one left is dropped, rows stay.

        Call it before the first update where a variable was trained by another optimizer.
        """
        self.create_slots(vars, fresh=True)

    @property
    def name(self) -> str:
        """The name of the optimizer in dumps."""
        return self.rule.name

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the states, as Keras 2 has them."""
        return self.rule.slots

    def create_slots(self, vars: Iterable[Any], *, fresh: bool = False) -> None:
        """Gives sok variables the state of this optimizer, or requires that they have it."""
        for var in vars:
            if isinstance(var, (DynamicVariable, StaticVariable)):
                var.use_optimizer(self.rule.optimizer, self.rule.slots, fresh=fresh)

    _create_slots = create_slots  # the original's name

    @unconverted
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """One update of every row that has a gradient; duplicate keys are summed first.

        Returns the number of updates so far, or None where all gradients are None. In a graph of tf.compat.v1
        it returns one operation, which runs all updates.
        """
        given = list(grads_and_vars)
        if not given:
            _warn_of_no_variables()
        pairs = [(g, v) for g, v in given if g is not None]
        if not pairs:
            return None
        ours = [(g, v) for g, v in pairs if isinstance(v, (DynamicVariable, StaticVariable))]
        others = [(g, v) for g, v in pairs if not isinstance(v, (DynamicVariable, StaticVariable))]
        for gradient, var in ours:
            if isinstance(var, DynamicVariable) and not isinstance(gradient, tf.IndexedSlices):
                raise TypeError(
                    f"the gradient of {var.name!r} should be tf.IndexedSlices but is: {gradient!r}"
                )
            if var.dtype != tf.float32:
                raise NotImplementedError(
                    f"{var.name!r} should be float32 for an update but is: {var.dtype.name}"
                )
            _check_shape(gradient, var)
        self.create_slots([v for _, v in ours])
        session = bridge.in_session_graph()
        # A session orders operations by their dependencies alone. The gradients read what the updates change.
        with tf.control_dependencies([_tensor(g) for g, _ in pairs] if session else []):
            updates = self._updates(ours, others)
        if session:
            with tf.control_dependencies([u for u in updates if u is not None]):
                counts = [
                    v.assign_add(1, read_value=False)
                    for v in (self._iterations, global_step)
                    if v is not None
                ]
            return tf.group(*counts)
        if global_step is not None:
            global_step.assign_add(1)
        return self._iterations.assign_add(1)

    def _updates(self, ours: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]) -> list[Any]:
        updates = [self._apply_others(others)] if others else []
        before = tf.identity(self._iterations)
        rate = self.rule.learning_rate(before)
        updates += self._apply_dynamic([p for p in ours if isinstance(p[1], DynamicVariable)], rate, before)
        for gradient, var in ours:
            if isinstance(var, StaticVariable):
                updates += self._apply_static(gradient, var, rate, before)
        return updates

    def _apply_others(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        names = ", ".join(repr(v.name) for _, v in pairs)
        raise TypeError(f"grads_and_vars should hold sok variables but holds: {names}")

    def _apply_dynamic(
        self, pairs: Sequence[tuple[Any, Any]], rate: tf.Tensor, before: tf.Tensor
    ) -> list[tf.Tensor]:
        if not pairs:
            return []
        variables = [v for _, v in pairs]

        bags = [isinstance(g, BagSlices) for g, _ in pairs]

        def update(lr: np.ndarray, updates: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            parts = iter(arrays)
            requests = []
            for variable, pooled in zip(variables, bags):
                table = variable.table
                table.learning_rate, table.optimizer_step = float(lr), int(updates)
                requests.append(Update(table, next(parts), next(parts), next(parts) if pooled else None))
            apply_gradients(requests, renew_scores=True)
            return [np.int64(len(variables))]

        inputs = []
        for (gradient, _), pooled in zip(pairs, bags):
            values = gradient.sums if pooled else gradient.values
            inputs += [tf.cast(gradient.indices, tf.int64), tf.cast(values, tf.float32)]
            inputs += [gradient.offsets] if pooled else []
        return bridge.call(update, [rate, before, *inputs], [tf.int64])

    def _apply_static(
        self, gradient: Any, var: StaticVariable, rate: tf.Tensor, before: tf.Tensor
    ) -> list[Any]:
        if isinstance(gradient, tf.IndexedSlices):
            keys, values = tf.cast(gradient.indices, tf.int64), gradient.values
        else:
            keys, values = tf.range(tf.shape(var, tf.int64)[0]), gradient
        slots = list(var.slots.values())
        rows, _ = tf.unique(keys, tf.int64)

        def update(
            lr: np.ndarray,
            updates: np.ndarray,
            k: np.ndarray,
            g: np.ndarray,
            rows: np.ndarray,
            *old: np.ndarray,
        ) -> list[np.ndarray]:
            states = np.concatenate(old[1:], axis=1) if len(old) > 1 else None
            with self._passage_lock:
                table = self._passage(var.dimension)
                table.insert_or_assign(rows, old[0], states=states)
                try:
                    _step(table, lr, updates, k, g)
                    new = table.read(rows)
                finally:
                    table.erase(rows)
            return [new.values, *(np.split(new.states, len(old) - 1, axis=1) if len(old) > 1 else [])]

        old = [tf.gather(v, rows) for v in (var, *slots)]
        new = bridge.call(update, [rate, before, keys, values, rows, *old], [tf.float32] * len(old))
        for updated in new:
            updated.set_shape([None, var.dimension])
        return [v.scatter_update(tf.IndexedSlices(updated, rows)) for v, updated in zip((var, *slots), new)]

    def _passage(self, dim: int) -> embstore.Table:
        if dim not in self._passages:
            self._passages[dim] = embstore.Table("passage", dim=dim, optimizer=self.rule.optimizer)
        return self._passages[dim]


def _tensor(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


_warned_of_no_variables = False


def _warn_of_no_variables() -> None:
    """Once in a process: a loop would repeat it at every step."""
    global _warned_of_no_variables
    if not _warned_of_no_variables:
        _warned_of_no_variables = True
        warnings.warn(
            "apply_gradients got no variables. Layers of Keras 3 do not list sok variables: "
            "pass sok.trainable_variables(model), or set TF_USE_LEGACY_KERAS=1",
            UserWarning,
            stacklevel=4,
        )


def _check_shape(gradient: Any, var: Any) -> None:
    """Before any row changes; a tf.function may not know all of the shape."""
    if isinstance(gradient, BagSlices):
        return  # of our own making
    if isinstance(gradient, tf.IndexedSlices):
        found, rows = gradient.values.shape, gradient.indices.shape
    else:
        found, rows = gradient.shape, var.shape[:1]
    expected = rows.concatenate([var.dimension])
    if not found.is_compatible_with(expected):
        raise ValueError(f"the gradient of {var.name!r} should have the shape {expected} but has: {found}")


def _step(
    table: embstore.Table,
    lr: np.ndarray,
    updates: np.ndarray,
    keys: np.ndarray,
    gradients: np.ndarray,
) -> None:
    table.learning_rate = float(lr)
    table.optimizer_step = int(updates)
    table.apply_gradients(keys, gradients)


class OptimizerWrapper(RowOptimizer):
    """Trains sok variables with the rule of a TensorFlow optimizer.

    Its learning rate, a schedule too, is read at every update; other options are read when it is wrapped.
    Variables that are not of sok are handed to the optimizer itself.

    Args:
        optimizer: of Keras 3, tf_keras (new or legacy) or tf.compat.v1.train: SGD, with momentum, Adagrad,
            Adam, Adamax, Adadelta or Ftrl.

    Raises:
        NotImplementedError: it is another one, or has an option that rows cannot follow; the message names
            it.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf, tf_keras
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, initializer="ones")
        >>> optimizer = sok.OptimizerWrapper(tf_keras.optimizers.SGD(0.5))
        >>> ids = tf.ragged.constant([[7]])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(sok.lookup_sparse(table, ids))
        >>> step = optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table]))
        >>> sok.lookup_sparse(table, ids).numpy().tolist()
        [[0.5, 0.5]]
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(read_rule(optimizer))
        self._optimizer = optimizer

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer; setting it sets it there."""
        return getattr(self._optimizer, self._rate_attribute())

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        setattr(self._optimizer, self._rate_attribute(), value)

    lr = learning_rate

    def _rate_attribute(self) -> str:
        return next(n for n in ("learning_rate", "_learning_rate", "_lr") if hasattr(self._optimizer, n))

    @property
    def loss_scale_factor(self) -> None:
        """None: gradients arrive unscaled."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # What LossScaleOptimizer of Keras 3 does first with the optimizer that it is given.
        raise TypeError(
            "LossScaleOptimizer cannot wrap an OptimizerWrapper: it knows nothing of sok variables. "
            "Wrap the optimizer of the dense variables, and train the sok variables without loss scaling"
        )

    def _apply_others(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        return self._optimizer.apply_gradients(pairs)


class SGD(RowOptimizer):
    """w -= lr * g on touched rows, without a Keras object.

    Args:
        lr: learning rate; may be changed at any time.

    Raises:
        TypeError: at an update, for variables that are not of sok.

    Examples:
        >>> import sparse_operation_kit as sok
        >>> optimizer = sok.SGD(lr=0.1)
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr
        super().__init__(sgd_rule(lambda: self.lr))
