"""Every name, default and value that the documents promise, and the conversions between names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

import dynamicemb
from dynamicemb import DynamicEmbDataType, DynamicEmbEvictStrategy, OptimizerArgs
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables
from dynamicemb.optimizers import engine_optimizer
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

PROMISED = {
    "dynamicemb.planner": [
        "DynamicEmbParameterConstraints",
        "DynamicEmbeddingEnumerator",
        "DynamicEmbeddingShardingPlanner",
    ],
    "dynamicemb.shard": [
        "DynamicEmbeddingCollectionSharder",
        "DynamicEmbeddingBagCollectionSharder",
        "ShardedDynamicEmbeddingCollection",
    ],
    "dynamicemb": [
        "DynamicEmbCheckMode",
        "DynamicEmbInitializerMode",
        "DynamicEmbInitializerArgs",
        "DynamicEmbTableOptions",
        "DynamicEmbDump",
        "DynamicEmbLoad",
        "DynamicEmbScoreStrategy",
        "HKVConfig",
        "DynamicEmbEvictStrategy",
        "DEFAULT_INDEX_TYPE",
        "BATCH_SIZE",
        "DynamicEmbPoolingMode",
        "BATCH_SIZE_PER_DUMP",
        "EmbOptimType",
        "OptimizerArgs",
        "data_type_to_dyn_emb",
        "data_type_to_dtype",
        "dyn_emb_to_torch",
        "torch_to_dyn_emb",
        "string_to_evict_strategy",
    ],
    "dynamicemb.incremental_dump": ["incremental_dump", "get_score", "set_score"],
    "dynamicemb.batched_dynamicemb_tables": ["BatchedDynamicEmbeddingTables"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PROMISED.items() for n in names])
def test_a_promised_name_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_top_level_lists_what_it_offers() -> None:
    assert set(PROMISED["dynamicemb"]) <= set(dynamicemb.__all__)
    assert all(hasattr(dynamicemb, name) for name in dynamicemb.__all__)


REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    DynamicEmbeddingEnumerator: {
        "topology": REQUIRED,
        "batch_size": 512,
        "constraints": None,
        "estimator": None,
    },
    DynamicEmbeddingShardingPlanner: {
        "eb_configs": REQUIRED,
        "topology": None,
        "batch_size": None,
        "enumerator": None,
        "storage_reservation": None,
        "proposer": None,
        "partitioner": None,
        "performance_model": None,
        "stats": None,
        "constraints": None,
        "debug": True,
    },
    DynamicEmbeddingCollectionSharder: {
        "fused_params": None,
        "qcomm_codecs_registry": None,
        "use_index_dedup": False,
    },
    dynamicemb.DynamicEmbDump: {
        "path": REQUIRED,
        "model": REQUIRED,
        "table_names": None,
        "optim": False,
        "counter": None,
        "pg": None,
    },
    dynamicemb.DynamicEmbLoad: {
        "path": REQUIRED,
        "model": REQUIRED,
        "table_names": None,
        "optim": False,
        "counter": None,
        "pg": None,
    },
    importlib.import_module("dynamicemb.incremental_dump").incremental_dump: {
        "model": REQUIRED,
        "score_threshold": REQUIRED,
        "pg": None,
    },
    importlib.import_module("dynamicemb.incremental_dump").get_score: {"model": REQUIRED},
    importlib.import_module("dynamicemb.incremental_dump").set_score: {
        "model": REQUIRED,
        "table_score": REQUIRED,
    },
}


@pytest.mark.parametrize("promised", SIGNATURES, ids=lambda f: f.__name__)
def test_parameters_come_in_the_promised_order_with_the_promised_defaults(promised: object) -> None:
    parameters = inspect.signature(promised).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    expected = SIGNATURES[promised]
    assert list(found.items())[: len(expected)] == list(expected.items())


def test_classes_stand_where_torchrec_s_stand() -> None:
    assert issubclass(DynamicEmbParameterConstraints, ParameterConstraints)
    assert issubclass(DynamicEmbeddingEnumerator, EmbeddingEnumerator)
    assert not issubclass(DynamicEmbeddingShardingPlanner, EmbeddingShardingPlanner)
    assert issubclass(DynamicEmbeddingCollectionSharder, EmbeddingCollectionSharder)
    assert issubclass(DynamicEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder)
    assert issubclass(dynamicemb.DynamicEmbTableOptions, dynamicemb.HKVConfig)
    assert issubclass(BatchedDynamicEmbeddingTables, torch.nn.Module)


def test_numbers_and_enumerations_have_the_promised_values() -> None:
    assert (dynamicemb.BATCH_SIZE, dynamicemb.BATCH_SIZE_PER_DUMP) == (512, 65536)
    assert dynamicemb.DEFAULT_INDEX_TYPE is torch.int64
    assert {m.name: int(m) for m in dynamicemb.DynamicEmbPoolingMode} == {"SUM": 0, "MEAN": 1, "NONE": 2}
    assert {m.name: int(m) for m in dynamicemb.DynamicEmbScoreStrategy} == {
        "TIMESTAMP": 0,
        "STEP": 1,
        "CUSTOMIZED": 2,
        "LFU": 3,
        "NO_EVICTION": 4,
        "IMPORTANCE": 6,  # ours
    }
    defaults = {f.name: f.default for f in dataclasses.fields(dynamicemb.DynamicEmbInitializerArgs)}
    assert defaults == {
        "mode": dynamicemb.DynamicEmbInitializerMode.UNIFORM,
        "mean": 0.0,
        "std_dev": 1.0,
        "lower": None,
        "upper": None,
        "value": 0.0,
    }


@pytest.mark.parametrize(
    ("torchrec", "name", "dtype"),
    [
        (DataType.FP32, "Float32", torch.float32),
        (DataType.FP16, "Float16", torch.float16),
        (DataType.BF16, "BFloat16", torch.bfloat16),
        (DataType.INT64, "Int64", torch.int64),
        (DataType.INT32, "Int32", torch.int32),
        (DataType.INT8, "Int8", torch.int8),
        (DataType.UINT8, "UInt8", torch.uint8),
    ],
)
def test_an_element_type_has_three_names(torchrec: DataType, name: str, dtype: torch.dtype) -> None:
    assert dynamicemb.data_type_to_dyn_emb(torchrec) is DynamicEmbDataType[name]
    assert dynamicemb.data_type_to_dtype(torchrec) is dtype
    assert dynamicemb.dyn_emb_to_torch(DynamicEmbDataType[name]) is dtype
    assert dynamicemb.torch_to_dyn_emb(dtype) is DynamicEmbDataType[name]


def test_every_type_has_a_name_in_torch_and_names_lead_back() -> None:
    for member in DynamicEmbDataType:
        dtype = dynamicemb.dyn_emb_to_torch(member)
        assert dynamicemb.dyn_emb_to_torch(dynamicemb.torch_to_dyn_emb(dtype)) is dtype


@pytest.mark.parametrize(
    ("function", "value", "argument"),
    [
        (dynamicemb.data_type_to_dyn_emb, DataType.INT4, "data_type"),
        (dynamicemb.data_type_to_dtype, DataType.INT2, "data_type"),
        (dynamicemb.dyn_emb_to_torch, "Float32", "data_type"),
        (dynamicemb.torch_to_dyn_emb, torch.complex64, "torch_dtype"),
        (dynamicemb.string_to_evict_strategy, "KEpoch", "strategy_str"),
        (dynamicemb.string_to_evict_strategy, 3, "strategy_str"),
    ],
)
def test_what_has_no_such_name_is_refused(function: object, value: object, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} should be one of"):
        function(value)


def test_evict_strategies_are_found_by_the_names_of_files() -> None:
    find = dynamicemb.string_to_evict_strategy
    assert find("KLru") is find("EvictStrategy.KLru") is DynamicEmbEvictStrategy.LRU
    assert find("KLfu") is DynamicEmbEvictStrategy.LFU
    assert find("KEpochLru") is DynamicEmbEvictStrategy.EPOCH_LRU
    assert find("KEpochLfu") is DynamicEmbEvictStrategy.EPOCH_LFU
    assert find("KCustomized") is DynamicEmbEvictStrategy.CUSTOMIZED


def test_optimizer_args_become_the_engine_s_optimizer() -> None:
    args = OptimizerArgs(learning_rate=0.5, eps=1e-3, beta1=0.8, weight_decay=0.1, gradient_clipping=True)
    adam = engine_optimizer(args.fused_params(dynamicemb.EmbOptimType.ADAM), "t")
    assert (adam.lr, adam.eps, adam.betas, adam.weight_decay) == (0.5, 1e-3, (0.8, 0.999), 0.1)
    assert adam.clip_value == 1.0
    plain = OptimizerArgs().fused_params(dynamicemb.EmbOptimType.EXACT_SGD)
    assert plain == {"optimizer": dynamicemb.EmbOptimType.EXACT_SGD}
    for name, value in {"eta": 0.5, "max_norm": 1.0, "momentum": 0.5, "weight_decay_mode": 2}.items():
        given = OptimizerArgs(**{name: value}).fused_params(dynamicemb.EmbOptimType.SGD)
        with pytest.raises(ValueError, match=f"{name} of table 't' should be"):
            engine_optimizer(given, "t")
        usual = {name: getattr(OptimizerArgs(), name), "optimizer": dynamicemb.EmbOptimType.SGD}
        assert engine_optimizer(usual, "t").lr == 0.01
    for name in ("counter_based_regularization", "cowclip_regularization"):
        with pytest.raises(ValueError, match=f"{name} of table 't' should be None"):
            engine_optimizer({name: object()}, "t")
