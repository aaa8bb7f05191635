"""Calls from TensorFlow into Python: at once in eager mode, as an operation inside a tf.function.

TensorFlow keeps the operations of a tf.function that have effects in the order of the program, on every rank
the same; collectives inside of them rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

ALIGNMENT = 64  # of memory that TensorFlow computes on
SMALL_BYTES = 1 << 12  # copying these takes no longer

# AutoGraph would rewrite what a tf.function calls, and slow down the Python that runs at every step.
unconverted = tf.autograph.experimental.do_not_convert


def as_array(tensor: Any) -> np.ndarray:
    """The memory of an eager tensor, without a copy. Read-only."""
    buffer = tensor.shape.num_elements() and tensor.dtype != tf.bfloat16  # which Python's buffers do not know
    return np.asarray(memoryview(tensor)) if buffer else tensor.numpy()


def as_tensor(array: Any, dtype: tf.DType) -> tf.Tensor:
    """The array as an eager tensor, which takes its memory over where it can: the caller lets go of it."""
    large = isinstance(array, np.ndarray) and array.nbytes > SMALL_BYTES
    if large and array.flags.carray and array.dtype == dtype.as_numpy_dtype:
        if array.ctypes.data % ALIGNMENT == 0:
            return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array, dtype)


def in_session_graph() -> bool:
    """Whether operations go into a graph of tf.compat.v1, of which a session runs what it is asked for."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def require_eager(what: str) -> None:
    """Raises RuntimeError inside a tf.function or a graph of tf.compat.v1."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{what} should run in eager mode, not inside a tf.function or a graph of tf.compat.v1"
        )


def call(
    function: Callable[..., Sequence[np.ndarray]], inputs: Sequence[Any], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """function(*arrays) -> arrays of these types, as tensors."""
    if tf.executing_eagerly():
        results = function(*(as_array(tf.convert_to_tensor(x)) for x in inputs))
        return [as_tensor(result, dtype) for result, dtype in zip(results, dtypes)]
    return list(tf.numpy_function(lambda *arrays: list(function(*arrays)), inputs, list(dtypes)))


def call_together(
    function: Callable[..., Sequence[np.ndarray]], inputs: Sequence[Any], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """`call` of a function that talks to other ranks.

    A session runs operations that do not depend on each other in any order, on every rank another one. So the
    collectives of a graph depend on each other, in the order in which they were built.
    """
    if not in_session_graph():
        return call(function, inputs, dtypes)
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies(getattr(graph, "_sok_last_collective", [])):
        results = call(function, inputs, dtypes)
    graph._sok_last_collective = [results[0].op]
    return results
