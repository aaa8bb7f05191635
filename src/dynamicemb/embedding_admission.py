"""Admission: which keys get a row, and how often the others were seen.

DynamicEmbTableOptions(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(1 << 20))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynamicemb.enumerations import DynamicEmbInitializerArgs
from dynamicemb.initializer import create_initializer_from_args
from dynamicemb.types import AdmissionStrategy, Counter, MemoryType
from embstore.key_counts import KeyCounts


@dataclass
class KVCounter:
    """The size of the counter of a table: how many keys without a row a rank counts at once.

    Args:
        capacity: keys at most; the smallest counts give way.
        bucket_capacity: no effect: the smallest are looked for among all.
        key_type: torch.int64.

    Raises:
        ValueError: capacity is not positive; when a table's options are made.

    Examples:
        >>> from dynamicemb import DynamicEmbTableOptions, FrequencyAdmissionStrategy, KVCounter
        >>> options = DynamicEmbTableOptions(
        ...     admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(1 << 20)
        ... )
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
        self.counts = [KeyCounts(counter.capacity) for counter in kv_counters]

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        if not keys.numel() == table_ids.numel() == frequencies.numel():
            raise ValueError(
                f"keys, table_ids and frequencies should be of one length but are of: "
                f"{keys.numel()}, {table_ids.numel()}, {frequencies.numel()}"
            )
        sums = torch.empty(keys.numel(), dtype=torch.int64)
        for table, places in self._places(table_ids):
            found = self.counts[table].add(_numpy(keys)[places], _numpy(frequencies)[places])
            sums[torch.from_numpy(places)] = torch.from_numpy(found)
        return sums.to(keys.device)

    def _places(self, table_ids: torch.Tensor) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        ids = _numpy(table_ids)
        for table in np.unique(ids).tolist():
            if not 0 <= table < len(self.counts):
                raise ValueError(f"table_ids should be from 0 to {len(self.counts) - 1} but one is: {table}")
            yield table, np.flatnonzero(ids == table)

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for table, places in self._places(table_ids):
            self.counts[table].erase(_numpy(keys)[places])

    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes of keys and counts; they are in host memory."""
        return sum(counts.bytes for counts in self.counts) if mem_type is MemoryType.HOST else 0

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        keys, counts = np.fromfile(key_file, np.int64), np.fromfile(counter_file, np.int64)
        if len(keys) != len(counts):
            raise ValueError(
                f"{counter_file}: expected {len(keys)} counts as {key_file} has keys, found {len(counts)}"
            )
        self.counts[table_id].add(keys, counts)

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        keys, counts = self.counts[table_id].items()
        keys.tofile(key_file)
        counts.tofile(counter_file)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    return tensor.to("cpu", torch.int64).numpy()


@dataclass(frozen=True)
class FrequencyAdmissionStrategy(AdmissionStrategy):
    """A key gets a row once it was seen often enough in training.

    Until then its vector is that of `initializer_args` and its gradient is dropped. A table with an
    `admission_counter`, a threshold above 255 or `initializer_args` counts exactly, at about 40 bytes a key;
    any other in a filter of two bytes a key, which admits a few keys early.

    Args:
        threshold: how often; 0 and 1 admit every key at once.
        initializer_args: the vector of keys without a row. None: the table's initializer.

    Raises:
        ValueError: threshold is no integer of at least 0, or initializer_args is of another class.

    Examples:
        >>> from dynamicemb import DynamicEmbTableOptions, FrequencyAdmissionStrategy
        >>> options = DynamicEmbTableOptions(admit_strategy=FrequencyAdmissionStrategy(3))
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
