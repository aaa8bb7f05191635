"""Enumerations and numbers of a dynamic table, and the arguments of its initializer."""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass

import torch

import embstore

DEFAULT_INDEX_TYPE = torch.int64
BATCH_SIZE = 512
BATCH_SIZE_PER_DUMP = 65536
BUCKET_ALIGNMENT = 16  # a bucket is a multiple of this many rows
DEMB_TABLE_ALIGN_SIZE = BUCKET_ALIGNMENT
DEFAULT_BUCKET_CAPACITY = 128
MAX_BUCKET_CAPACITY = (1 << 63) - 1  # as bucket_capacity: the part of a rank is one bucket
DEBUG_EMB_INITIALIZER_MOD = 100000
DynamicEmbKernel = "DynamicEmb"  # value of `customized_compute_kernel`
SUPPORTED_DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")  # of the original package


class DynamicEmbCheckMode(enum.IntEnum):
    """What a training forward does about keys that found no place in the table.

    A key is refused only when its bucket is full of keys of the same batch. Its vector is 0.0 in every
    mode and its gradient is dropped; `table.stats().refusals` counts it.

        ERROR    raises RuntimeError, on every rank, with the number of refused keys
        WARNING  warns with that number and goes on
        IGNORE   goes on

    Examples:
        >>> from dynamicemb import DynamicEmbCheckMode, DynamicEmbTableOptions
        >>> options = DynamicEmbTableOptions(safe_check_mode=DynamicEmbCheckMode.ERROR)
    """

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbInitializerMode(enum.Enum):
    """How the vector of a new key begins. DEBUG: every component is uint64(key) % 100000.

    Examples:
        >>> from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
        >>> start = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.01)
    """

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
        IMPORTANCE   norms of the gradients that the row received, halved with every `half_life` (not in the
                     original package)

    Examples:
        >>> from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
        >>> options = DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU)
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4
    IMPORTANCE = 6  # as in the engine, whose 5 is LFU with a half_life


class DynamicEmbEvictStrategy(enum.Enum):
    """Which rows give way. It follows the score strategy; LFU may also be asked for here.

    A table has no epochs, so EPOCH_LRU and EPOCH_LFU are names only.

    Examples:
        >>> from dynamicemb import DynamicEmbEvictStrategy, DynamicEmbTableOptions
        >>> options = DynamicEmbTableOptions(evict_strategy=DynamicEmbEvictStrategy.LFU)
    """

    LRU = "lru"
    LFU = "lfu"
    EPOCH_LRU = "epoch_lru"
    EPOCH_LFU = "epoch_lfu"
    CUSTOMIZED = "customized"


class DynamicEmbPoolingMode(enum.IntEnum):
    """How the vectors of a bag become one: their sum, their mean, or not at all.

    Examples:
        >>> from dynamicemb import DynamicEmbPoolingMode
        >>> DynamicEmbPoolingMode.SUM.value
        0
    """

    SUM = 0
    MEAN = 1
    NONE = 2


@dataclass
class DynamicEmbInitializerArgs:
    """Numbers of an initializer; those that its mode has no use for are ignored.

    Args:
        mode: one of `DynamicEmbInitializerMode`.
        mean: of NORMAL and TRUNCATED_NORMAL.
        std_dev: of NORMAL and TRUNCATED_NORMAL.
        lower: bound of UNIFORM, absolute bound of TRUNCATED_NORMAL. None: 0.0, but the planner gives UNIFORM
            -sqrt(1 / num_embeddings).
        upper: the same. None: 1.0, but the planner gives UNIFORM sqrt(1 / num_embeddings).
        value: of CONSTANT.

    Raises:
        ValueError: a number does not fit the mode; when a table's options are made.

    Examples:
        >>> from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
        >>> DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.5).value
        0.5
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def copy(self) -> DynamicEmbInitializerArgs:
        return dataclasses.replace(self)

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
