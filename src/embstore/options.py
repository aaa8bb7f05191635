"""Options of a table, validated in one place."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeVar

from embstore.initializers import Initializer, Uniform
from embstore.optimizers import SGD, Optimizer

E = TypeVar("E", bound=enum.IntEnum)

# A table grows by doubling, so this says how far it may go, not what it takes.
DEFAULT_MAX_CAPACITY = 1 << 30


class ScoreStrategy(enum.IntEnum):
    """How the score of a key follows its use; the smallest score of a bucket is evicted first."""

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


class CheckMode(enum.IntEnum):
    """What a training forward does when keys were refused (their vectors are 0.0 in any case)."""

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class EvictionLog(enum.IntEnum):
    """What is kept of evicted rows until `Table.evictions()` takes it."""

    OFF = 0
    KEYS = 1
    ROWS = 2


class DType(enum.IntEnum):
    """Element type of the embedding; optimizer state is always float32."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


def as_enum(kind: type[E], name: str, value: object) -> E:
    """A member of the enum, or its name in any case. Raises ValueError that lists the names."""
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    if isinstance(value, kind):
        return value
    known = ", ".join(repr(member.lower()) for member in kind.__members__)
    raise ValueError(f"{name} should be one of {known} but is: {value!r}")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Everything that makes a table.

    name                   names the table in messages and dumps, and separates its initial values
    dim                    components of a vector
    dtype                  "float32", "float16" or "bfloat16" (or a torch / numpy dtype)
    optimizer              one of embstore.optimizers
    initializer            one of embstore.initializers
    init_capacity          rows to have room for at first
    max_capacity           rows at most; beyond it the smallest scores go ("no_eviction": the table grows on)
    bucket_capacity        rows of a bucket, a multiple of 16
    max_load_factor        the index grows beyond this fraction of its capacity; 0.9 costs least memory
    score_strategy         "timestamp", "step", "customized", "lfu" or "no_eviction"
    evict_least_used       evicts the key with the fewest occurrences, whatever its score; takes 4 bytes a row
    seed                   of the initial values. None: 0 in a Table, drawn from torch's generator in a module
    check_mode             "error", "warning" or "ignore"
    eviction_log           "off", "keys" or "rows"
    eviction_log_capacity  entries of the log; the oldest give way and are counted
    admission_threshold    a training batch stores a key once it was seen this often (at most 255); until
                           then its vector is its initial value. 0: at once. Takes 8 bytes a row
    """

    name: str
    dim: int
    dtype: DType = DType.FLOAT32
    optimizer: Optimizer = field(default_factory=SGD)
    initializer: Initializer = field(default_factory=Uniform)
    init_capacity: int = 1 << 14
    max_capacity: int = DEFAULT_MAX_CAPACITY
    bucket_capacity: int = 128
    max_load_factor: float = 0.9
    score_strategy: ScoreStrategy = ScoreStrategy.TIMESTAMP
    evict_least_used: bool = False
    seed: int | None = None
    check_mode: CheckMode = CheckMode.IGNORE
    eviction_log: EvictionLog = EvictionLog.OFF
    eviction_log_capacity: int = 1 << 20
    admission_threshold: int = 0

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
        )
        for name in integers:
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{name} should be an integer but is: {value!r}")
            put(name, value.__index__())
            if name != "seed" and abs(getattr(self, name)) >= 1 << 63:
                raise ValueError(f"{name} should fit 64 bits but is: {value!r}")
        if isinstance(self.max_load_factor, bool) or not isinstance(self.max_load_factor, (int, float)):
            raise ValueError(f"max_load_factor should be a number but is: {self.max_load_factor!r}")
        if not 1 <= self.dim <= 1 << 16:
            raise ValueError(f"dim should be between 1 and {1 << 16} but is: {self.dim}")
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"optimizer should be an embstore optimizer but is: {self.optimizer!r}")
        if not isinstance(self.initializer, Initializer) or self.initializer.code < 0:
            raise ValueError(f"initializer should be an embstore initializer but is: {self.initializer!r}")
        if not isinstance(self.dtype, DType):
            put("dtype", as_enum(DType, "dtype", str(self.dtype).removeprefix("torch.")))
        if not isinstance(self.evict_least_used, bool):
            raise ValueError(f"evict_least_used should be True or False but is: {self.evict_least_used!r}")
        put("score_strategy", as_enum(ScoreStrategy, "score_strategy", self.score_strategy))
        put("check_mode", as_enum(CheckMode, "check_mode", self.check_mode))
        put("eviction_log", as_enum(EvictionLog, "eviction_log", self.eviction_log))
        if self.seed is not None:
            put("seed", self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        # init_capacity has a default, so a small max_capacity alone must be enough.
        put("init_capacity", min(self.init_capacity, max(self.max_capacity, 0)))
        if not 0 <= self.admission_threshold <= 255:
            raise ValueError(
                f"admission_threshold should be between 0 and 255 but is: {self.admission_threshold}"
            )
        if self.max_capacity < self.bucket_capacity:
            raise ValueError(
                f"max_capacity should be at least bucket_capacity ({self.bucket_capacity}) "
                f"but is: {self.max_capacity}"
            )
