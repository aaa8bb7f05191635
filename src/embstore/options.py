"""Options of a table, validated in one place."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, cast

from embstore import _core
from embstore.initializers import Initializer, Uniform
from embstore.optimizers import SGD, Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

E = TypeVar("E", bound=enum.IntEnum)

# A table grows by doubling, so this says how far it may go, not what it takes.
DEFAULT_MAX_CAPACITY = 1 << 30
MOST_DIM = 1 << 16


class ScoreStrategy(enum.IntEnum):
    """How the score of a key follows its use; the smallest score of a class of keys is evicted first.

    TIMESTAMP: nanoseconds of the last use. STEP: number of the batch of the last use. CUSTOMIZED: what
    `table.score = n` said. LFU: occurrences so far. AGED_LFU: occurrences that count half after a half-life.
    IMPORTANCE: norms of the gradients that the row received. NO_EVICTION: timestamps, and the table grows
    instead.

    Examples:
        >>> import embstore
        >>> embstore.Table("user", dim=2, score_strategy="lfu").options.score_strategy.name
        'LFU'
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4
    AGED_LFU = 5
    IMPORTANCE = 6

    @property
    def ages(self) -> bool:
        """Whether its scores lose half of their worth with every half-life."""
        return self in (ScoreStrategy.AGED_LFU, ScoreStrategy.IMPORTANCE)

    @property
    def keeps_frequent(self) -> bool:
        """Whether the most used ids stay, rather than the last used ones."""
        return self.ages or self == ScoreStrategy.LFU


class Admission(enum.IntEnum):
    """Which new keys get a row in a full table.

    ALL of them, or by FREQUENCY those that are more frequent than the key whose row they take.

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2, score_strategy="lfu", admission="frequency")
        >>> table.options.admission.name
        'FREQUENCY'
    """

    ALL = 0
    FREQUENCY = 1


