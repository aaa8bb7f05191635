"""One table: which of its slots an id has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from embstore import SlotMap

from .tensor_list import TensorList

__all__ = ["IDTransformer", "TensorList", "slot_map"]

EVICTION_TYPES = ("mixed_lru_lfu",)
TRANSFORM_TYPES = ("naive", "cacheline")


def slot_map(
    num_embedding: int, eviction_config: Mapping[str, Any] | None, transform_config: Mapping[str, Any] | None
) -> SlotMap:
    """The map that both configs describe, or a ValueError that names what is wrong."""
    eviction = {"type": "mixed_lru_lfu"} if eviction_config is None else dict(eviction_config)
    transform = {"type": "naive"} if transform_config is None else dict(transform_config)
    for name, config, types, known in (
        ("eviction_config", eviction, EVICTION_TYPES, {"type", "min_used_freq_power"}),
        ("transform_config", transform, TRANSFORM_TYPES, {"type"}),
    ):
        if config.get("type") not in types:
            raise ValueError(f"{name}['type'] should be one of {list(types)} but is: {config.get('type')!r}")
        if unknown := sorted(set(config) - known):
            raise ValueError(f"{name} should have no other keys than {sorted(known)} but has: {unknown}")
    power = eviction.get("min_used_freq_power", 5)
    if not isinstance(power, int) or not 0 <= power <= 31:
        raise ValueError(f"min_used_freq_power should be an integer from 0 to 31 but is: {power!r}")
    return SlotMap(num_embedding, power)


class IDTransformer:
    """Maps ids to the slots of a table of `num_embedding` rows, the lowest free slot first.

    >>> slots = torch.empty(3, dtype=torch.int64)
    >>> IDTransformer(4).transform(TensorList([torch.tensor([9, -5, 9])]), TensorList([slots]), 0)[0]
    True
    >>> slots.tolist()
    [0, 1, 0]
    """

    def __init__(
        self,
        num_embedding: int,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.map = slot_map(num_embedding, eviction_config, transform_config)
        self._saved_time = 0

    def transform(
        self, global_ids: TensorList, cache_ids: TensorList, time: int
    ) -> tuple[bool, torch.Tensor | None]:
        """Writes slots into `cache_ids`. Returns whether all ids have one, and the new pairs (n, 2).

        When the table is full the slots up to the first id without one are written, the rest is left.
        """
        ids = torch.cat([tensor.reshape(-1) for tensor in global_ids]) if len(global_ids) else torch.empty(0)
        found = self.map.find(ids.to(torch.int64), time)
        new = self.map.admit()
        complete = self.map.missing == 0
        end = len(found) if complete else int(np.argmax(found < 0))
        begin = 0
        for out in cache_ids:
            count = min(out.numel(), max(end - begin, 0))
            out.view(-1)[:count] = torch.from_numpy(found[begin : begin + count])
            begin += out.numel()
        return complete, torch.from_numpy(new) if len(new) else None

    def evict(self, num_to_evict: int) -> torch.Tensor:
        """Removes up to this many ids, the least used first, and returns their pairs (n, 2)."""
        pairs = self.map.worst(num_to_evict)
        self.map.forget(np.ascontiguousarray(pairs[:, 0]))
        return torch.from_numpy(pairs)

    def save(self) -> torch.Tensor:
        """The pairs (n, 2) that were used since the last call."""
        pairs = self.map.used_since(self._saved_time)
        self._saved_time = self.map.last_time + 1
        return torch.from_numpy(pairs)
