"""Reading rows of dynamic variables, all of a call in one pass of the engine, with gradients by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import tape as tape_lib

from embstore import _core
from embstore.arrays import address, as_keys, empty_floats
from sparse_operation_kit import bridge

if TYPE_CHECKING:
    from sparse_operation_kit.dynamic import DynamicVariable

TRAIN, READ_ZERO = 0, 1


def look_up(tables: Sequence[Any], keys: Sequence[np.ndarray], *, training: bool) -> list[np.ndarray]:
    """The vectors of the keys of several tables, each of which may come once."""
    outs, requests, kept = [], [], []
    for table, table_keys in zip(tables, keys):
        k = as_keys(table_keys)
        out = empty_floats(k.n, table.dim)
        request = _core.LookupRequest(table._core, k.address, k.n, 0, 0, 0, 0, address(out), 0, table.dim, 0)
        kept.append(k)
        outs.append(out)
        requests.append(request)
    for table, k, (_, refused) in zip(
        tables, kept, _core.look_up(requests, TRAIN if training else READ_ZERO)
    ):
        if refused:
            table.report_refused(refused, k.n)
    return outs


def _look_up_admitted(variable: DynamicVariable, keys: np.ndarray) -> np.ndarray:
    """Resident keys, and a share of filter_ratio of the others; the rest reads 0.0 and stays out."""
    table = variable.table
    distinct, inverse = np.unique(keys, return_inverse=True)
    ratio = variable.config_dict.get("filter_ratio", 1.0)
    admitted = table.contains(distinct) | (variable._admission.random(len(distinct)) < ratio)
    vectors = np.zeros((len(distinct), variable.dimension), np.float32)
    vectors[admitted] = table.find_or_insert(distinct[admitted])
    return vectors[inverse]


def read_rows(
    variables: Sequence[DynamicVariable],
    keys: Sequence[Any],
    *,
    training: bool = True,
    low_frequency_filter: bool = False,
    guard: Any = None,
) -> list[tf.Tensor]:
    """keys[i].shape + (dimension,) of variables[i]; each variable once.

    The gradient of a variable is tf.IndexedSlices with the keys. `guard` takes an exception of the engine
    instead of raising it, and zeros are returned: a rank must not leave before the exchange that follows.
    """
    count = len(variables)
    keys = [tf.cast(tf.convert_to_tensor(k), tf.int64) for k in keys]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        flat = [array.reshape(-1) for array in arrays]
        if low_frequency_filter and training:
            outs = [_look_up_admitted(v, k) for v, k in zip(variables, flat)]
        else:
            outs = look_up([v.table for v in variables], flat, training=training)
        return [out.reshape(*a.shape, v.dimension) for out, a, v in zip(outs, arrays, variables)]

    def guarded(*arrays: np.ndarray) -> list[np.ndarray]:
        try:
            return run(*arrays)
        except Exception as error:
            guard(error)
            return [np.zeros((*a.shape, v.dimension), np.float32) for a, v in zip(arrays, variables)]

    @tf.custom_gradient
    def read(*handles_and_keys: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        ids = handles_and_keys[count:]
        vectors = bridge.call(run if guard is None else guarded, ids, [tf.float32] * count)
        for vector, variable, k in zip(vectors, variables, ids):
            vector.set_shape(k.shape.concatenate([variable.dimension]))

        def gradient(*upstream: tf.Tensor) -> list[Any]:
            slices = [
                tf.IndexedSlices(tf.reshape(g, [-1, v.dimension]), tf.reshape(k, [-1]))
                for g, v, k in zip(upstream, variables, ids)
            ]
            return [*slices, *([None] * count)]

        return vectors, gradient

    for variable in variables:
        tape_lib.variable_accessed(variable)
    result = read(*(v.handle for v in variables), *keys)
    return [result] if isinstance(result, tf.Tensor) else list(result)
