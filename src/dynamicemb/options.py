"""What a user says about a dynamic table: enumerations and option classes.

DynamicEmbTableOptions(
    init_capacity=1 << 16,
    initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.01),
    score_strategy=DynamicEmbScoreStrategy.STEP,
)
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import embstore
from embstore.stores import Store

DEFAULT_INDEX_TYPE = torch.int64
BATCH_SIZE = 512
BATCH_SIZE_PER_DUMP = 65536
BUCKET_ALIGNMENT = 16  # a bucket is a multiple of this many rows


class DynamicEmbCheckMode(enum.IntEnum):
    """What a training forward does about keys that found no place in the table.

    A key is refused only when its bucket is full of keys of the same batch. Its vector is 0.0 in every
    mode and its gradient is dropped; `table.stats().refusals` counts it.

    ERROR    raises RuntimeError, on every rank, with the number of refused keys
    WARNING  warns with that number and goes on
    IGNORE   goes on
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbInitializerMode(enum.Enum):
    """How the vector of a new key begins. DEBUG: every component is uint64(key) % 100000."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


class DynamicEmbScoreStrategy(enum.IntEnum):
    """What the score of a key is; in a full bucket the smallest scores are evicted.

    TIMESTAMP    nanoseconds of the last training forward that used the key
    STEP         the number of that forward, from 1
    CUSTOMIZED   what `set_score` said last
    LFU          how often the key was used, duplicates included
    NO_EVICTION  timestamps; the table grows beyond its planned rows until memory ends, then MemoryError
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


class DynamicEmbEvictStrategy(enum.Enum):
    """Which rows give way. It follows the score strategy; LFU may also be asked for here."""

    LRU = "lru"
    LFU = "lfu"
    CUSTOMIZED = "customized"


class DynamicEmbPoolingMode(enum.IntEnum):
    """How the vectors of a bag become one."""

    SUM = 0
    MEAN = 1
    NONE = 2


@dataclass
class DynamicEmbInitializerArgs:
    """Numbers of an initializer; those that its mode has no use for are ignored.

    mode          one of DynamicEmbInitializerMode
    mean, std_dev of NORMAL and TRUNCATED_NORMAL
    lower, upper  bounds of UNIFORM, absolute bounds of TRUNCATED_NORMAL. None: 0.0 and 1.0, but the
                  planner gives UNIFORM -+sqrt(1 / num_embeddings)
    value         of CONSTANT
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def with_bounds(self, num_embeddings: int) -> DynamicEmbInitializerArgs:
        """A copy in which the open bounds of UNIFORM are those of a table of this size."""
        if self.mode is not DynamicEmbInitializerMode.UNIFORM:
            return dataclasses.replace(self)
        bound = math.sqrt(1.0 / num_embeddings)
        return dataclasses.replace(
            self,
            lower=-bound if self.lower is None else self.lower,
            upper=bound if self.upper is None else self.upper,
        )

    def to_engine(self) -> embstore.Initializer:
        """The engine's initializer; raises ValueError that names a bad number."""
        mode = DynamicEmbInitializerMode
        lower = 0.0 if self.lower is None else self.lower
        upper = 1.0 if self.upper is None else self.upper
        if self.mode is mode.UNIFORM:
            return embstore.Uniform(lower, upper)
        if self.mode is mode.NORMAL:
            return embstore.Normal(self.mean, self.std_dev)
        if self.mode is mode.TRUNCATED_NORMAL:
            return embstore.TruncatedNormal(self.mean, self.std_dev, lower, upper)
        if self.mode is mode.CONSTANT:
            return embstore.Constant(self.value)
        if self.mode is mode.DEBUG:
            return embstore.Debug()
        raise ValueError(f"mode should be a DynamicEmbInitializerMode but is: {self.mode!r}")


@dataclass(frozen=True)
class FrequencyAdmissionStrategy:
    """A key gets a row once it was seen `threshold` times in training.

    Until then its vector is its initial value and its gradient is dropped. Counting takes about two
    bytes for each key that was seen.
    """

    threshold: int

    def __post_init__(self) -> None:
        if (
            isinstance(self.threshold, bool)
            or not isinstance(self.threshold, int)
            or not 1 <= self.threshold <= 255
        ):
            raise ValueError(f"threshold should be an integer from 1 to 255 but is: {self.threshold!r}")


def _check(condition: bool, name: str, should: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} should be {should} but is: {value!r}")


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


