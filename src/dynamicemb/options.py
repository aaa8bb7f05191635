"""What a user says about a dynamic table: enumerations and option classes.

DynamicEmbTableOptions(
    init_capacity=1 << 16,
    initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.01),
    score_strategy=DynamicEmbScoreStrategy.STEP,
)
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import embstore
from dynamicemb.embedding_admission import KVCounter
from dynamicemb.enumerations import (
    BUCKET_ALIGNMENT,
    DEFAULT_INDEX_TYPE,
    MAX_BUCKET_CAPACITY,
    SUPPORTED_DIST_TYPES,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
)
from dynamicemb.score_strategies import ScoreStrategy, normalize_score_strategy
from dynamicemb.types import AdmissionStrategy, Counter
from embstore.ownership import Blocks
from embstore.stores import Store

logger = logging.getLogger(__name__)

_LARGEST_BUCKET = 16384  # rows, of the engine's index
_SLOW_BUCKET = 4096


def _check(condition: bool, name: str, should: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} should be {should} but is: {value!r}")


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_bytes(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf  # type: ignore[operator]


@dataclass(eq=False)
class HKVConfig:
    """Where the rows of a table live.

    Rows are in host memory here, so what concerns a GPU is checked and has no effect; neither has
    reserved_key_start_bit, because every 64-bit key is legal.

    Args:
        index_type: torch.int64 (also None) or torch.uint64.
        embedding_dtype: torch.float32, float16 or bfloat16. None: as the table's config says.
        score_type: torch.uint64.
        device_id: no effect.
        dim: components of a vector. None: as the table's config says.
        max_capacity: rows a rank holds at most; the planner sets it.
        init_capacity: rows to begin with, doubled as need be. None: max_capacity.
        max_load_factor: the index grows beyond this fraction of its capacity.
        global_hbm_for_values: bytes of rows in memory over all ranks, for a table with `caching`.
        local_hbm_for_values: the part of a rank; the planner sets it.
        evict_strategy: follows score_strategy; LFU evicts the least used keys, whatever their scores are.
        bucket_capacity: rows of a bucket, a multiple of 16; MAX_BUCKET_CAPACITY makes the part of a rank one
            bucket, so that eviction takes the smallest score (up to 16384 rows a rank).
        block_size: no effect.
        io_block_size: no effect.
        io_by_cpu: no effect.
        use_constant_memory: no effect.
        reserved_key_start_bit: no effect.
        num_of_buckets_per_alloc: no effect.

    Raises:
        ValueError: a field is out of range; the message names it.

    Examples:
        >>> from dynamicemb import HKVConfig
        >>> HKVConfig(init_capacity=1 << 16, bucket_capacity=256).max_load_factor
        0.5
    """

    index_type: torch.dtype | None = None
    embedding_dtype: torch.dtype | None = None
    score_type: torch.dtype = torch.uint64
    device_id: int | None = None
    dim: int | None = None
    max_capacity: int | None = None
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    global_hbm_for_values: float = 0
    local_hbm_for_values: float = 0
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
        for name in ("global_hbm_for_values", "local_hbm_for_values"):
            value = getattr(self, name)
            _check(_is_bytes(value), name, "a finite number of at least 0", value)
        start = self.reserved_key_start_bit
        _check(_is_int(start, 0), "reserved_key_start_bit", "an integer of at least 0", start)
        for name in ("block_size", "io_block_size", "num_of_buckets_per_alloc"):
            _check(_is_int(getattr(self, name), 1), name, "an integer of at least 1", getattr(self, name))
        _check(
            _is_bucket(self.bucket_capacity),
            "bucket_capacity",
            f"a multiple of {BUCKET_ALIGNMENT} or MAX_BUCKET_CAPACITY",
            self.bucket_capacity,
        )
        _check(
            self.evict_strategy in _EVICT_STRATEGIES,
            "evict_strategy",
            "DynamicEmbEvictStrategy.LRU, LFU or CUSTOMIZED",
            self.evict_strategy,
        )


def _is_bucket(value: object) -> bool:
    return value == MAX_BUCKET_CAPACITY or (_is_int(value, 1) and value % BUCKET_ALIGNMENT == 0)  # type: ignore[operator]


_EVICT_STRATEGIES = (
    DynamicEmbEvictStrategy.LRU,
    DynamicEmbEvictStrategy.LFU,
    DynamicEmbEvictStrategy.CUSTOMIZED,
)
OWNERSHIPS = {
    "roundrobin": embstore.Ownership.ROUNDROBIN,
    "hash_roundrobin": embstore.Ownership.HASH_ROUNDROBIN,
}


@dataclass(eq=False)
class DynamicEmbTableOptions(HKVConfig):
    """Options of one dynamic table: where its rows live (the fields of `HKVConfig`) and how they behave.

    Two options are equal when tables that have them may share a group, whatever else differs.

    Args:
        initializer_args: the vector of a new key.
        score_strategy: which keys give way when the table is full; the same on every rank. (X,) is X, None is
            TIMESTAMP, and (TIMESTAMP, LFU) in either order evicts by count and dumps by time.
        safe_check_mode: what happens when keys are refused.
        dist_type: which rank owns a key: "roundrobin" is uint64(key) % world, "hash_roundrobin" mixes the key
            first, which spreads patterned ids evenly, and "continuous" gives each rank a block of the keys
            below num_embeddings; others go round robin. Keys stay as they are.
        admit_strategy: which keys get a row: None, FrequencyAdmissionStrategy or another AdmissionStrategy.
        external_storage: None; a Storage class, made as (options of the tables, optimizer) for a module; or a
            function of (embstore.TableOptions, rank) that makes the store below the part of this rank (see
            embstore.stores): evicted rows go there, and come back when asked for.
        caching: with external_storage, memory holds as many rows (vector and optimizer state) as fit
            global_hbm_for_values, at least a bucket a rank; the rest is in the store. Without a store there
            is nothing below to cache, and all rows are in memory.
        training: False: rows have no optimizer state and are only read; a forward in train mode raises.
        eval_initializer_args: the vector of a missing key in eval: CONSTANT.
        admission_counter: None, a KVCounter, or a Counter of your own: how often keys without a row were
            seen.
        shared_rows: this and what follows is not in the original package. Rows that all keys without a row of
            their own read and train, in training and in eval, chosen as owners are. 0: none.
        admission: "all", or with score_strategy LFU or IMPORTANCE "frequency": in a full table a key gets a
            row only if it was more frequent lately than the key that goes.
        half_life: with score_strategy LFU or IMPORTANCE, training batches after which an occurrence, or a
            gradient, counts half. 0: for LFU never, else the engine's default.
        start_from_shared: a new row begins as a copy of its shared row once that is in use; False: with its
            initial vector.
        ttl: a row that is not used in training for so long is removed: seconds with score_strategy TIMESTAMP
            or NO_EVICTION, training forwards with STEP. None: never.
        max_bytes: memory of the table over all ranks at most, its share of the index included. It has fewer
            rows than num_embeddings where they do not fit. None: no limit but num_embeddings.

    Raises:
        ValueError: a field is out of range; the message names it.

    Examples:
        >>> from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
        >>> options = DynamicEmbTableOptions(
        ...     init_capacity=1 << 16, score_strategy=DynamicEmbScoreStrategy.STEP
        ... )
        >>> keeps_what_matters = DynamicEmbTableOptions(
        ...     score_strategy=DynamicEmbScoreStrategy.LFU,
        ...     admission="frequency",
        ...     shared_rows=1,
        ...     max_bytes=64 << 20,
        ... )
        >>> forgets_after_a_week = DynamicEmbTableOptions(ttl=7 * 24 * 3600)
    """

    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    external_storage: Callable[[embstore.TableOptions, int], Store] | None = None
    caching: bool = False
    training: bool = True
    eval_initializer_args: DynamicEmbInitializerArgs = field(
        default_factory=lambda: DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT)
    )
    admission_counter: KVCounter | Counter | None = None
    shared_rows: int = 0
    admission: str = "all"
    half_life: int = 0
    start_from_shared: bool = True
    ttl: float | None = None
    max_bytes: int | None = None

    def validate(self) -> None:
        super().validate()
        _check(
            isinstance(self.initializer_args, DynamicEmbInitializerArgs),
            "initializer_args",
            "DynamicEmbInitializerArgs",
            self.initializer_args,
        )
        self.initializer_args.to_engine()
        normalize_score_strategy(self.score_strategy)  # raises
        _check(
            self.safe_check_mode in tuple(DynamicEmbCheckMode),
            "safe_check_mode",
            "a DynamicEmbCheckMode",
            self.safe_check_mode,
        )
        allowed = SUPPORTED_DIST_TYPES
        _check(self.dist_type in allowed, "dist_type", f"one of {list(allowed)}", self.dist_type)
        _check_admission(self.admit_strategy, self.admission_counter)
        _check_eval_initializer(self.eval_initializer_args)
        unlimited = self.max_bytes is None
        _check(
            unlimited or _is_int(self.max_bytes, 1),
            "max_bytes",
            "None or an integer of at least 1",
            self.max_bytes,
        )
        grows = self.engine_strategy is embstore.ScoreStrategy.NO_EVICTION
        _check(
            unlimited or not grows, "max_bytes", "None with NO_EVICTION, which has no limit,", self.max_bytes
        )
        embstore.TableOptions(name="table", dim=1, score_strategy=self.engine_strategy, **self.retention)
        _check(
            self.external_storage is None or callable(self.external_storage),
            "external_storage",
            "None, a Storage class or a function",
            self.external_storage,
        )

    @property
    def engine_strategy(self) -> embstore.ScoreStrategy:
        """The score strategy of the table. Raises what `normalize_score_strategy` raises."""
        strategy = normalize_score_strategy(self.score_strategy)
        if strategy is None or isinstance(strategy, tuple):
            return embstore.ScoreStrategy.TIMESTAMP  # of a compound: the counts are kept beside
        return embstore.ScoreStrategy(int(strategy))

    @property
    def retention(self) -> dict[str, Any]:
        """Which rows stay, in the words of the engine, which checks them."""
        names = ("shared_rows", "start_from_shared", "admission", "half_life", "ttl")
        return {name: getattr(self, name) for name in names}

    @property
    def score_words(self) -> tuple[str, ...]:
        """The words of a compound score, in the user's order; empty for any other."""
        strategy = normalize_score_strategy(self.score_strategy)
        return tuple(word.name.lower() for word in strategy) if isinstance(strategy, tuple) else ()

    @property
    def evicts_least_used(self) -> bool:
        """Whether the order of eviction is that of the counts, not of the scores."""
        return self.evict_strategy is DynamicEmbEvictStrategy.LFU or bool(self.score_words)

    def ownership(self, num_embeddings: int) -> embstore.Ownership | Blocks:
        """Which rank owns a key of a table of this size."""
        return OWNERSHIPS[self.dist_type] if self.dist_type in OWNERSHIPS else Blocks(num_embeddings)

    def planned(
        self, *, num_embeddings: int, dim: int, world: int, dtype: torch.dtype
    ) -> DynamicEmbTableOptions:
        """A copy as the planner completes it; this object is left as it is."""
        share = self.global_hbm_for_values / world if world > 1 else self.global_hbm_for_values
        capacity = capacity_per_rank(num_embeddings, world, self.bucket_capacity)
        return dataclasses.replace(
            self, local_hbm_for_values=math.ceil(share), max_capacity=capacity
        )._settled(num_embeddings, dim, dtype)

    def completed(
        self, *, num_embeddings: int, dim: int, rows: int, dtype: torch.dtype
    ) -> DynamicEmbTableOptions:
        """A copy of options that a client has planned itself; `rows` are those of a shard, for a table
        without max_capacity. The capacity is rounded up to whole buckets. Raises ValueError."""
        self.validate()
        if self.dim not in (None, -1, dim):
            raise ValueError(f"dim should be {dim} as in the config of the table but is: {self.dim}")
        wanted, bucket = self.max_capacity or rows, self.bucket_capacity
        unit = BUCKET_ALIGNMENT if bucket == MAX_BUCKET_CAPACITY else bucket
        return dataclasses.replace(
            self,
            max_capacity=max(-(-wanted // unit), 1) * unit,
            local_hbm_for_values=math.ceil(self.local_hbm_for_values),
        )._settled(num_embeddings, dim, dtype)

    def _settled(self, num_embeddings: int, dim: int, dtype: torch.dtype) -> DynamicEmbTableOptions:
        """A copy with everything filled in that follows from the capacity and the config."""
        capacity = self.max_capacity
        assert capacity is not None
        if self.score_strategy is None:
            logger.info("score_strategy is None: rows have timestamps")
        one_bucket = self.bucket_capacity == MAX_BUCKET_CAPACITY
        if one_bucket:
            if capacity > _LARGEST_BUCKET:
                raise ValueError(
                    f"bucket_capacity should not be MAX_BUCKET_CAPACITY for more than {_LARGEST_BUCKET} rows "
                    f"a rank but the table has: {capacity}"
                )
            if capacity > _SLOW_BUCKET:
                logger.warning("a bucket of %d rows: every miss of a full table scans it", capacity)
        evict = {
            embstore.ScoreStrategy.STEP: DynamicEmbEvictStrategy.CUSTOMIZED,
            embstore.ScoreStrategy.CUSTOMIZED: DynamicEmbEvictStrategy.CUSTOMIZED,
            embstore.ScoreStrategy.IMPORTANCE: DynamicEmbEvictStrategy.CUSTOMIZED,
            embstore.ScoreStrategy.LFU: DynamicEmbEvictStrategy.LFU,
        }
        return dataclasses.replace(
            self,
            index_type=self.index_type or DEFAULT_INDEX_TYPE,
            embedding_dtype=self.embedding_dtype or dtype,
            dim=dim,
            init_capacity=capacity if one_bucket else min(self.init_capacity or capacity, capacity),
            bucket_capacity=capacity if one_bucket else self.bucket_capacity,
            evict_strategy=DynamicEmbEvictStrategy.LFU
            if self.evicts_least_used
            else evict.get(self.engine_strategy, DynamicEmbEvictStrategy.LRU),
            score_strategy=normalize_score_strategy(self.score_strategy) or DynamicEmbScoreStrategy.TIMESTAMP,
            initializer_args=self.initializer_args.with_bounds(num_embeddings),
        )

    def get_grouped_key(self) -> dict[str, Any]:
        """What the original package groups tables by. Here tables of any such options share a module, so
        `==` compares less."""
        names = (
            "training",
            "caching",
            "external_storage",
            "index_type",
            "dist_type",
            "score_strategy",
            "admit_strategy",
        )
        return {name: getattr(self, name) for name in names}

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


def _check_admission(strategy: object, counter: object) -> None:
    _check(
        strategy is None or isinstance(strategy, AdmissionStrategy),
        "admit_strategy",
        "None or an AdmissionStrategy",
        strategy,
    )
    _check(
        counter is None or isinstance(counter, (KVCounter, Counter)),
        "admission_counter",
        "None, a KVCounter or a Counter",
        counter,
    )
    if counter is not None and strategy is None:
        logger.info("admission_counter without admit_strategy: every key gets a row, so nothing is counted")


def _check_eval_initializer(args: object) -> None:
    constant = isinstance(args, DynamicEmbInitializerArgs) and args.mode is DynamicEmbInitializerMode.CONSTANT
    _check(constant, "eval_initializer_args", "DynamicEmbInitializerArgs of the mode CONSTANT", args)
    args.to_engine()  # type: ignore[attr-defined]  # raises unless the value is a finite number


def capacity_per_rank(num_embeddings: int, world: int, bucket_capacity: int) -> int:
    """Rows that a rank may hold of a table of `num_embeddings`: a power of two, one bucket at least. With
    MAX_BUCKET_CAPACITY: its share, rounded up to 16."""
    _check(
        _is_bucket(bucket_capacity),
        "bucket_capacity",
        f"a multiple of {BUCKET_ALIGNMENT} or MAX_BUCKET_CAPACITY",
        bucket_capacity,
    )
    per_rank = -(-num_embeddings // world)
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return max(-(-per_rank // BUCKET_ALIGNMENT), 1) * BUCKET_ALIGNMENT
    return max(1 << max(per_rank - 1, 0).bit_length(), bucket_capacity)
