"""Module paths and names of the current original package (0.1.0): what its clients import."""

from compatibility.names import DYNAMICEMB, RAISES

_HELD = [module for module in DYNAMICEMB.modules if "" not in module.missing]
NAMES = {module.path: " ".join([*module.supported, *module.missing]) for module in _HELD}

# Importable, so that a block of imports passes; using one raises NotImplementedError.
NOT_YET = {
    module.path: " ".join(name for name, absence in module.missing.items() if absence.shows == RAISES)
    for module in _HELD
    if module.missing
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
