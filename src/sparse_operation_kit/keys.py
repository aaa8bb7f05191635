"""Keys as they come from the user: integers of any width."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def as_keys(value: Any, name: str) -> tf.Tensor:
    """An int64 tensor; uint64 keeps its bits. Raises ValueError for anything but integers."""
    keys = tf.convert_to_tensor(value)
    if keys.shape.rank is not None and 0 in keys.shape.as_list() and not tf.is_tensor(value):
        return tf.zeros(keys.shape, tf.int64)  # [] has no type of its own
    if not keys.dtype.is_integer:
        raise ValueError(f"{name} should hold integers but hold: {keys.dtype.name}")
    return tf.cast(keys, tf.int64)
