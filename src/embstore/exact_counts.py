"""How often keys without a row were seen, key by key, in a counter beside a table.

table.exact_counts = KeyCounts(capacity=1 << 20)      # then dumps and logs of the table carry it

The engine's own counters (Table.admission_counters) do not know their keys; these do, so any number of ranks
can take them over.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Counts = tuple[Array, Array]  # distinct keys in ascending order, and how often each was seen


class ExactCounts(Protocol):
    """A counter of keys that dumps and logs carry. In changes, a count of 0 is a key that was forgotten."""

    def items(self) -> Counts:
        """All keys and their counts."""
        ...

    def replace(self, keys: Array, counts: Array) -> None:
        """Forgets everything and takes these counts."""
        ...

    def track_changes(self, on: bool) -> None:
        """Starts to record what changes, with nothing changed so far, or stops."""
        ...

    def take_changes(self) -> Counts:
        """What changed since the last call, or since `track_changes`."""
        ...

    def apply_changes(self, keys: Array, counts: Array) -> None:
        """Counts on as the counter that the changes come from."""
        ...

    def return_changes(self, keys: Array) -> None:
        """Makes keys of changes that could not be used part of the next ones."""
        ...


def with_changes(counts: Counts, changes: Counts) -> Counts:
    """Counts after changes."""
    keys, sums = counts
    changed, now = changes
    kept = ~np.isin(keys, changed)
    there = now > 0
    keys = np.concatenate([keys[kept], changed[there]])
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate([sums[kept], now[there]])[order]


def changes_between(before: Counts, now: Counts) -> Counts:
    """What turns `before` into `now`."""
    gone = np.setdiff1d(before[0], now[0], assume_unique=True)
    places = np.minimum(np.searchsorted(before[0], now[0]), max(len(before[0]) - 1, 0))
    if len(before[0]):
        new = (before[0][places] != now[0]) | (before[1][places] != now[1])
    else:
        new = np.ones(len(now[0]), bool)
    keys = np.concatenate([now[0][new], gone])
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate([now[1][new], np.zeros_like(gone)])[order]


def counts_of(counts: Counts, keys: Array) -> Array:
    """The count of each key; 0 where there is none."""
    if not len(counts[0]):
        return np.zeros(len(keys), np.int64)
    places = np.minimum(np.searchsorted(counts[0], keys), len(counts[0]) - 1)
    return np.where(counts[0][places] == keys, counts[1][places], 0)
