"""Ids out of KeyedJaggedTensors, and slots into copies of them.

    keys     user        clicked  shown           tables {"user": 0, "clicked": 1, "shown": 1}
    values   7  9  7  |  4     |  4  5            ids    [7 9 7], [4 4 5]
    slots    0  1  0  |  0     |  0  1

Features of no table keep their values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from .windows import Ids

Part = tuple[KeyedJaggedTensor, Mapping[str, int]]  # and the number of the table of each feature


def _ranges(part: Part) -> Iterator[tuple[int, int, int]]:
    """(table, begin, end) of the values of each feature that has a table."""
    kjt, tables = part
    offsets = kjt.offset_per_key()
    for i, feature in enumerate(kjt.keys()):
        if feature in tables:
            yield tables[feature], offsets[i], offsets[i + 1]


def ids_of(parts: Sequence[Part], tables: int) -> list[Ids]:
    """The ids of each table, part after part and feature after feature."""
    found: list[list[Ids]] = [[] for _ in range(tables)]
    for part in parts:
        values = part[0].values()
        if values.is_floating_point() or values.dtype == torch.bool:
            raise TypeError(
                f"the values of a KeyedJaggedTensor should be ids but their dtype is: {values.dtype}"
            )
        host = values.detach().to("cpu", torch.int64).contiguous().numpy()
        for table, begin, end in _ranges(part):
            found[table].append(host[begin:end])
    return [f[0] if len(f) == 1 else np.concatenate([*f, np.empty(0, np.int64)]) for f in found]


def with_slots(parts: Sequence[Part], slots: Sequence[Ids]) -> list[KeyedJaggedTensor]:
    """The same jagged tensors with slots in place of ids, as `ids_of` has ordered them."""
    taken = [0] * len(slots)
    result = []
    for part in parts:
        kjt = part[0]
        values = kjt.values().detach().to("cpu", copy=True)
        for table, begin, end in _ranges(part):
            values[begin:end] = torch.from_numpy(slots[table][taken[table] : taken[table] + end - begin])
            taken[table] += end - begin
        mapped = copy.copy(kjt)
        mapped._values = values.to(kjt.values().device)
        mapped._jt_dict = None  # a cache of the old values
        result.append(mapped)
    return result
