"""Keys as they come from the user: integers of any width."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def as_keys(value: Any, name: str) -> tf.Tensor:
    """An int64 tensor; uint64 keeps its bits. Raises ValueError for anything but integers."""
    keys = tf.convert_to_tensor(value)
    if isinstance(value, (list, tuple)) and keys.shape.num_elements() == 0:
        return tf.zeros(keys.shape, tf.int64)  # TensorFlow takes [] as float32
    if not keys.dtype.is_integer:
        raise ValueError(f"{name} should hold integers but hold: {keys.dtype.name}")
    return tf.cast(keys, tf.int64)
