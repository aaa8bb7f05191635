"""How often keys were seen, exactly, for a bounded number of keys.

counts = KeyCounts(capacity=1 << 20)
counts.add([7, 9], [1, 2])          # array([1, 2]): the sums so far
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embstore.options import TableOptions
from embstore.table import Table

Array = npt.NDArray[np.int64]


class KeyCounts:
    """Counts by key, in a table without vectors worth mentioning: about 40 bytes a key.

    capacity  keys at most, of which the smallest counts give way; None: any number. Up to an eighth more are
              kept for a while, so that making room is rare
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._returned: Array = np.empty(0, np.int64)
        self._table = Table(
            TableOptions(
                name="counts",
                dim=1,
                score_strategy="lfu",
                init_capacity=1024,
            )
        )

    def __len__(self) -> int:
        return len(self._table)

    @property
    def bytes(self) -> int:
        return self._table.stats().bytes

    def add(self, keys: Array, frequencies: Array) -> Array:
        """Adds to the counts of distinct keys; returns the counts so far, also of keys that give way at once.

        Raises ValueError unless frequencies are at least 1.
        """
        keys, more = np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(frequencies, np.int64)
        if keys.shape != more.shape or keys.ndim != 1:
            raise ValueError(f"frequencies should have one number a key, {keys.shape}, but has: {more.shape}")
        if len(keys) == 0:
            return more
        if int(more.min()) < 1:
            raise ValueError(f"frequencies should be at least 1 but one is: {more.min()}")
        sums = self._table.read(keys).scores.astype(np.int64) + more
        self._assign(keys, sums)
        if self._capacity is not None and len(self) > self._capacity + self._capacity // 8:
            self._make_room(self._capacity)
        return sums

    def _make_room(self, capacity: int) -> None:
        keys, counts = self._all()
        gone = len(keys) - capacity
        if gone > 0:
            self._table.erase(keys[np.argpartition(counts, gone - 1)[:gone]])

    def erase(self, keys: Array) -> None:
        """Forgets keys; those that are not there are ignored."""
        self._table.erase(np.ascontiguousarray(keys, np.int64))

    def items(self) -> tuple[Array, Array]:
        """Keys in ascending order and the count of each."""
        if self._capacity is not None:
            self._make_room(self._capacity)
        return self._all()

    def _all(self) -> tuple[Array, Array]:
        rows = self._table.rows()
        return rows.keys, rows.scores.astype(np.int64)

    def replace(self, keys: Array, counts: Array) -> None:
        """Forgets everything and takes these counts."""
        self._table.clear()
        self.add(keys, counts)

    # ---- what changed, for logs: see embstore.exact_counts

    def track_changes(self, on: bool) -> None:
        self._table.track_changes(on)
        self._returned = np.empty(0, np.int64)

    def take_changes(self) -> tuple[Array, Array]:
        rows, removed = self._table.take_changes()
        keys = np.unique(np.concatenate([rows.keys, removed, self._returned]))
        self._returned = np.empty(0, np.int64)
        return keys, self._table.read(keys).scores.astype(np.int64)

    def return_changes(self, keys: Array) -> None:
        self._returned = np.union1d(self._returned, keys)

    def apply_changes(self, keys: Array, counts: Array) -> None:
        there = counts > 0
        self.erase(keys[~there])
        self._assign(keys[there], counts[there])

    def _assign(self, keys: Array, counts: Array) -> None:
        zeros = np.zeros((len(keys), 1), np.float32)
        self._table.insert_or_assign(keys, zeros, scores=counts.astype(np.uint64))
