"""Reading rows of dynamic variables, all of a call in one pass of the engine, with gradients by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import tape as tape_lib

import embstore
from embstore import _core
from embstore.arrays import address, as_keys, empty_floats
from sparse_operation_kit import bridge

if TYPE_CHECKING:
    from sparse_operation_kit.dynamic import DynamicVariable

TRAIN, READ_ZERO = 0, 1
POOLINGS = {None: 0, "sum": 1, "mean": 2}


@dataclass(frozen=True)
class Request:
    """Keys (n) of a table; with a combiner also offsets (samples + 1), int64, and pooled by sample."""

    table: embstore.Table
    keys: np.ndarray
    combiner: str | None = None
    offsets: np.ndarray | None = None


def look_up(requests: Sequence[Request], *, training: bool) -> list[np.ndarray]:
    """The vectors of several tables in one pass; a table that comes again waits for the next."""
    outs: list[Any] = [None] * len(requests)
    waiting = list(range(len(requests)))
    while waiting:
        first = {id(requests[i].table): i for i in reversed(waiting)}
        for i, out in zip(first.values(), _look_up([requests[i] for i in first.values()], training)):
            outs[i] = out
        waiting = [i for i in waiting if i not in first.values()]
    return outs


def _look_up(requests: Sequence[Request], training: bool) -> list[np.ndarray]:
    outs, cores, kept = [], [], []
    for r in requests:
        k = as_keys(r.keys)
        samples = 0 if r.offsets is None else len(r.offsets) - 1
        out = empty_floats(k.n if r.combiner is None else samples, r.table.dim)
        offsets = 0 if r.offsets is None else address(r.offsets)
        cores.append(
            _core.LookupRequest(
                r.table._core,
                k.address,
                k.n,
                POOLINGS[r.combiner],
                offsets,
                samples,
                0,
                address(out),
                0,
                r.table.dim,
                0,
            )
        )
        kept.append(k)
        outs.append(out)
    results = _core.look_up(cores, TRAIN if training else READ_ZERO)
    for r, k, (_, refused) in zip(requests, kept, results):
        if refused:
            r.table.report_refused(refused, k.n)
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
            outs = look_up([Request(v.table, k) for v, k in zip(variables, flat)], training=training)
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


def pool_rows(
    variables: Sequence[DynamicVariable],
    keys: Sequence[tf.Tensor],
    sample_of: Sequence[tf.Tensor],
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
        return look_up([Request(v.table, k, c, o) for v, k, c, o in parts], training=training)

    @tf.custom_gradient
    def read(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        ids, splits = inputs[count : 2 * count], inputs[2 * count :]
        pooled = bridge.call(run, [*ids, *splits], [tf.float32] * count)
        for vectors, variable in zip(pooled, variables):
            vectors.set_shape([None, variable.dimension])

        def gradient(*upstream: tf.Tensor) -> list[Any]:
            slices = []
            for g, k, samples, split, combiner in zip(upstream, ids, sample_of, splits, combiners):
                if combiner == "mean":
                    g = tf.math.divide_no_nan(g, tf.cast(split[1:] - split[:-1], tf.float32)[:, tf.newaxis])
                slices.append(tf.IndexedSlices(tf.gather(g, samples), k))
            return [*slices, *([None] * (2 * count))]

        return pooled, gradient

    for variable in variables:
        tape_lib.variable_accessed(variable)
    result = read(*(v.handle for v in variables), *keys, *offsets)
    return [result] if isinstance(result, tf.Tensor) else list(result)
