"""Element types of files, kinds of memory, and the interfaces that a user may implement."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dynamicemb.enumerations import (
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)

__all__ = [
    "BUCKET_ALIGNMENT",
    "COUNTER_TYPE",
    "DEMB_TABLE_ALIGN_SIZE",
    "EMBEDDING_TYPE",
    "KEY_TYPE",
    "MAX_BUCKET_CAPACITY",
    "OPT_STATE_TYPE",
    "SCORE_TYPE",
    "AdmissionStrategy",
    "Cache",
    "CopyMode",
    "Counter",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "MemoryType",
    "Storage",
    "torch_dtype_to_np_dtype",
]

KEY_TYPE = torch.int64
EMBEDDING_TYPE = torch.float32
SCORE_TYPE = torch.int64
OPT_STATE_TYPE = torch.float32
COUNTER_TYPE = torch.int64

torch_dtype_to_np_dtype = {
    torch.int64: np.int64,
    torch.uint64: np.uint64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float16: np.float16,
}


class MemoryType(enum.Enum):
    """Where bytes are."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class CopyMode(enum.Enum):
    """What `Storage.find` returns of a row: the vector, or the vector and the optimizer state behind it."""

    EMBEDDING = "embedding"
    VALUE = "value"


class Storage(abc.ABC):
    """Keeps the rows of the tables of a module, by key and table."""

    @abc.abstractmethod
    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """(number missing, missing keys, their indices, table ids and scores, found mask, scores, values)."""

    @abc.abstractmethod
    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Stores rows; with preserve_existing the scores of keys that are there stay."""

    @abc.abstractmethod
    def dump(self, table_id: int, *files: Any, **keywords: Any) -> None:
        """Writes a table to the files of layout v2."""

    @abc.abstractmethod
    def load(self, table_id: int, *files: Any, **keywords: Any) -> int | None:
        """Reads a table from the files of layout v2; returns its step, if the dump has one."""

    @abc.abstractmethod
    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[Any, ...]]:
        """Blocks of (keys, vectors, optimizer states or None, scores)."""


class Cache(abc.ABC):
    """Holds the rows in use, in front of a Storage."""

    @abc.abstractmethod
    def lookup(self, *arguments: Any, **keywords: Any) -> Any:
        """Finds rows."""

    @abc.abstractmethod
    def insert_and_evict(self, *arguments: Any, **keywords: Any) -> Any:
        """Stores rows and returns those that had to go."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets all rows."""

    @property
    @abc.abstractmethod
    def cache_metrics(self) -> torch.Tensor | None:
        """Counts of keys, hits, insertions and evictions of the last batch; None while not recorded."""

    @abc.abstractmethod
    def set_record_cache_metrics(self, record: bool) -> None:
        """Turns `cache_metrics` on or off."""


class Counter(abc.ABC):
    """Counts how often keys without a row were seen: derive from it to count elsewhere.

    Keys of a call are distinct. An instance is the `admission_counter` of a table's options.

    Examples:
        >>> import torch
        >>> from dynamicemb import KVCounter
        >>> from dynamicemb.embedding_admission import MultiTableKVCounter
        >>> counter = MultiTableKVCounter([KVCounter(1024)])  # the one that a KVCounter stands for
        >>> counter.add(torch.tensor([7, 9]), torch.tensor([0, 0]), torch.tensor([1, 2]))
        tensor([1, 2])
    """

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Adds the frequencies; returns the counts so far."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        """Forgets the counts of keys; those that are not there are ignored."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        """Bytes in this kind of memory."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Adds the counts of a dump."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        """Writes int64 keys and int64 counts."""


class AdmissionStrategy(abc.ABC):
    """Decides which keys get a row: derive from it for a rule of your own.

    Examples:
        >>> import torch
        >>> from dynamicemb import AdmissionStrategy, DynamicEmbTableOptions
        >>> class EvenKeys(AdmissionStrategy):
        ...     def admit(self, keys, frequencies):
        ...         return keys % 2 == 0
        ...
        ...     def initialize_non_admitted_embeddings(self, buffer, indices):
        ...         return False
        >>> options = DynamicEmbTableOptions(admit_strategy=EvenKeys())
    """

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """A bool for each key, given how often it was seen."""

    @abc.abstractmethod
    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        """Fills the rows `indices` of `buffer`; False when the table's own initializer should do it."""
