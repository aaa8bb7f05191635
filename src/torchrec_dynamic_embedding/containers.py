"""KeyedJaggedTensors inside a batch, however it is nested: found, and replaced in a copy of the same type.

    {"ids": kjt, "label": t}     (("ids",), kjt)
    Sample(label, [kjt, kjt])    (("features", 0), kjt), (("features", 1), kjt)
    kjt                          ((), kjt)

Looked into are tuples, named tuples, lists, dicts, dataclasses, and plain objects unless inside of another.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

Steps = tuple[Any, ...]  # indices, keys and names of fields, from the outside in


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """(step, child) of a container."""
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return vars(value).items() if _is_plain_object(value) else ()


def _is_plain_object(value: Any) -> bool:
    closed = (type, ModuleType, torch.Tensor, torch.nn.Module)
    if isinstance(value, (tuple, list, Mapping, *closed)) or dataclasses.is_dataclass(value):
        return False
    return hasattr(value, "__dict__") and not callable(value)


def jagged_tensors(
    value: Any, steps: Steps = (), inside: tuple[int, ...] = (), in_object: bool = False
) -> Iterator[tuple[Steps, KeyedJaggedTensor]]:
    """Every KeyedJaggedTensor of a batch, in order, and the steps that lead to it."""
    if isinstance(value, KeyedJaggedTensor):
        yield steps, value
        return
    is_object = _is_plain_object(value)
    if isinstance(value, type) or id(value) in inside or (is_object and in_object):
        return
    for step, child in _children(value):
        yield from jagged_tensors(child, (*steps, step), (*inside, id(value)), in_object or is_object)


def replaced(value: Any, new: Mapping[Steps, KeyedJaggedTensor]) -> Any:
    """A copy of the batch with other KeyedJaggedTensors in these places; what holds none is not copied."""
    if not new:
        return value
    if () in new:
        return new[()]
    inner: dict[Any, dict[Steps, KeyedJaggedTensor]] = {}
    for (first, *rest), kjt in new.items():
        inner.setdefault(first, {})[tuple(rest)] = kjt
    children = {step: child for step, child in _children(value) if step in inner}
    changed = {step: replaced(child, inner[step]) for step, child in children.items()}
    if isinstance(value, tuple):
        items = [changed.get(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for step, child in changed.items():
        if isinstance(value, (list, Mapping)):
            result[step] = child  # type: ignore[index]
        else:
            object.__setattr__(result, step, child)  # frozen ones too
    return result
