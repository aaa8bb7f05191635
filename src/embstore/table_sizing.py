"""How many rows a table has: limits that move, rows that expire, and what another size would find."""

from __future__ import annotations

from dataclasses import replace

from embstore.advice import Advice, MissSample, advice_from
from embstore.arrays import as_integer
from embstore.options import DEFAULT_MAX_CAPACITY, EvictionLog, ScoreStrategy, as_age
from embstore.progress import Wanted, shown
from embstore.rows import Rows
from embstore.table_copies import TableCopies

RESERVE_STEPS = 50  # that progress is told of


class TableSizing(TableCopies):
    """Base of `Table`."""

    def reserve(self, rows: int, *, progress: Wanted = False) -> None:
        """Makes room for many rows at once, so that no later batch waits for growth.

        Args:
            rows: how many, at most max_capacity.
            progress: True for a bar of tqdm, or a function of (rows of room, rows wanted).

        Raises:
            ValueError: rows is negative or above max_capacity.
            MemoryError: the machine has no room for them.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.reserve(1_000_000)
            >>> table.capacity >= 1_000_000
            True
        """
        table = self._table
        rows = as_integer(rows, 0, (1 << 63) - 1, "rows")
        with shown(progress, "growing", unit=" rows") as report:
            # An index with rows grows bucket by bucket; an empty one is replaced, which takes one step.
            steps = RESERVE_STEPS if report and len(table) else 1
            for step in range(1, steps + 1):
                table._core.reserve(rows * step // steps)
                if report:
                    report(rows * step // steps, rows)

    def set_eviction_log(self, log: EvictionLog) -> None:
        """What the log of evictions keeps from now on; what it holds is dropped.

        Args:
            log: `EvictionLog.OFF`, `KEYS` or `ROWS`.
        """
        self._table._core.set_eviction_log(int(log))

    def evictions(self) -> Rows:
        """Takes what was evicted since the last call.

        Returns:
            `Rows`, empty unless eviction_log is set; with "keys" they have no vectors.

        Raises:
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, max_capacity=128, eviction_log="keys")
            >>> for first in range(0, 1000, 50):
            ...     vectors = table.find_or_insert(range(first, first + 50))
            >>> len(table.evictions()) + len(table)
            1000
        """
        return Rows(*self._table._core.drain_evictions())

    def set_max_capacity(self, rows: int) -> None:
        """Another limit from now on.

        Args:
            rows: at least 1. A smaller limit evicts the smallest scores, but no rows of batches that wait for
                their backward pass, and returns their memory.

        Raises:
            ValueError: rows is less than 1, or the table evicts nothing.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, max_capacity=1024)
            >>> vectors = table.find_or_insert(range(900))
            >>> table.set_max_capacity(256)
            >>> len(table) <= 256
            True
        """
        table = self._table
        rows = as_integer(rows, 1, (1 << 63) - 1, "rows")
        table._core.set_max_capacity(rows)
        table.options = replace(
            table.options, max_capacity=rows, init_capacity=min(table.options.init_capacity, rows)
        )

    def expire(self, older_than: float | None = None, *, below_score: int | None = None) -> int:
        """Removes rows that no training batch has used for a while, in the table and in the store below it.

        All rows of the store are read for that.

        Args:
            older_than: seconds ("timestamp", "no_eviction") or training batches ("step"); None is the ttl of
                the table.
            below_score: instead, rows with a smaller score, for any strategy.

        Returns:
            How many rows went.

        Raises:
            ValueError: both are given, or neither and the table has no ttl.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, score_strategy="step")
            >>> for batch in ([1, 2, 3], [3], [4]):
            ...     vectors = table.find_or_insert(batch)
            >>> table.expire(older_than=1), sorted(table)
            (2, [3, 4])
        """
        core, options = self._table._core, self._table.options
        if below_score is not None and older_than is not None:
            raise ValueError(f"older_than should be None beside below_score but is: {older_than!r}")
        if below_score is not None:
            return core.expire(as_integer(below_score, 0, (1 << 64) - 1, "below_score"))
        if older_than is None:
            older_than = options.ttl
        if older_than is None:
            raise ValueError("older_than should be given for a table without a ttl but is: None")
        age = as_age(older_than, options.score_strategy, "older_than", zero=True)
        # What a batch that came now would have, or the last batch.
        now = self._table.score - (options.score_strategy == ScoreStrategy.STEP)
        return core.expire(max(now - age, 0))

    def sample_misses(self, on: bool = True) -> None:
        """Starts to observe a sample of the ids for `advise`, or stops.

        Args:
            on: True starts with nothing seen so far.

        Raises:
            RuntimeError: the table is closed.
        """
        self._table._core.sample_misses(on)

    def miss_sample(self) -> MissSample:
        """What was observed, for `advise` and for merging the samples of ranks.

        Raises:
            RuntimeError: `sample_misses` was not called, or the table is closed.
        """
        return MissSample(*self._table._core.miss_sample())

    def advise(self) -> Advice:
        """What hit rate which capacity would give.

        Returns:
            An `Advice`; `print` shows it as a table.

        Raises:
            RuntimeError: `sample_misses` was not called, or the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.sample_misses()
            >>> for step in range(20):
            ...     vectors = table.find_or_insert(range(100))
            >>> table.advise().table
            'user'
        """
        sample, stats = self.miss_sample(), self._table.stats()
        bounded = stats.max_capacity < DEFAULT_MAX_CAPACITY
        now = stats.max_capacity if bounded else max(stats.size, 1)
        every = round(1 / sample.rate)
        ids = "all ids" if every == 1 else f"1 in {every} ids"
        return advice_from(
            sample,
            now,
            stats.bytes / max(stats.size, 1),
            self._table.options.keeps_frequent,
            table=self._table.name,
            rows=stats.size,
            capacity=stats.max_capacity if bounded else stats.size,
            hit_rate=stats.hit_rate,
            based_on=f"reuse distances and counts of {ids}, {round(sample.uses):,} uses",
        )
