"""Dynamic embedding tables for TorchRec: rows for an unbounded set of ids, sharded over ranks."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.options import (
    BATCH_SIZE,
    BATCH_SIZE_PER_DUMP,
    DEFAULT_INDEX_TYPE,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    HKVConfig,
)

__all__ = [
    "BATCH_SIZE",
    "BATCH_SIZE_PER_DUMP",
    "DEFAULT_INDEX_TYPE",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "HKVConfig",
]
