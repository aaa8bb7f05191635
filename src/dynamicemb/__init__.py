"""Dynamic embedding tables for TorchRec: rows for an unbounded set of ids, sharded over ranks."""

try:
    import torchrec as _torchrec  # noqa: F401
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
except ImportError as _error:
    from embstore.extras import missing as _missing

    raise _missing("dynamicemb", "torchrec", _error) from _error

from dynamicemb.dtypes import (
    DynamicEmbDataType,
    data_type_to_dtype,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    string_to_evict_strategy,
    torch_to_dyn_emb,
)
from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.optimizers import OptimizerArgs
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
    "DynamicEmbDataType",
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
    "OptimizerArgs",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dyn_emb_to_torch",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
]
