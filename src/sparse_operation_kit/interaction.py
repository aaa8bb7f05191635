"""Rows of variables as plain tensors, and sorting variables into ours and others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import bridge
from sparse_operation_kit.bridge import unconverted
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.exchange import owners
from sparse_operation_kit.keys import as_keys
from sparse_operation_kit.optimizer import DynamicSlot
from sparse_operation_kit.static import StaticVariable


@unconverted
def export(var: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys and rows of a variable on this rank, sorted by key. Eager only.

    Args:
        var: a sok variable, or a slot of an optimizer (`OptimizerWrapper.get_slot`) of a dynamic one.

    Returns:
        Keys (n) and rows (n, dimension).

    Raises:
        TypeError: var is something else.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2)
        >>> count = sok.assign(table, tf.constant([7, -1], tf.int64), tf.constant([[1.0, 2], [3, 4]]))
        >>> keys, rows = sok.export(table)
        >>> keys.numpy().tolist(), rows.numpy().tolist()
        ([-1, 7], [[3.0, 4.0], [1.0, 2.0]])
    """
    bridge.require_eager("sok.export")
    if isinstance(var, DynamicVariable):
        rows = var.table.rows()
        return tf.convert_to_tensor(rows.keys, var.key_type), tf.convert_to_tensor(rows.values)
    if isinstance(var, DynamicSlot):
        return tf.convert_to_tensor(var.keys()), tf.convert_to_tensor(var.values())
    if isinstance(var, StaticVariable):
        return tf.convert_to_tensor(var.local_keys()), var.read_value()
    raise TypeError(f"var should be a sok variable but is: {type(var).__name__}")


@unconverted
def assign(var: Any, indices: Any, values: Any) -> tf.Tensor:
    """Sets the rows of keys on this rank; a dynamic variable inserts missing ones.

    Args:
        var: a sok variable.
        indices: keys (n); of a static variable the numbers of rows in the whole table, all of them here.
        values: rows (n, dimension).

    Returns:
        The number of keys.

    Raises:
        TypeError: var is no sok variable.
        ValueError: shapes do not fit, or a row of a static variable is on another rank.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2)
        >>> int(sok.assign(table, tf.constant([7, -1], tf.int64), tf.ones([2, 2])))
        2
    """
    if not isinstance(var, (DynamicVariable, StaticVariable)):
        raise TypeError(f"var should be a sok variable but is: {type(var).__name__}")
    keys = as_keys(indices, "indices")
    rows = tf.cast(tf.convert_to_tensor(values), tf.float32)
    if isinstance(var, DynamicVariable):

        def write(k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
            var.table.insert_or_assign(k, v)
            return [np.int64(k.size)]

        return bridge.call(write, [keys, rows], [tf.int64])[0]

    def local(k: np.ndarray, shape: np.ndarray) -> list[np.ndarray]:
        # TensorFlow does not check the width of a row: a wider one would run into the next.
        if tuple(shape) != (*k.shape, var.dimension):
            raise ValueError(
                f"values should have the shape {(*k.shape, var.dimension)} but have: {tuple(shape.tolist())}"
            )
        elsewhere = k[owners(var, k.reshape(-1), var.num_gpus).reshape(k.shape) != var.global_gpu_id]
        if len(elsewhere):
            raise ValueError(f"indices should be of rows on this rank but one is: {elsewhere[0]}")
        return [np.asarray(k)]

    (checked,) = bridge.call(local, [keys, tf.shape(rows, tf.int64)], [tf.int64])
    checked.set_shape(keys.shape)
    update = var.scatter_update(tf.IndexedSlices(tf.cast(rows, var.dtype), var.key_map(checked)))
    with tf.control_dependencies([update] if bridge.in_session_graph() else []):
        return tf.size(keys, out_type=tf.int64)


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Separates sok variables from all others.

    Args:
        vars: variables of any kind.

    Returns:
        (sok variables, all others), each in order.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> rows, dense = sok.filter_variables([tf.Variable(1.0), sok.DynamicVariable(dimension=2)])
        >>> len(rows), len(dense)
        (1, 1)
    """
    ours, others = [], []
    for variable in vars:
        (ours if isinstance(variable, (DynamicVariable, StaticVariable)) else others).append(variable)
    return ours, others
