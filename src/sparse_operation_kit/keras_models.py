"""Finding sok variables in a model: layers of Keras 3 list their own kind of variable only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.static import StaticVariable


def trainable_variables(layer_or_model: Any) -> list[Any]:
    """The trainable sok variables of a layer, a model or a tf.Module, each once.

    Looks into attributes, lists, tuples, dicts and sublayers.

    Args:
        layer_or_model: a Keras layer or model, or a tf.Module.

    Returns:
        A list, for `tape.gradient` and `OptimizerWrapper.apply_gradients`.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> model = tf.Module()
        >>> model.towers = {"user": sok.DynamicVariable(dimension=2), "bias": tf.Variable(0.0)}
        >>> len(sok.trainable_variables(model))
        1
    """
    found = {id(v): v for v in _walk(layer_or_model, set(), top=True)}
    return [v for v in found.values() if v.trainable]


def _walk(value: Any, seen: set[int], *, top: bool = False) -> Iterator[Any]:
    if isinstance(value, (DynamicVariable, StaticVariable)):
        yield value
        return
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif hasattr(value, "__dict__") and (top or hasattr(type(value), "trainable_variables")):
        inside = list(vars(value).values())
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for item in inside:
        yield from _walk(item, seen)
