"""Reading rows of dynamic variables, all of a call in one pass of the engine, with gradients by key.

A read is reported to the tape that is recording and to the graph of the tf.function that is being traced; the
graph reports it to the tape around each later call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import variable_accessed

from embstore import EvictionLog
from embstore.lookup import Access, Pooling, Request, look_up
from sparse_operation_kit import bridge

if TYPE_CHECKING:
    from sparse_operation_kit.dynamic import DynamicVariable

POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN}


def _access(training: bool) -> Access:
    return Access.TRAIN if training else Access.READ_ZERO


def _look_up_admitted(variable: DynamicVariable, keys: np.ndarray) -> np.ndarray:
    """Resident keys, and a share of filter_ratio of the others; the rest reads 0.0 and stays out."""
    table = variable.table
    distinct, inverse = np.unique(keys, return_inverse=True)
    ratio = variable.config_dict.get("filter_ratio", 1.0)
    admitted = table.contains(distinct) | (variable._admission.random(len(distinct)) < ratio)
    vectors = np.zeros((len(distinct), variable.dimension), np.float32)
    vectors[admitted] = table.find_or_insert(distinct[admitted])
    return vectors[inverse]


def _read(read: Any, variables: Sequence[DynamicVariable], *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Calls the custom gradient `read` with the handles of the variables, which receive its gradients."""
    for variable in variables:
        variable_accessed(variable)
    result = read(*(v.handle for v in variables), *inputs)
    return [result] if isinstance(result, tf.Tensor) else list(result)


def _by_key(
    gradient: tf.Tensor, variable: DynamicVariable, keys: tf.Tensor, vectors: tf.Tensor
) -> tf.IndexedSlices:
    """The gradient of a variable, of which `vectors` were read."""
    # A session would skip the read where a loss is linear in the vectors, and the update would find no rows.
    after = [vectors] if bridge.in_session_graph() else []
    # The reshapes are needed: where the tape is outside of a tf.function, this runs in the graph of its
    # backward function, which cannot return a tensor of the forward graph as it is.
    with tf.control_dependencies(after):
        return tf.IndexedSlices(tf.reshape(gradient, [-1, variable.dimension]), tf.reshape(keys, [-1]))


def _of_keys(sums: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """The gradients of the sums (samples, dimension), for each key (n, dimension)."""
    return tf.gather(sums, tf.ragged.row_splits_to_segment_ids(offsets))


class BagSlices(tf.IndexedSlices):
    """The gradient of a variable of which sums of rows were read. `OptimizerWrapper` takes the gradients of
    the sums; whoever asks for `values` gets one for each key, as in any tf.IndexedSlices.

    sums     (samples, dimension)
    offsets  (samples + 1): where the keys of each sample begin
    """

    def __init__(self, sums: tf.Tensor, offsets: tf.Tensor, keys: tf.Tensor) -> None:
        self.sums, self.offsets = sums, offsets
        self._indices, self._dense_shape = keys, None
        self._made: tf.Tensor | None = None

    @property
    def _values(self) -> tf.Tensor:
        eager = tf.executing_eagerly()
        if self._made is None or not eager and self._made.graph is not tf.compat.v1.get_default_graph():
            self._made = _of_keys(self.sums, self.offsets)
        return self._made


def read_rows(
    variables: Sequence[DynamicVariable],
    keys: Sequence[tf.Tensor],
    *,
    training: bool = True,
    low_frequency_filter: bool = False,
    guard: Any = None,
) -> list[tf.Tensor]:
    """keys[i].shape + (dimension,) of variables[i]; each variable once. Keys are int64.

    The gradient of a variable is tf.IndexedSlices with the keys. `guard` takes an exception of the engine
    instead of raising it, and zeros are returned: a rank must not leave before the exchange that follows.
    """
    count = len(variables)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        flat = [array.reshape(-1) for array in arrays]
        if low_frequency_filter and training:
            outs = [_look_up_admitted(v, k) for v, k in zip(variables, flat)]
        else:
            outs = look_up([Request(v.table, k) for v, k in zip(variables, flat)], _access(training))
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
            slices = [_by_key(*each) for each in zip(upstream, variables, ids, vectors)]
            return [*slices, *([None] * count)]

        return vectors, gradient

    return _read(read, variables, *keys)


def read_and_evict(variable: DynamicVariable, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of the keys, with the gradient of `read_rows`; the evicted keys and rows, without one."""
    evicted: list[tf.Tensor] = []

    def run(k: np.ndarray) -> list[np.ndarray]:
        table = variable.table
        table.set_eviction_log(EvictionLog.ROWS)
        try:
            (vectors,) = look_up([Request(table, k.reshape(-1))], Access.TRAIN)
            gone = table.evictions()
        finally:
            table.set_eviction_log(EvictionLog.OFF)
        return [vectors.reshape(*k.shape, variable.dimension), gone.keys, gone.values]

    @tf.custom_gradient
    def read(handle: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, Any]:
        vectors, *evicted[:] = bridge.call(run, [ids], [tf.float32, tf.int64, tf.float32])
        vectors.set_shape(ids.shape.concatenate([variable.dimension]))
        evicted[0].set_shape([None])
        evicted[1].set_shape([None, variable.dimension])
        return vectors, lambda upstream: [_by_key(upstream, variable, ids, vectors), None]

    (vectors,) = _read(read, [variable], keys)
    return vectors, evicted[0], evicted[1]


def pool_rows(
    variables: Sequence[DynamicVariable],
    keys: Sequence[tf.Tensor],
    offsets: Sequence[tf.Tensor],
    combiners: Sequence[str],
    *,
    training: bool,
) -> list[tf.Tensor]:
    """(samples, dimension) of each request, pooled by the engine as it reads, so that the rows of the keys
    are never laid out. A variable may come several times. The gradient is that of `read_rows`."""
    count = len(variables)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        parts = zip(variables, arrays[:count], combiners, arrays[count:])
        return look_up([Request(v.table, k, POOLINGS[c], o) for v, k, c, o in parts], _access(training))

    @tf.custom_gradient
    def read(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        ids, splits = inputs[count : 2 * count], inputs[2 * count :]
        pooled = bridge.call(run, [*ids, *splits], [tf.float32] * count)
        for vectors, variable in zip(pooled, variables):
            vectors.set_shape([None, variable.dimension])

        def gradient(*upstream: tf.Tensor) -> list[Any]:
            slices = []
            for i, (g, split) in enumerate(zip(upstream, splits)):
                if combiners[i] == "mean":
                    g = tf.math.divide_no_nan(g, tf.cast(split[1:] - split[:-1], tf.float32)[:, tf.newaxis])
                if bridge.in_session_graph():
                    slices.append(_by_key(_of_keys(g, split), variables[i], ids[i], pooled[i]))
                else:
                    # Tensors of the backward graph, see `_by_key`.
                    slices.append(BagSlices(*(tf.identity(x) for x in (g, split, ids[i]))))
            return [*slices, *([None] * (2 * count))]

        return pooled, gradient

    return _read(read, variables, *keys, *offsets)