@dataclass(eq=False)
class HKVConfig:
    """Where the rows of a table live. Rows are in host memory here, so what concerns a GPU
    (device_id, the *_hbm_for_values, block_size, io_block_size, io_by_cpu, use_constant_memory,
    num_of_buckets_per_alloc) is checked and has no effect; neither has reserved_key_start_bit, because
    every 64-bit key is legal.

    index_type       torch.int64 (also None) or torch.uint64
    embedding_dtype  torch.float32, float16 or bfloat16; None: as the table's config says
    score_type       torch.uint64
    dim              None: as the table's config says
    max_capacity     rows a rank holds at most; the planner sets it
    init_capacity    rows to begin with, doubled as need be; None: max_capacity
    max_load_factor  the index grows beyond this fraction of its capacity
    evict_strategy   follows score_strategy; LFU makes the strategy LFU
    bucket_capacity  rows of a bucket, a multiple of 16
    """

    index_type: torch.dtype | None = None
    embedding_dtype: torch.dtype | None = None
    score_type: torch.dtype = torch.uint64
    device_id: int | None = None
    dim: int | None = None
    max_capacity: int | None = None
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    global_hbm_for_values: int = 0
    local_hbm_for_values: int = 0
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    bucket_capacity: int = 128
    block_size: int = 128
    io_block_size: int = 1024
    io_by_cpu: bool = False
    use_constant_memory: bool = False
    reserved_key_start_bit: int = 0
    num_of_buckets_per_alloc: int = 1

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ValueError that names the field. The class is mutable, so the planner asks again."""
        _check(
            self.index_type in (None, torch.int64, torch.uint64),
            "index_type",
            "int64 or uint64",
            self.index_type,
        )
        dtypes = (None, torch.float32, torch.float16, torch.bfloat16)
        _check(
            self.embedding_dtype in dtypes,
            "embedding_dtype",
            "float32, float16 or bfloat16",
            self.embedding_dtype,
        )
        _check(self.score_type in (torch.uint64, torch.int64), "score_type", "uint64", self.score_type)
        for name, low in (("device_id", 0), ("dim", 1), ("max_capacity", 1), ("init_capacity", 1)):
            value = getattr(self, name)
            # -1 is the documents' other way to say "not set" of dim.
            unset = value is None or (name == "dim" and value == -1)
            _check(unset or _is_int(value, low), name, f"None or an integer of at least {low}", value)
        factor = self.max_load_factor
        _check(
            isinstance(factor, (int, float)) and 0 < factor <= 1,
            "max_load_factor",
            "above 0 and at most 1",
            factor,
        )
        for name in ("global_hbm_for_values", "local_hbm_for_values", "reserved_key_start_bit"):
            _check(_is_int(getattr(self, name), 0), name, "an integer of at least 0", getattr(self, name))
        for name in ("block_size", "io_block_size", "num_of_buckets_per_alloc"):
            _check(_is_int(getattr(self, name), 1), name, "an integer of at least 1", getattr(self, name))
        _check(
            _is_int(self.bucket_capacity, 1) and self.bucket_capacity % BUCKET_ALIGNMENT == 0,
            "bucket_capacity",
            f"a multiple of {BUCKET_ALIGNMENT}",
            self.bucket_capacity,
        )
        _check(
            isinstance(self.evict_strategy, DynamicEmbEvictStrategy),
            "evict_strategy",
            "a DynamicEmbEvictStrategy",
            self.evict_strategy,
        )


OWNERSHIPS = {
    "roundrobin": embstore.Ownership.ROUNDROBIN,
    "hash_roundrobin": embstore.Ownership.HASH_ROUNDROBIN,
}


@dataclass(eq=False)
class DynamicEmbTableOptions(HKVConfig):
    """Options of one dynamic table: where its rows live (see HKVConfig) and how they behave.

    initializer_args  the vector of a new key
    score_strategy    which keys give way when the table is full; the same on every rank
    safe_check_mode   what happens when keys are refused
    dist_type         which rank owns a key: "roundrobin" is uint64(key) % world, "hash_roundrobin" mixes
                      the key first, which spreads patterned ids evenly
    admit_strategy    None, or FrequencyAdmissionStrategy(threshold)
    external_storage  None, or a function of (embstore.TableOptions, rank) that makes the store below the part
                      of this rank (see embstore.stores): evicted rows go there, and come back when asked for
    caching           with external_storage: memory holds as many rows (vector and optimizer state) as fit
                      global_hbm_for_values, at least a bucket a rank; the rest is in the store. Without a
                      store there is nothing below to cache, and all rows are in memory

    Two options are equal when tables that have them may share a group, whatever else differs.
    """

    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    score_strategy: DynamicEmbScoreStrategy = DynamicEmbScoreStrategy.TIMESTAMP
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    dist_type: str = "roundrobin"
    admit_strategy: FrequencyAdmissionStrategy | None = None
    external_storage: Callable[[embstore.TableOptions, int], Store] | None = None
    caching: bool = False

    def validate(self) -> None:
        super().validate()
        _check(
            isinstance(self.initializer_args, DynamicEmbInitializerArgs),
            "initializer_args",
            "DynamicEmbInitializerArgs",
            self.initializer_args,
        )
        self.initializer_args.to_engine()
        _check(
            self.score_strategy in tuple(DynamicEmbScoreStrategy),
            "score_strategy",
            "a DynamicEmbScoreStrategy",
            self.score_strategy,
        )
        _check(
            self.safe_check_mode in tuple(DynamicEmbCheckMode),
            "safe_check_mode",
            "a DynamicEmbCheckMode",
            self.safe_check_mode,
        )
        _check(self.dist_type in OWNERSHIPS, "dist_type", f"one of {list(OWNERSHIPS)}", self.dist_type)
        _check(
            self.admit_strategy is None or isinstance(self.admit_strategy, FrequencyAdmissionStrategy),
            "admit_strategy",
            "None or a FrequencyAdmissionStrategy",
            self.admit_strategy,
        )
        _check(
            self.external_storage is None or callable(self.external_storage),
            "external_storage",
            "None or a function",
            self.external_storage,
        )
        scored = (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.CUSTOMIZED)
        if self.evict_strategy is DynamicEmbEvictStrategy.LFU and self.score_strategy in scored:
            raise ValueError(
                f"evict_strategy should not be LFU beside the score strategy "
                f"{DynamicEmbScoreStrategy(self.score_strategy).name}: a row has one score"
            )

    @property
    def engine_strategy(self) -> embstore.ScoreStrategy:
        """The score strategy in effect."""
        evicts = self.score_strategy != DynamicEmbScoreStrategy.NO_EVICTION
        if self.evict_strategy is DynamicEmbEvictStrategy.LFU and evicts:
            return embstore.ScoreStrategy.LFU
        return embstore.ScoreStrategy(int(self.score_strategy))

    @property
    def ownership(self) -> embstore.Ownership:
        return OWNERSHIPS[self.dist_type]

    def planned(self, *, num_embeddings: int, dim: int, world: int, dtype: torch.dtype) -> Any:
        """A copy as the planner completes it; this object is left as it is."""
        capacity = capacity_per_rank(num_embeddings, world, self.bucket_capacity)
        strategy = self.engine_strategy
        evict = {
            embstore.ScoreStrategy.STEP: DynamicEmbEvictStrategy.CUSTOMIZED,
            embstore.ScoreStrategy.CUSTOMIZED: DynamicEmbEvictStrategy.CUSTOMIZED,
            embstore.ScoreStrategy.LFU: DynamicEmbEvictStrategy.LFU,
        }
        return dataclasses.replace(
            self,
            index_type=self.index_type or DEFAULT_INDEX_TYPE,
            embedding_dtype=self.embedding_dtype or dtype,
            dim=dim,
            max_capacity=capacity,
            init_capacity=min(self.init_capacity or capacity, capacity),
            local_hbm_for_values=-(-self.global_hbm_for_values // world),
            evict_strategy=evict.get(strategy, DynamicEmbEvictStrategy.LRU),
            initializer_args=self.initializer_args.with_bounds(num_embeddings),
        )

    def _group(self) -> tuple[Any, ...]:
        return (
            self.index_type or DEFAULT_INDEX_TYPE,
            self.embedding_dtype,
            self.score_type,
            self.device_id,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DynamicEmbTableOptions) and self._group() == other._group()

    def __hash__(self) -> int:
        return hash(self._group())


def capacity_per_rank(num_embeddings: int, world: int, bucket_capacity: int) -> int:
    """Rows that a rank may hold of a table of `num_embeddings`: a power of two, one bucket at least."""
    per_rank = -(-num_embeddings // world)
    return max(1 << max(per_rank - 1, 0).bit_length(), bucket_capacity)
