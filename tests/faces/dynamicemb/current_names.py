"""Module paths and names of the current original package (0.1.0): what its clients import."""

_OPTIONS = """DynamicEmbCheckMode DynamicEmbEvictStrategy DynamicEmbInitializerArgs DynamicEmbInitializerMode
    DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions"""
_SIZES = "BUCKET_ALIGNMENT DEMB_TABLE_ALIGN_SIZE MAX_BUCKET_CAPACITY"
_CAPACITIES = "align_to_table_size get_table_value_bytes get_sharded_table_capacity"
_PLANNER = """DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator
    DynamicEmbeddingShardingPlanner"""

NAMES = {
    "dynamicemb": f"""{_OPTIONS} {_SIZES} {_CAPACITIES} AdmissionStrategy Counter KVCounter ScoreStrategy
        FrequencyAdmissionStrategy DynamicEmbDump DynamicEmbLoad BATCH_SIZE_PER_DUMP EmbOptimType
        OptimizerArgs
        data_type_to_dtype data_type_to_dyn_emb dyn_emb_to_torch string_to_evict_strategy torch_to_dyn_emb""",
    "dynamicemb.dynamicemb_config": f"""{_OPTIONS} {_CAPACITIES} DynamicEmbKernel DEFAULT_INDEX_TYPE
        DEFAULT_BUCKET_CAPACITY BATCH_SIZE_PER_DUMP SUPPORTED_DIST_TYPES DEBUG_EMB_INITIALIZER_MOD
        SUPPORTED_COMPOUND_SCORE_STRATEGIES ScoreStrategy normalize_score_strategy validate_score_strategy
        get_eviction_score_strategy score_strategy_has_timestamp_column get_physical_score_order
        score_dump_permutation score_load_permutation warning_for_cstm_score dtype_to_bytes
        complete_initializer_args get_constraint_capacity data_type_to_dtype data_type_to_dyn_emb
        string_to_evict_strategy""",
    "dynamicemb.types": f"""{_SIZES} MemoryType DynamicEmbInitializerMode DynamicEmbInitializerArgs CopyMode
        Storage
        Cache Counter AdmissionStrategy KEY_TYPE EMBEDDING_TYPE SCORE_TYPE OPT_STATE_TYPE COUNTER_TYPE
        torch_dtype_to_np_dtype""",
    "dynamicemb.utils": "TORCHREC_TYPES DTYPE_NUM_BYTES torch_to_dyn_emb tabulate assert_tensors_equal",
    "dynamicemb.embedding_admission": "KVCounter MultiTableKVCounter FrequencyAdmissionStrategy",
    "dynamicemb.optimizer": """EmbOptimType OptimizerArgs get_optimizer_state_dim get_optimizer_ckpt_state_dim
        string_to_opt_type get_required_arg BaseDynamicEmbeddingOptimizer SGDDynamicEmbeddingOptimizer
        AdamDynamicEmbeddingOptimizer AdaGradDynamicEmbeddingOptimizer RowWiseAdaGradDynamicEmbeddingOptimizer
        truncate_optimizer_states_for_checkpoint pad_optimizer_states_from_checkpoint""",
    "dynamicemb.initializer": """create_initializer_from_args BaseDynamicEmbInitializer NormalInitializer
        TruncatedNormalInitializer UniformInitializer ConstantInitializer DebugInitializer""",
    "dynamicemb.get_planner": "get_planner",
    "dynamicemb.planner": _PLANNER,
    "dynamicemb.planner.planner": "DynamicEmbeddingShardingPlanner",
    "dynamicemb.planner.enumerators": "DynamicEmbeddingEnumerator",
    "dynamicemb.planner.rw_sharding": "",
    "dynamicemb.shard": """DynamicEmbeddingCollectionSharder DynamicEmbeddingBagCollectionSharder
        ShardedDynamicEmbeddingCollection""",
    "dynamicemb.shard.embedding": """DynamicEmbeddingCollectionContext ShardedDynamicEmbeddingCollection
        DynamicEmbeddingCollectionSharder""",
    "dynamicemb.shard.embeddingbag": "DynamicEmbeddingBagCollectionSharder",
    "dynamicemb.dump_load": """DynamicEmbDump DynamicEmbLoad find_sharded_modules check_emb_collection_modules
        get_dynamic_emb_module""",
    "dynamicemb.incremental_dump": "incremental_dump get_score set_score",
    "dynamicemb.batched_dynamicemb_tables": """BatchedDynamicEmbeddingTablesV2 encode_checkpoint_file_path
        encode_meta_json_file_path encode_counter_checkpoint_file_path find_files get_loading_files
        StorageLayout""",
    "dynamicemb.key_value_table": """Storage Cache CopyMode DynamicEmbStorage DynamicEmbCache HybridStorage
        flush_cache
        eval_lookup load_from_json save_to_json""",
    "dynamicemb.exportable_tables": """InferenceEmbeddingCollection create_inference_embedding_collection
        apply_inference_embedding_collection""",
    "dynamicemb.lookup_meta": "REGISTERED register_lookup_fake",
    "dynamicemb.index_range_meta": "REGISTERED register_index_range_fake",
}

# Importable, so that a block of imports passes; using one raises NotImplementedError.
NOT_YET = {
    "dynamicemb.batched_dynamicemb_tables": "StorageLayout",
    "dynamicemb.key_value_table": "DynamicEmbStorage DynamicEmbCache HybridStorage flush_cache eval_lookup",
}

# How TorchEasyRec and HSTU import: one failure turns dynamic tables off, the first time without a word.
TORCH_EASY_REC = """
from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbScoreStrategy
from dynamicemb import FrequencyAdmissionStrategy, KVCounter, align_to_table_size
import dynamicemb
dynamicemb.DynamicEmbTableOptions
from dynamicemb.dynamicemb_config import DynamicEmbKernel
from dynamicemb.planner import DynamicEmbParameterConstraints, DynamicEmbParameterSharding
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from dynamicemb.shard.embedding import DynamicEmbeddingCollectionContext
from dynamicemb.batched_dynamicemb_tables import encode_checkpoint_file_path, encode_meta_json_file_path
from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad, get_dynamic_emb_module
from dynamicemb.types import CopyMode
"""
HSTU = """
from dynamicemb.get_planner import get_planner
from dynamicemb.utils import TORCHREC_TYPES
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from dynamicemb import DynamicEmbCheckMode, DynamicEmbEvictStrategy, DynamicEmbTableOptions
from dynamicemb import DynamicEmbDump, DynamicEmbLoad, FrequencyAdmissionStrategy, KVCounter
from dynamicemb import get_sharded_table_capacity, get_table_value_bytes
from dynamicemb.incremental_dump import get_score, incremental_dump, set_score
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
import dynamicemb.exportable_tables
import dynamicemb.lookup_meta
import dynamicemb.index_range_meta
"""