class CheckMode(enum.IntEnum):
    """What a training forward does when keys were refused.

    Their vectors are 0.0, or those of their shared rows, in any case.
    ERROR raises RefusedKeysError, WARNING warns, IGNORE counts in `Table.stats().refusals`.

    Examples:
        >>> import embstore
        >>> embstore.Table("user", dim=2, check_mode="warning").options.check_mode.name
        'WARNING'
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


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


class EvictionLog(enum.IntEnum):
    """What is kept of evicted rows until `Table.evictions()` takes it: nothing, keys, or whole rows.

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2, max_capacity=128, eviction_log="keys")
        >>> for batch in range(3):
        ...     vectors = table.find_or_insert(range(100 * batch, 100 * batch + 100))
        >>> len(table.evictions()) + len(table)
        300
    """

    OFF = 0
    KEYS = 1
    ROWS = 2


class DType(enum.IntEnum):
    """Element type of the embedding; optimizer state is always float32.

    Examples:
        >>> import embstore
        >>> embstore.Table("user", dim=2, dtype="bfloat16").options.dtype.name
        'BFLOAT16'
    """

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class Access(enum.IntEnum):
    """What a batch may do with a table."""

    TRAIN = 0
    READ_ZERO = 1
    READ_INITIAL = 2


def as_enum(kind: type[E], name: str, value: object) -> E:
    """A member of the enum, or its name in any case. Raises ValueError that lists the names."""
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    if isinstance(value, kind):
        return value
    known = ", ".join(repr(member.lower()) for member in kind.__members__)
    raise ValueError(f"{name} should be one of {known} but is: {value!r}")


class TableKeywords(TypedDict, total=False):
    """The options of `TableOptions` but its name and dim, as keywords: type checkers find a misspelt one."""

    dtype: Any  # DType, its name, or a dtype of torch or numpy
    optimizer: Optimizer
    initializer: Initializer
    init_capacity: int
    max_capacity: int
    max_bytes: int | None
    bucket_capacity: int
    max_load_factor: float
    score_strategy: ScoreStrategy | str
    evict_least_used: bool
    seed: int | None
    check_mode: CheckMode | str
    eviction_log: EvictionLog | str
    eviction_log_capacity: int
    admission_threshold: int
    admission: Admission | str
    half_life: int
    shared_rows: int
    start_from_shared: bool
    ttl: float | None


class AllTableKeywords(TableKeywords, total=False):
    """All options of `TableOptions`."""

    name: str
    dim: int


_NOT_NAMED = cast(ScoreStrategy, None)
_NOT_SAID = cast(bool, None)


def as_age(value: object, strategy: ScoreStrategy, name: str, *, zero: bool = False) -> int:
    """A time in units of the score: nanoseconds of seconds, or batches. Raises ValueError where the strategy
    has no clock, or where the value is no time."""
    if strategy == ScoreStrategy.STEP:
        if isinstance(value, int) and not isinstance(value, bool) and (not zero) <= value < 1 << 63:
            return value
        raise ValueError(f"{name} should be a number of batches (an integer) but is: {value!r}")
    if strategy not in (ScoreStrategy.TIMESTAMP, ScoreStrategy.NO_EVICTION):
        raise ValueError(
            f"{name} needs a score strategy with a clock ('timestamp', 'no_eviction' or 'step') but that of "
            f"the table is: {strategy.name.lower()!r}"
        )
    seconds = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 33
    if not seconds or (not zero and round(value * 1e9) == 0):  # type: ignore[operator]
        raise ValueError(f"{name} should be a number of seconds but is: {value!r}")
    return round(value * 1e9)  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Everything that makes a table.

    Args:
        name: names the table in messages and dumps, and separates its initial values
        dim: components of a vector
        dtype: "float32", "float16" or "bfloat16" (or a torch / numpy dtype)
        optimizer: one of embstore.optimizers
        initializer: one of embstore.initializers
        init_capacity: rows to have room for at first
        max_capacity: rows at most; beyond it the smallest scores go ("no_eviction": the table grows on)
        max_bytes: instead of max_capacity: as many rows as fit, with their share of the index; it becomes
            max_capacity, and reads None afterwards
        bucket_capacity: rows of a bucket, a multiple of 16; a victim is searched among 128 or so many rows
        max_load_factor: the index grows beyond this fraction of its capacity; 0.9 costs least memory
        score_strategy: "timestamp", "step", "customized", "lfu", "importance", "no_eviction", or
            "aged_lfu", which "lfu" means with a half_life or with admission="frequency", as does a half_life
            alone
        half_life: of aged scores, in training batches. 0: max(32768, 2 * max_capacity) ids
        evict_least_used: evicts the key with the fewest occurrences, whatever its score; takes 4 bytes a row
        seed: of the initial values. None: 0 in a Table, drawn from torch's generator in a module
        check_mode: "error", "warning" or "ignore"
        eviction_log: "off", "keys" or "rows"
        eviction_log_capacity: entries of the log; the oldest give way and are counted
        admission_threshold: a training batch stores a key once it was seen this often (at most 255); until
            then its vector is that of its shared row, or its initial value. 0: at once.
            Takes 8 bytes a row
        admission: "all", or with "lfu" and "importance" "frequency": in a full table a key gets a row
            only if it was more frequent lately than the key that goes. Takes 16 bytes a row
        shared_rows: rows that all ids without a row of their own read and train. 0: such ids read 0.0
        start_from_shared: a new row begins with the vector of its shared row once that is in use, else with
            its initial value, as in a module that decides by itself which rows stay
        ttl: a row that is not used in training for so long is removed, within an eighth of that time more:
            seconds, or batches where the score_strategy is "step". None: never. "timestamp",
            "no_eviction" and "step" only

    Raises:
        ValueError: a value is out of range or of another type; the message names it.

    Examples:
        >>> import embstore
        >>> options = embstore.TableOptions(name="user", dim=8, max_capacity=1_000_000)
        >>> table = embstore.Table(options)
        >>> table.dim, len(table)
        (8, 0)
    """

    name: str
    dim: int
    dtype: DType = DType.FLOAT32
    optimizer: Optimizer = field(default_factory=SGD)
    initializer: Initializer = field(default_factory=Uniform)
    init_capacity: int = 1 << 14
    max_capacity: int = DEFAULT_MAX_CAPACITY
    max_bytes: int | None = None
    bucket_capacity: int = 128
    max_load_factor: float = 0.9
    score_strategy: ScoreStrategy = _NOT_NAMED  # TIMESTAMP, unless a module decides
    evict_least_used: bool = False
    seed: int | None = None
    check_mode: CheckMode = CheckMode.IGNORE
    eviction_log: EvictionLog = EvictionLog.OFF
    eviction_log_capacity: int = 1 << 20
    admission_threshold: int = 0
    admission: Admission = Admission.ALL
    half_life: int = 0
    shared_rows: int = 0
    start_from_shared: bool = _NOT_SAID  # True, unless a module decides
    ttl: float | None = None
    _names_strategy: ClassVar[bool] = False
    _says_start: ClassVar[bool] = False
    _bytes_given: ClassVar[int | None] = None  # max_bytes, before it became max_capacity

    if TYPE_CHECKING:  # names of enum members are taken too

        def __init__(self, *, name: str, dim: int, **keywords: Unpack[TableKeywords]) -> None: ...

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name should be a non-empty string but is: {self.name!r}")
        integers = (
            "dim",
            "init_capacity",
            "max_capacity",
            "bucket_capacity",
            "seed",
            "eviction_log_capacity",
            "admission_threshold",
            "half_life",
            "shared_rows",
            "max_bytes",
        )
        for name in integers:
            value = getattr(self, name)
            if name in ("seed", "max_bytes") and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{name} should be an integer but is: {value!r}")
            put(name, value.__index__())
            if name != "seed" and abs(getattr(self, name)) >= 1 << 63:
                raise ValueError(f"{name} should fit 64 bits but is: {value!r}")
        if isinstance(self.max_load_factor, bool) or not isinstance(self.max_load_factor, (int, float)):
            raise ValueError(f"max_load_factor should be a number but is: {self.max_load_factor!r}")
        if not 1 <= self.dim <= MOST_DIM:
            raise ValueError(f"dim should be between 1 and {MOST_DIM} but is: {self.dim}")
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(
                f"optimizer should be one such as embstore.Adam(lr=0.01) but is: {self.optimizer!r}"
            )
        if not isinstance(self.initializer, Initializer) or self.initializer.code < 0:
            raise ValueError(f"initializer should be an embstore initializer but is: {self.initializer!r}")
        if not isinstance(self.dtype, DType):
            put("dtype", as_enum(DType, "dtype", str(self.dtype).removeprefix("torch.")))
        if not isinstance(self.evict_least_used, bool):
            raise ValueError(f"evict_least_used should be True or False but is: {self.evict_least_used!r}")
        put("_says_start", self.start_from_shared is not None)
        put("start_from_shared", self.start_from_shared if self._says_start else True)
        if not isinstance(self.start_from_shared, bool):
            raise ValueError(f"start_from_shared should be True or False but is: {self.start_from_shared!r}")
        named = self.score_strategy is not None
        put("_names_strategy", named)
        put(
            "score_strategy",
            as_enum(ScoreStrategy, "score_strategy", self.score_strategy)
            if named
            else ScoreStrategy.AGED_LFU
            if self.half_life
            else ScoreStrategy.TIMESTAMP,
        )
        put("admission", as_enum(Admission, "admission", self.admission))
        put("check_mode", as_enum(CheckMode, "check_mode", self.check_mode))
        put("eviction_log", as_enum(EvictionLog, "eviction_log", self.eviction_log))
        if self.seed is not None:
            put("seed", self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        if self.max_bytes is not None:
            if self.max_capacity != DEFAULT_MAX_CAPACITY:
                raise ValueError(
                    f"max_bytes should be None beside max_capacity ({self.max_capacity}) "
                    f"but is: {self.max_bytes}"
                )
            put("max_capacity", self.rows_within(self.max_bytes))
            put("_bytes_given", self.max_bytes)
            put("max_bytes", None)
        # init_capacity has a default, so a small max_capacity alone must be enough.
        put("init_capacity", min(self.init_capacity, max(self.max_capacity, 0)))
        if not 0 <= self.admission_threshold <= 255:
            raise ValueError(
                f"admission_threshold should be between 0 and 255 but is: {self.admission_threshold}"
            )
        if self.max_capacity < 1:
            raise ValueError(f"max_capacity should be at least 1 but is: {self.max_capacity}")
        self._check_ageing(put)
        if self.ttl is not None:
            as_age(self.ttl, self.score_strategy, "ttl")

    @property
    def says_what_goes(self) -> bool:
        """Whether it was made with an option about which rows stay in a full table."""
        return bool(
            self._names_strategy
            or self.admission_threshold
            or self.admission
            or self.evict_least_used
            or self.shared_rows
            or self.ttl is not None
        )

    @property
    def keeps_frequent(self) -> bool:
        """Whether a full table keeps the ids that are used most, rather than those that were used last."""
        return self.evict_least_used or self.score_strategy.keeps_frequent

    @property
    def counts_keys(self) -> bool:
        """Whether keys without a row are counted."""
        return self.admission_threshold > 0 or self.admission == Admission.FREQUENCY

    def _check_ageing(self, put: Callable[[str, object], None]) -> None:
        frequency = self.admission == Admission.FREQUENCY
        if not 0 <= self.shared_rows <= 1 << 16:
            raise ValueError(f"shared_rows should be between 0 and {1 << 16} but is: {self.shared_rows}")
        if self.half_life < 0:
            raise ValueError(f"half_life should be at least 0 but is: {self.half_life}")
        if self.score_strategy == ScoreStrategy.LFU and (self.half_life or frequency):
            put("score_strategy", ScoreStrategy.AGED_LFU)
        ages = self.score_strategy.ages
        if self.half_life and not ages:
            raise ValueError(
                "half_life should be 0 unless score_strategy is 'lfu' or 'importance' but is: "
                f"{self.half_life}"
            )
        if frequency and not ages:
            raise ValueError(
                "admission should be 'frequency' only with score_strategy 'lfu' or 'importance' but that is: "
                f"{self.score_strategy.name.lower()!r}"
            )
        if frequency and self.admission_threshold:
            raise ValueError(
                "admission should be 'all' beside an admission_threshold, which is: "
                f"{self.admission_threshold}"
            )

    def full_bytes(self, rows: int) -> int:
        """Bytes of a table of these options that holds so many rows at most, and as many."""
        return _core.full_table_bytes(
            dim=self.dim,
            dtype=int(self.dtype),
            optimizer=self.optimizer.engine_name,
            max_capacity=rows,
            bucket_capacity=self.bucket_capacity,
            max_load_factor=self.max_load_factor,
            evict_least_used=self.evict_least_used,
            admission_threshold=self.admission_threshold,
            admit_by_frequency=self.admission == Admission.FREQUENCY,
            shared_rows=self.shared_rows,
        )

    def rows_within(self, budget_bytes: int) -> int:
        """The rows of the largest table that needs at most so many bytes. Raises ValueError when not even a
        bucket fits."""
        least, most = self.bucket_capacity, DEFAULT_MAX_CAPACITY
        if self.full_bytes(least) > budget_bytes:
            raise ValueError(
                f"max_bytes should be at least {self.full_bytes(least)}, for a bucket of {least} rows, "
                f"but is: {budget_bytes}"
            )
        while least < most:
            middle = (least + most + 1) // 2
            if self.full_bytes(middle) <= budget_bytes:
                least = middle
            else:
                most = middle - 1
        return least

    def within_bytes(self, before: TableOptions) -> TableOptions:
        """These options with the rows that fit the max_bytes of others, which they were made of."""
        if before._bytes_given is None:
            return self
        return replace(self, max_capacity=self.rows_within(before._bytes_given))

    @property
    def ttl_score(self) -> int:
        """The ttl in units of the score; 0: none."""
        return 0 if self.ttl is None else as_age(self.ttl, self.score_strategy, "ttl")
