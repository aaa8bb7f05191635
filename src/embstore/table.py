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
from embstore.exact_counts import ExactCounts
from embstore.options import (
    Access,
    Admission,
    CheckMode,
    DType,
    RefusedKeysError,
    ScoreStrategy,
    TableOptions,
)
from embstore.ownership import Ownership
from embstore.pressure import Pressure
from embstore.rows import Rows, Stats
from embstore.stores import Store
from embstore.table_copies import _rebuild  # noqa: F401 (older pickles name it here)
from embstore.table_store import TableOverStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from embstore.options import AllTableKeywords


class Table(TableOverStore):
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
        # Counts the keys without a row beside the table; dumps and logs carry it.
        self.exact_counts: ExactCounts | None = None
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
        """As given, for messages, metrics and dumps."""
        return self.options.name

    @property
    def dim(self) -> int:
        """Components of a vector."""
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
        """Rows that the index has room for now; it grows up to max_capacity."""
        return self._core.capacity()

    @property
    def learning_rate(self) -> float:
        """Of the next update. Set it to follow a schedule."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if value != self._learning_rate:  # a loop sets it before every step
            replace(self.options.optimizer, lr=value)  # validates
            self._learning_rate = float(value)

    def __len__(self) -> int:
        return self._core.size()

    def stats(self) -> Stats:
        """Sizes and counters; works on a closed table too.

        Returns:
            A `Stats`: rows, capacity, bytes, hits, misses, evictions and refusals so far.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> vectors = table.find_or_insert([7, -1, 7])
            >>> table.stats().size
            2
        """
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
        """Later batches of a "timestamp" table get at least this score: how ranks agree on a moment.

        Args:
            score: nanoseconds since 1970. A clock that is ahead of it stays as it is.
        """
        self._core.raise_clock(score)

    def reseed(self, seed: int) -> None:
        """Rows that are yet to come start as they would in a table with this seed.

        Args:
            seed: of the initial values. Rows that are there stay as they are.
        """
        self.options = replace(self.options, seed=seed)
        self._core.set_seed(self.seed)

    # ---- rows by key

    def find(self, keys: object) -> tuple[Array, Array]:
        """Looks keys up and changes nothing, scores included.

        Args:
            keys: integers of any shape, as a numpy array, a torch tensor or a sequence.

        Returns:
            The vectors (float32, keys.shape + (dim,)) and a mask of the keys that have a row. A missing key
            reads its shared row if that is in use, else 0.0.

        Raises:
            TypeError: keys are not integers.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.insert_or_assign([7], [[1, 2]])
            >>> values, found = table.find([7, 5])
            >>> values.tolist(), found.tolist()
            ([[1.0, 2.0], [0.0, 0.0]], [True, False])
        """
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
        """Reads whole rows and changes nothing.

        Args:
            keys: integers; a missing key reads zeros and score 0.

        Returns:
            `Rows` in the order of the keys, which are flattened.

        Raises:
            TypeError: keys are not integers.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, optimizer=embstore.Adagrad(lr=0.1))
            >>> table.insert_or_assign([7], [[1, 2]], states=[[3, 4]], scores=[9])
            >>> rows = table.read([5, 7])
            >>> rows.states.tolist(), rows.scores.tolist()
            ([[0.0, 0.0], [3.0, 4.0]], [0, 9])
        """
        k = as_keys(keys)
        values, states = empty_floats(k.n, self.dim), empty_floats(k.n, self.state_width)
        scores = np.empty(k.n, np.uint64)
        self._core.read(k.address, k.n, address(values), address(states), address(scores), 0)
        return Rows(k.numpy().flatten(), values, states, scores)

    def find_or_insert(self, keys: object) -> Array:
        """Looks keys up as a training batch does: missing keys get a row, scores are renewed.

        Args:
            keys: integers of any shape; duplicates are counted by score strategies that count.

        Returns:
            The vectors (float32, keys.shape + (dim,)). A refused key reads its shared row, or 0.0.

        Raises:
            TypeError: keys are not integers.
            RefusedKeysError: check_mode is "error" and keys found no place.
            MemoryError: the machine has no room for the next growth.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2, initializer=embstore.Constant(1.0))
            >>> table.find_or_insert([[7, -1], [7, 7]]).shape
            (2, 2, 2)
            >>> len(table)
            2
        """
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
        """Writes rows; the last of duplicate keys counts.

        Args:
            keys: integers (n).
            values: vectors (n, dim).
            states: optimizer states (n, state_width). Without, a new row starts fresh and an old one keeps
                its own.
            scores: (n), at least 1. Without, rows get the score of a training batch.

        Raises:
            TypeError: keys are not integers.
            ValueError: values, states or scores have another shape, or a score is 0.
            RefusedKeysError: check_mode is "error" and keys found no place.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.insert_or_assign([7, -1], [[1, 2], [3, 4]])
            >>> table.find([-1])[0].tolist()
            [[3.0, 4.0]]
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
        """Sets how often keys were used, in a table that counts uses beside scores.

        Args:
            keys: integers (n); those that are not in memory are skipped.
            uses: counts (n).

        Raises:
            ValueError: there is not one count for each key.
            RuntimeError: the table is closed.
        """
        k, counts = as_keys(keys), np.ascontiguousarray(uses, np.uint32)
        if counts.shape != (k.n,):
            raise ValueError(f"uses should have {k.n} numbers, one for each key, but has: {counts.shape}")
        self._core.set_uses(k.address, k.n, address(counts))

    def initial_values(self, keys: object) -> Array:
        """The vectors that keys start with, whether they have a row or not.

        Args:
            keys: integers of any shape.

        Returns:
            Vectors (float32, keys.shape + (dim,)): a function of seed, table name and key alone.

        Raises:
            TypeError: keys are not integers.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> one, two = (embstore.Table("user", dim=2, seed=3) for _ in range(2))
            >>> (one.initial_values([7]) == two.find_or_insert([7])).all().item()
            True
        """
        k = as_keys(keys)
        values = empty_floats(k.n, self.dim)
        self._core.initial_values(k.address, k.n, address(values))
        return k.like(values.reshape(*k.shape, self.dim))

    def contains(self, keys: object) -> Array:
        """Which keys have a row, in memory or in the store below.

        Args:
            keys: integers of any shape.

        Returns:
            A mask of the shape of the keys.

        Raises:
            TypeError: keys are not integers.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> vectors = table.find_or_insert([7])
            >>> table.contains([7, 5]).tolist(), 7 in table
            ([True, False], True)
        """
        k = as_keys(keys)
        found = np.empty(k.n, np.uint8)
        self._core.contains(k.address, k.n, address(found))
        return k.like(found.astype(bool).reshape(k.shape))

    def erase(self, keys: object) -> int:
        """Removes keys, in memory and in the store below.

        Args:
            keys: integers; those without a row are skipped.

        Returns:
            How many had a row.

        Raises:
            TypeError: keys are not integers.
            RuntimeError: the table is closed.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> vectors = table.find_or_insert([7, 8])
            >>> table.erase([7, 5]), len(table)
            (1, 1)
        """
        k = as_keys(keys)
        return self._core.erase(k.address, k.n)

    def clear(self) -> None:
        """Removes every key and returns the memory of the rows. The capacity stays.

        Raises:
            RuntimeError: the table is closed.
        """
        self._core.clear()

    def report_refused(self, refused: int, n: int) -> None:
        """Raises or warns, as check_mode says, when a batch had refused keys.

        Args:
            refused: how many distinct keys were refused.
            n: keys of the batch.

        Raises:
            RefusedKeysError: some were, and check_mode is "error".
        """
        if refused == 0 or self.options.check_mode == CheckMode.IGNORE:
            return
        message = (
            f"table {self.name!r} refused {refused} distinct keys of a batch of {n}: their buckets are full "
            f"of keys of the same batch; a larger max_capacity (now {self.stats().max_capacity}) helps"
        )
        if self.options.check_mode == CheckMode.ERROR:
            raise RefusedKeysError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    def close(self) -> None:
        """Frees the memory now, after changed rows went down to the store.

        Every other use but `stats` raises RuntimeError afterwards. Waits for dumps in the background.

        Raises:
            OSError: the store could not take the changed rows, or a dump in the background failed and nobody
                waited for it.

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.close()
        """
        for dump in self.dumps:
            dump.finish()
        self._core.close()
        while self.dumps:
            self.dumps.pop().raise_untold()
