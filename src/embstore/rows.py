"""What a table hands out about itself: rows in plain arrays, and counters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Rows:
    """Rows in plain arrays; row i of each belongs to key i.

    Args:
        keys: int64 (n).
        values: float32 (n, dim).
        states: float32 (n, state width), the optimizer state.
        scores: uint64 (n).
        uses: uint32 (n), how often each key was used; None where the table does not count that beside the
            scores.

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2, optimizer=embstore.Adam())
        >>> table.insert_or_assign([7], [[1.0, 2.0]])
        >>> rows = table.rows()
        >>> rows.keys.tolist(), rows.values.tolist(), rows.states.shape
        ([7], [[1.0, 2.0]], (1, 4))
    """

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    states: npt.NDArray[np.float32]
    scores: npt.NDArray[np.uint64]
    uses: npt.NDArray[np.uint32] | None = None

    def __getitem__(self, which: Any) -> Rows:
        """The rows of a slice, a mask or row numbers."""
        uses = None if self.uses is None else self.uses[which]
        return Rows(self.keys[which], self.values[which], self.states[which], self.scores[which], uses)

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def concatenate(blocks: list[Rows]) -> Rows:
        """One block with the rows of all of them, in order. REQUIRES at least one block."""

        def joined(name: str) -> Any:
            parts = [getattr(block, name) for block in blocks]
            return None if any(part is None for part in parts) else np.concatenate(parts)

        return Rows(*(joined(f.name) for f in fields(Rows)))


@dataclass(frozen=True)
class Stats:
    """Counters of a table since it was made, and its sizes now.

    inserts counts the rows that took a slot, fetches those of them that came from the store below, and
    write_backs the rows that went down to it. dropped_gradients counts rows that were evicted although a
    live batch had them, because no other row could go: the gradients of that batch skip them. expired counts
    the rows that were not used for too long.

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2)
        >>> for _ in range(2):
        ...     vectors = table.find_or_insert([1, 2, 3])
        >>> stats = table.stats()
        >>> stats.size, stats.inserts, stats.hits, stats.hit_rate
        (3, 3, 3, 0.5)
    """

    size: int
    capacity: int
    max_capacity: int
    hits: int
    inserts: int
    evictions: int
    refusals: int
    log_dropped: int
    unadmitted: int
    bytes: int
    fetches: int
    write_backs: int
    dropped_gradients: int
    expired: int

    @property
    def hit_rate(self) -> float | None:
        """Share of the lookups of training batches that found a row; None before the first."""
        looked_up = self.hits + self.inserts + self.refusals + self.unadmitted
        return self.hits / looked_up if looked_up else None
