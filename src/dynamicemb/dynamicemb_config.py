"""Enumerations, options and sizes of tables, under the module path of the current original package."""

from __future__ import annotations

import os
import warnings

from dynamicemb.dtypes import (
    DynamicEmbDataType,
    data_type_to_dtype,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    string_to_evict_strategy,
    torch_to_dyn_emb,
)
from dynamicemb.enumerations import (
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    DEBUG_EMB_INITIALIZER_MOD,
    DEFAULT_BUCKET_CAPACITY,
    DEFAULT_INDEX_TYPE,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    SUPPORTED_DIST_TYPES,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbKernel,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
)
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.score_strategies import (
    SUPPORTED_COMPOUND_SCORE_STRATEGIES,
    ScoreStrategy,
    get_eviction_score_strategy,
    get_physical_score_order,
    normalize_score_strategy,
    score_dump_permutation,
    score_load_permutation,
    score_strategy_has_timestamp_column,
    validate_score_strategy,
)
from dynamicemb.sizing import (
    align_to_table_size,
    complete_initializer_args,
    dtype_to_bytes,
    get_constraint_capacity,
    get_optimizer_state_dim,
    get_sharded_table_capacity,
    get_table_value_bytes,
)

__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEBUG_EMB_INITIALIZER_MOD",
    "DEFAULT_BUCKET_CAPACITY",
    "DEFAULT_INDEX_TYPE",
    "DEMB_TABLE_ALIGN_SIZE",
    "MAX_BUCKET_CAPACITY",
    "SUPPORTED_COMPOUND_SCORE_STRATEGIES",
    "SUPPORTED_DIST_TYPES",
    "DynamicEmbCheckMode",
    "DynamicEmbDataType",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbKernel",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "ScoreStrategy",
    "align_to_table_size",
    "complete_initializer_args",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dtype_to_bytes",
    "dyn_emb_to_torch",
    "get_constraint_capacity",
    "get_eviction_score_strategy",
    "get_optimizer_state_dim",
    "get_physical_score_order",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "normalize_score_strategy",
    "score_dump_permutation",
    "score_load_permutation",
    "score_strategy_has_timestamp_column",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
    "validate_score_strategy",
    "warning_for_cstm_score",
]


def warning_for_cstm_score() -> None:
    """Warns that CUSTOMIZED scores come from `set_score`, unless DYNAMICEMB_CSTM_SCORE_CHECK=0."""
    if os.environ.get("DYNAMICEMB_CSTM_SCORE_CHECK") != "0":
        warnings.warn(
            "CUSTOMIZED tables take the score of a batch from set_score; call it before the first forward",
            UserWarning,
            stacklevel=2,
        )
