"""Table: rows by key.

table = Table("user", dim=2, initializer=Constant(1.0), optimizer=SGD(lr=0.5))
table.find_or_insert([7, -1, 7])          # [[1, 1], [1, 1], [1, 1]]
table.apply_gradients([7, 7], [[1, 0], [1, 0]])
table.find([7, 5])                        # ([[0, 1], [0, 0]], [True, False])
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import Array, address, as_floats, as_integer, as_keys, as_scores, empty_floats
from embstore.optimizers import Optimizer
from embstore.options import (
    Access,
    Admission,
    CheckMode,
    DType,
    EvictionLog,
    ScoreStrategy,
    TableOptions,
)
from embstore.ownership import Ownership
from embstore.pressure import Pressure
from embstore.progress import Wanted, shown
from embstore.rows import Rows, Stats
from embstore.stores import Store
from embstore.table_copies import _rebuild  # noqa: F401 (older pickles name it here)
from embstore.table_sizing import TableSizing

RESERVE_STEPS = 50  # that progress is told of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from embstore.options import AllTableKeywords


class RefusedKeysError(RuntimeError):
    """Keys found no place because their buckets are full of keys of the same batch (check_mode="error").

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2, max_capacity=128, check_mode="error")
        >>> try:
        ...     vectors = table.find_or_insert(range(1000))
        ... except embstore.RefusedKeysError as error:
        ...     print("a larger max_capacity" in str(error))
        True
    """


class Table(TableSizing):
    """A named set of rows with one dimension, optimizer, initializer and score strategy.

    Keys are integers in numpy arrays, torch tensors or sequences; answers come in the kind (and on the
    device) of the keys. A table may be read by several threads while one writes.

    Over a `store` (see embstore.stores) it is a write-back cache: max_capacity is then the budget of the
    cache, and `len` counts the rows in memory.

    Args:
        options: a `TableOptions`, or the name of the table.
        store: what keeps the rows that are not in memory.
        shared_by: how ids and their shared rows are given to ranks, where a table is spread over several.
        **keywords: the fields of `TableOptions`, such as dim and optimizer.

    Raises:
        ValueError: an option is out of range; the message names it.
        TypeError: keys of a call are no integers.
        RuntimeError: the table is closed.
        MemoryError: the machine has no room for the next growth.

    Examples:
        >>> import embstore
        >>> start, rule = embstore.Constant(1.0), embstore.SGD(lr=0.5)
        >>> table = embstore.Table("user", dim=2, initializer=start, optimizer=rule)
        >>> table.find_or_insert([7, -1, 7]).tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        >>> table.apply_gradients([7, 7], [[1, 0], [1, 0]])  # duplicates are summed first
        >>> values, found = table.find([7, 5])
        >>> values.tolist(), found.tolist()
        ([[0.0, 1.0], [0.0, 0.0]], [True, False])
    """

    def __init__(
        self,
        options: TableOptions | str,
        /,
        *,
        store: Store | None = None,
        shared_by: Ownership = Ownership.ROUNDROBIN,
        **keywords: Unpack[AllTableKeywords],
    ) -> None:
        if isinstance(options, str):
            options = TableOptions(name=options, **keywords)  # type: ignore[misc]
        elif keywords:
            options = replace(options, **keywords)  # type: ignore[arg-type]
        if options.seed is None:
            options = replace(options, seed=0)
        if store is not None and options.admission == Admission.FREQUENCY:
            raise ValueError(
                f"admission of table {options.name!r} should be 'all' over a store, which keeps every row, "
                "but is: 'frequency'"
            )
        self.options = options
        self.store = store
        self.shared_by = shared_by
        self._store_handle = None if store is None else store.handle()
        self.pressure = Pressure()
        self.dumps: list[Any] = []  # in the background, of this table
        # What a score has in files of layout v2: () is one word, ("timestamp", "lfu") the score and the uses.
        self.score_words: tuple[str, ...] = ()
        optimizer = options.optimizer
        self._learning_rate = float(optimizer.lr)
        # Updates so far: the t of Adam's bias correction is one more.
        self.optimizer_step = 0
        self._core = _core.Table(
            name=options.name,
            dim=options.dim,
            dtype=int(options.dtype),
            init_capacity=options.init_capacity,
            max_capacity=options.max_capacity,
            bucket_capacity=options.bucket_capacity,
            max_load_factor=options.max_load_factor,
            optimizer=optimizer.engine_name,
            initial_accumulator=optimizer.initial_accumulator,
            initializer=options.initializer.code,
            initializer_values=options.initializer.values(),
            score_strategy=int(options.score_strategy),
            evict_least_used=options.evict_least_used,
            seed=self.seed,
            eviction_log=int(options.eviction_log),
            eviction_log_capacity=options.eviction_log_capacity,
            admission_threshold=options.admission_threshold,
            admit_by_frequency=options.admission == Admission.FREQUENCY,
            half_life=options.half_life,
            shared_rows=options.shared_rows,
            shared_by=int(shared_by),
            start_from_shared=options.start_from_shared,
            ttl=options.ttl_score,
            store=self._store_handle,
        )

    # ---- what it is

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def dim(self) -> int:
        return self.options.dim

    @property
    def seed(self) -> int:
        """Of the initial values."""
        assert self.options.seed is not None
        return self.options.seed

    @property
    def state_width(self) -> int:
        """Floats of optimizer state in a row."""
        return self._core.state_width

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory, embedding and state."""
        return self._core.row_bytes

    @property
    def capacity(self) -> int:
        return self._core.capacity()

    @property
    def learning_rate(self) -> float:
        """Of the next update. Set it to follow a schedule."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        replace(self.options.optimizer, lr=value)  # validates
        self._learning_rate = float(value)

    def __len__(self) -> int:
        return self._core.size()

    def stats(self) -> Stats:
        """Sizes and counters; works on a closed table too."""
        stats = self._core.stats()
        return Stats(**{f.name: getattr(stats, f.name) for f in fields(Stats)})

    # ---- scores

    @property
    def score(self) -> int:
        """The score that the next training batch will give its keys (0: LFU, or none set yet). Of an aged
        strategy it is the moment, to be set again after a load."""
        return self._core.current_score()

    @score.setter
    def score(self, value: int) -> None:
        value = as_integer(value, 1, (1 << 64) - 1, "score")
        strategy = self.options.score_strategy
        if strategy == ScoreStrategy.STEP or strategy.ages:
            self._core.set_step(value)
        else:
            self._core.set_custom_score(value)

    def raise_clock(self, score: int) -> None:
        """Later batches of a TIMESTAMP table get at least this score: how ranks agree on a moment."""
        self._core.raise_clock(score)

    def reseed(self, seed: int) -> None:
        """Rows that are yet to come start as they would in a table with this seed."""
        self.options = replace(self.options, seed=seed)
        self._core.set_seed(self.seed)

    # ---- rows by key

    def find(self, keys: object) -> tuple[Array, Array]:
        """Vectors (float32, keys.shape + (dim,)) and which keys are there. Missing ones read their shared row
        if it is in use, else 0.0."""
        k = as_keys(keys)
        values, found = empty_floats(k.n, self.dim), np.empty(k.n, np.uint8)
        self._core.read(k.address, k.n, address(values), 0, 0, address(found))
        if self.options.shared_rows and not found.all():
            request = _core.LookupRequest(
                self._core, k.address, k.n, 0, 0, 0, 0, address(values), int(DType.FLOAT32), self.dim, 0
            )
            _core.look_up([request], int(Access.READ_ZERO))
        return k.like(values.reshape(*k.shape, self.dim)), k.like(found.astype(bool).reshape(k.shape))

    def read(self, keys: object) -> Rows:
        """Whole rows in the order of the keys (one-dimensional); a missing key has score 0 and zeros."""
        k = as_keys(keys)
        values, states = empty_floats(k.n, self.dim), empty_floats(k.n, self.state_width)
        scores = np.empty(k.n, np.uint64)
        self._core.read(k.address, k.n, address(values), address(states), address(scores), 0)
        return Rows(k.numpy().flatten(), values, states, scores)

    def find_or_insert(self, keys: object) -> Array:
        """Vectors of the keys, as a training batch: missing keys are inserted, scores renewed."""
        k = as_keys(keys)
        values = empty_floats(k.n, self.dim)
        request = _core.LookupRequest(
            self._core, k.address, k.n, 0, 0, 0, 0, address(values), int(DType.FLOAT32), self.dim, 0
        )
        ((_, refused),) = _core.look_up([request], 0)
        self.pressure.after_batch(self)
        self.report_refused(refused, k.n)
        return k.like(values.reshape(*k.shape, self.dim))

    def insert_or_assign(
        self, keys: object, values: object, *, states: object = None, scores: object = None
    ) -> None:
        """Writes rows; of duplicate keys the last counts.

        values (n, dim). states (n, state_width): without, a new row starts fresh and an old one keeps
        its own. scores (n): without, the rows get the score of a training batch.
        """
        k = as_keys(keys)
        v = as_floats(values, (*k.shape, self.dim), "values")
        s = None if states is None else as_floats(states, (*k.shape, self.state_width), "states")
        c = None if scores is None else as_scores(scores, k.n)
        refused = self._core.assign(
            k.address, k.n, address(v), 0 if s is None else address(s), 0 if c is None else address(c)
        )
        self.report_refused(refused, k.n)

    @property
    def counts_uses(self) -> bool:
        """Whether it counts how often keys are used beside their scores."""
        strategy = self.options.score_strategy
        return self.options.evict_least_used and strategy != ScoreStrategy.LFU and not strategy.ages

    def set_uses(self, keys: object, uses: npt.NDArray[np.uint32]) -> None:
        """How often keys were used, in a table that counts it; keys that are not in memory are skipped."""
        k, counts = as_keys(keys), np.ascontiguousarray(uses, np.uint32)
        if counts.shape != (k.n,):
            raise ValueError(f"uses should have {k.n} numbers, one for each key, but has: {counts.shape}")
        self._core.set_uses(k.address, k.n, address(counts))

    def initial_values(self, keys: object) -> Array:
        """The vectors that the keys would start with, whether they are there or not."""
        k = as_keys(keys)
        values = empty_floats(k.n, self.dim)
        self._core.initial_values(k.address, k.n, address(values))
        return k.like(values.reshape(*k.shape, self.dim))

    def contains(self, keys: object) -> Array:
        """Which keys are there."""
        k = as_keys(keys)
        found = np.empty(k.n, np.uint8)
        self._core.contains(k.address, k.n, address(found))
        return k.like(found.astype(bool).reshape(k.shape))

    def erase(self, keys: object) -> int:
        """Removes keys; returns how many were there."""
        k = as_keys(keys)
        return self._core.erase(k.address, k.n)

    def clear(self) -> None:
        """Removes every key and gives the memory of the rows back. The capacity stays."""
        self._core.clear()

    def reserve(self, rows: int, *, progress: Wanted = False) -> None:
        """Makes room for this many rows at once (at most max_capacity). `progress` is True for a bar of tqdm,
        or a function of (rows of room, rows wanted)."""
        rows = as_integer(rows, 0, (1 << 63) - 1, "rows")
        with shown(progress, "growing", unit=" rows") as report:
            # An index with rows grows bucket by bucket; an empty one is replaced, which takes one step.
            steps = RESERVE_STEPS if report and len(self) else 1
            for step in range(1, steps + 1):
                self._core.reserve(rows * step // steps)
                if report:
                    report(rows * step // steps, rows)

    # ---- training

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Another rule, or other numbers, from the next update on. Its state must be as wide as the present
        one; rows in memory whose state is still as it began get the new beginning."""
        before = self.options.optimizer
        if (optimizer.engine_name, optimizer.initial_accumulator) != (
            before.engine_name,
            before.initial_accumulator,
        ):
            self._core.set_optimizer(optimizer.engine_name, optimizer.initial_accumulator)
        self.options = replace(self.options, optimizer=optimizer)
        self._learning_rate = float(optimizer.lr)

    def step_options(self, *, count: bool = True) -> _core.StepOptions:
        """The engine's options for the next update, which is counted here or, without `count`, by the
        caller once it is done."""
        options = self.options.optimizer.step_options(self._learning_rate, self.optimizer_step + 1)
        self.optimizer_step += count
        return options

    def apply_gradients(
        self, keys: object, gradients: object, *, missing: str = "ignore", renew_scores: bool = False
    ) -> None:
        """One optimizer step: gradients (n, dim) of duplicate keys are summed in order, then every row
        moves once. Missing keys are skipped, or raise with missing="error". With
        renew_scores the rows count as used now, as in a training lookup."""
        if missing not in ("ignore", "error"):
            raise ValueError(f"missing should be 'ignore' or 'error' but is: {missing!r}")
        k = as_keys(keys)
        g = as_floats(gradients, (*k.shape, self.dim), "gradients")
        if missing == "error" and not np.all(self.contains(k.numpy())):
            raise KeyError(f"keys should all be in table {self.name!r} but some are not")
        step = self.step_options(count=False)
        self._core.apply_gradients(k.address, k.n, address(g), int(DType.FLOAT32), step, renew_scores)
        self.optimizer_step += 1

    def apply_gradients_to_shared(self, numbers: object, gradients: object) -> None:
        """The part of an optimizer step that moves shared rows, by number; the step is not counted."""
        k = as_keys(numbers)
        g = as_floats(gradients, (k.n, self.dim), "gradients")
        self._core.apply_gradients_to_shared(k.address, k.n, address(g), self.step_options(count=False))

    def report_refused(self, refused: int, n: int) -> None:
        """Raises or warns, as check_mode says, when a batch of n keys had refused ones."""
        if refused == 0 or self.options.check_mode == CheckMode.IGNORE:
            return
        message = (
            f"table {self.name!r} refused {refused} distinct keys of a batch of {n}: their buckets are full "
            f"of keys of the same batch; a larger max_capacity (now {self.stats().max_capacity}) helps"
        )
        if self.options.check_mode == CheckMode.ERROR:
            raise RefusedKeysError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    # ---- whole tables

    def snapshot(self) -> _core.Snapshot:
        """The rows as they are now, to be read while the table is trained on."""
        return _core.Snapshot(self._core)

    def track_changes(self, on: bool = True) -> None:
        """Starts, with nothing changed so far, or stops to keep track for `take_changes`."""
        self._core.track_changes(on)

    def take_changes(self) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Rows that changed since the last call (vector, state or score) and keys that are gone."""
        changes = self.snapshot_changes()
        blocks = list(self._blocks(changes, 0, 65536, True, True))
        return Rows.concatenate(blocks), changes.removed()

    def snapshot_changes(self) -> _core.Snapshot:
        """Like `take_changes`, to be read while the table is trained on; `restore` puts them back."""
        return _core.Snapshot(self._core, changes=True)

    def shared_rows(self) -> Rows:
        """The shared rows that training has used so far, with their numbers as keys and no scores."""
        return Rows(*self._core.shared_rows())

    def assign_shared_rows(self, numbers: object, values: object, states: object = None) -> None:
        """Replaces the shared rows by those with these numbers. Without states they start fresh."""
        k = as_keys(numbers)
        v = as_floats(values, (k.n, self.dim), "values")
        s = None if states is None else as_floats(states, (k.n, self.state_width), "states")
        self._core.assign_shared(k.address, k.n, address(v), 0 if s is None else address(s))

    def set_eviction_log(self, log: EvictionLog) -> None:
        """What the log keeps from now on; what it holds is dropped."""
        self._core.set_eviction_log(int(log))

    def evictions(self) -> Rows:
        """Takes what was evicted since the last call; empty unless eviction_log is set."""
        return Rows(*self._core.drain_evictions())

    def admission_counters(self) -> npt.NDArray[np.uint16] | None:
        """How often keys without a row were seen, in a form for `restore_admission_counters` alone; None
        where nothing counts them."""
        return self._core.admission_counters() if self.options.counts_keys else None

    def restore_admission_counters(self, counters: npt.NDArray[np.uint16]) -> bool:
        """Goes on counting from there. False, and nothing changes, where they are for another threshold."""
        counters = np.ascontiguousarray(counters, np.uint16)
        return self._core.restore_admission_counters(address(counters), len(counters))

    def close(self) -> None:
        """Frees the memory now, after changed rows went down to the store. Every other use but `stats` raises
        RuntimeError afterwards. Waits for dumps in the background and then raises what went wrong with one of
        them, unless its `wait` did."""
        for dump in self.dumps:
            dump.finish()
        self._core.close()
        while self.dumps:
            self.dumps.pop().raise_untold()

    # ---- over a store

    def prefetch(self, keys: object) -> _core.SlotList:
        """Brings up the rows of those keys that are only below; they stay up while the result lives."""
        k = as_keys(keys)
        return self._core.prefetch(k.address, k.n)

    def flush(self) -> None:
        """Writes changed rows down to the store, and flushes it."""
        self._core.flush()

    def save_snapshot(self, name: str) -> None:
        """Writes changed rows down and lets the store keep its contents under a name."""
        self._core.snapshot(name)

    def load_snapshot(self, name: str) -> None:
        """Replaces everything with a snapshot of the store; changes nothing if it cannot be read."""
        self._core.load_snapshot(name)
