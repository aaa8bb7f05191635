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
from dynamicemb.embedding_admission import FrequencyAdmissionStrategy, KVCounter
from dynamicemb.enumerations import (
    BATCH_SIZE,
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    DEFAULT_INDEX_TYPE,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
)
from dynamicemb.optimizers import OptimizerArgs
from dynamicemb.options import DynamicEmbTableOptions, HKVConfig
from dynamicemb.score_strategies import ScoreStrategy
from dynamicemb.sizing import align_to_table_size, get_sharded_table_capacity, get_table_value_bytes
from dynamicemb.torchrec_names import require_names as _require_names
from dynamicemb.types import AdmissionStrategy, Counter

_require_names()

__all__ = [
    "AdmissionStrategy",
    "BATCH_SIZE",
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "Counter",
    "DEFAULT_INDEX_TYPE",
    "DEMB_TABLE_ALIGN_SIZE",
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
    "KVCounter",
    "MAX_BUCKET_CAPACITY",
    "OptimizerArgs",
    "ScoreStrategy",
    "align_to_table_size",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dyn_emb_to_torch",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
]
