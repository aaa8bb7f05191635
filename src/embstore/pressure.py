"""What a table says when it does not fit its stream: a warning in the log that names what to do.

Counters are read every `EVERY` training batches. Each kind of warning comes once, and again after an hour at
the earliest if it still holds.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from embstore.options import DEFAULT_MAX_CAPACITY

if TYPE_CHECKING:
    from embstore.rows import Stats
    from embstore.table import Table

logger = logging.getLogger("embstore")

EVERY = 256  # training batches
AGAIN_SECONDS = 3600.0
HEAVY_EVICTION = 0.05  # evicted rows for each id that was looked up
MANY_REFUSALS = 0.001


class Pressure:
    """Watches the counters of a table."""

    def __init__(self) -> None:
        self._batches = 0
        self._before: Stats | None = None
        self._told: dict[str, float] = {}

    def after_batch(self, table: Table) -> None:
        """To be called after each training batch."""
        if self._batches % EVERY == 0:
            self.check(table)
        self._batches += 1

    def check(self, table: Table) -> None:
        """Warns of what has happened since the last call."""
        now = table.stats()
        before = self._before
        self._before = now
        if before is None:
            return
        uses = sum(
            getattr(now, f) - getattr(before, f) for f in ("hits", "inserts", "refusals", "unadmitted")
        )
        evicted, refused = now.evictions - before.evictions, now.refusals - before.refusals
        rows = f"max_capacity (now {table.options.max_capacity:,})"
        if evicted > HEAVY_EVICTION * uses and table.store is None:
            choice = (
                f"a larger {rows}"
                if table.options.shared_rows
                else f"a larger {rows}, or score_strategy='lfu' with admission='frequency' and shared_rows=1,"
            )
            self._tell(
                "evictions",
                f"table {table.name!r} evicted {evicted:,} rows in its last {EVERY} training batches, "
                f"{100 * evicted / uses:.0f} for every 100 ids: {choice} helps. table.sample_misses() and "
                "later table.advise() tell what capacity gives what hit rate",
            )
        if refused > MANY_REFUSALS * uses and not table.options.shared_rows:
            self._tell(
                "refusals",
                f"table {table.name!r} had no room for {refused:,} ids in its last {EVERY} training batches: "
                f"the ids of one batch do not fit it. A larger {rows}, shared_rows=1 or smaller batches help",
            )
        limit = table.options.max_capacity
        if now.size > limit and limit < DEFAULT_MAX_CAPACITY:
            reason = (
                "a batch needs more rows than that at once"
                if table.store is not None
                else f"its score_strategy is {table.options.score_strategy.name.lower()!r}"
            )
            self._tell(
                "budget",
                f"table {table.name!r} has {now.size:,} rows, more than its max_capacity of {limit:,}: "
                f"{reason}. Give it a ttl, another score_strategy or a larger max_capacity",
            )

    def _tell(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._told.get(kind, -AGAIN_SECONDS) >= AGAIN_SECONDS:
            self._told[kind] = now
            logger.warning(message)
