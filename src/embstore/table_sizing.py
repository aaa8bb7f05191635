"""How many rows a table has: limits that move, rows that expire, and what another size would find."""

from __future__ import annotations

from dataclasses import replace

from embstore.advice import Advice, MissSample, advice_from
from embstore.arrays import as_integer
from embstore.options import DEFAULT_MAX_CAPACITY, ScoreStrategy, as_age
from embstore.table_copies import TableCopies


class TableSizing(TableCopies):
    """Base of `Table`."""

    def set_max_capacity(self, rows: int) -> None:
        """Another limit from now on. A smaller one evicts the smallest scores of the table, but no rows of
        batches that wait for their backward pass, and gives their memory back. Raises ValueError for a table
        that evicts nothing."""
        table = self._table
        rows = as_integer(rows, 1, (1 << 63) - 1, "rows")
        table._core.set_max_capacity(rows)
        table.options = replace(
            table.options, max_capacity=rows, init_capacity=min(table.options.init_capacity, rows)
        )

    def expire(self, older_than: float | None = None, *, below_score: int | None = None) -> int:
        """Removes the rows that were not used in a training batch for a while, in the table and in the store
        below it, whose rows are all read for that. Returns how many went.

        older_than   seconds ("timestamp", "no_eviction") or training batches ("step"); the ttl of the table
                     when not given
        below_score  instead: the rows whose score is smaller, for any strategy

        table.expire(older_than=7 * 24 * 3600)

        Raises ValueError unless one of the two says what is old.
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
        """Starts, with nothing seen so far, or stops to observe a sample of the ids for `advise`."""
        self._table._core.sample_misses(on)

    def miss_sample(self) -> MissSample:
        """What was observed. Raises RuntimeError unless `sample_misses` was called."""
        return MissSample(*self._table._core.miss_sample())

    def advise(self) -> Advice:
        """What hit rate which capacity would give; `print` shows it.

        table.sample_misses()
        ...                      # train
        print(table.advise())

        Raises RuntimeError unless `sample_misses` was called before.
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
            table=self._table.name,
            rows=stats.size,
            capacity=stats.max_capacity if bounded else stats.size,
            hit_rate=stats.hit_rate,
            based_on=f"reuse distances and counts of {ids}, {round(sample.uses):,} uses",
        )
