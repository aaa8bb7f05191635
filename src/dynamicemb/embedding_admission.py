"""Admission: which keys get a row, and how often the others were seen.

DynamicEmbTableOptions(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(1 << 20))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynamicemb.enumerations import DynamicEmbInitializerArgs
from dynamicemb.initializer import create_initializer_from_args
from dynamicemb.types import AdmissionStrategy, Counter, MemoryType


@dataclass
class KVCounter:
    """The size of the counter of a table: how many keys without a row a rank counts at once.

    capacity, bucket_capacity, key_type  as in the original package. A table here counts in its own filter,
    which has room for several keys a row, so these have no effect on it; `MultiTableKVCounter` uses them.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64


class MultiTableKVCounter(Counter):
    """Counts of several tables in memory, at most `capacity` of each: the smallest give way.

    counter = MultiTableKVCounter([KVCounter(1024)])
    counter.add(torch.tensor([7, 9]), torch.tensor([0, 0]), torch.tensor([1, 2]))      # tensor([1, 2])
    """

    def __init__(self, kv_counters: Sequence[KVCounter], device: torch.device | None = None) -> None:
        if not kv_counters:
            raise ValueError("kv_counters should have at least one KVCounter but is empty")
        self._capacities = [counter.capacity for counter in kv_counters]
        self._counts: list[dict[int, int]] = [{} for _ in kv_counters]
        self._device = device

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        if not keys.numel() == table_ids.numel() == frequencies.numel():
            raise ValueError(
                f"keys, table_ids and frequencies should be of one length but are of: "
                f"{keys.numel()}, {table_ids.numel()}, {frequencies.numel()}"
            )
        sums = []
        triples = zip(keys.tolist(), table_ids.tolist(), frequencies.tolist(), strict=True)
        for key, table, frequency in triples:
            counts = self._counts[table]
            counts[key] = counts.get(key, 0) + frequency
            sums.append(counts[key])
        for table in set(table_ids.tolist()):
            self._shrink(table)
        return torch.tensor(sums, dtype=torch.int64, device=keys.device)

    def _shrink(self, table: int) -> None:
        counts, capacity = self._counts[table], self._capacities[table]
        if len(counts) > capacity:
            largest = sorted(counts.items(), key=operator.itemgetter(1), reverse=True)[:capacity]
            self._counts[table] = dict(largest)

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for key, table in zip(keys.tolist(), table_ids.tolist(), strict=True):
            self._counts[table].pop(key, None)

    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes of keys and counts; they are in host memory."""
        return 16 * sum(map(len, self._counts)) if mem_type is MemoryType.HOST else 0

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        keys, counts = np.fromfile(key_file, np.int64), np.fromfile(counter_file, np.int64)
        if len(keys) != len(counts):
            raise ValueError(
                f"{counter_file}: expected {len(keys)} counts as {key_file} has keys, found {len(counts)}"
            )
        of_table = self._counts[table_id]
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            of_table[key] = of_table.get(key, 0) + count
        self._shrink(table_id)

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        counts = self._counts[table_id]
        np.fromiter(counts.keys(), np.int64, len(counts)).tofile(key_file)
        np.fromiter(counts.values(), np.int64, len(counts)).tofile(counter_file)


@dataclass(frozen=True)
class FrequencyAdmissionStrategy(AdmissionStrategy):
    """A key gets a row once it was seen `threshold` times in training; 0 and 1: at once.

    Until then its vector is its initial value and its gradient is dropped. Counting takes about two
    bytes for each key that was seen. Any threshold can be written down; a table takes up to 255.

    initializer_args  the vector of keys without a row; None: the table's initializer
    """

    threshold: int
    initializer_args: DynamicEmbInitializerArgs | None = None

    def __post_init__(self) -> None:
        value = self.threshold
        if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 0:
            raise ValueError(f"threshold should be an integer of at least 0 but is: {value!r}")
        object.__setattr__(self, "threshold", operator.index(value))
        if self.initializer_args is not None and not isinstance(
            self.initializer_args, DynamicEmbInitializerArgs
        ):
            raise ValueError(
                f"initializer_args should be None or DynamicEmbInitializerArgs but is: "
                f"{self.initializer_args!r}"
            )

    def __hash__(self) -> int:
        return hash((self.threshold, repr(self.initializer_args)))

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Whether each key was seen often enough. Raises ValueError for unequal lengths."""
        if keys.numel() != frequencies.numel():
            raise ValueError(
                f"frequencies should have {keys.numel()} elements as keys has but has: {frequencies.numel()}"
            )
        return frequencies >= self.threshold

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Fills the rows by `initializer_args`; False without."""
        if self.initializer_args is None:
            return False
        create_initializer_from_args(self.initializer_args)(buffer, indices)
        return True
