"""Options, planner and discovery: what needs no second rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints

import dynamicemb
import embstore
from dynamicemb import (
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    HKVConfig,
)
from dynamicemb.discovery import Collection, find_collections, resolve
from dynamicemb.options import capacity_per_rank
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.scores import get_score, set_score
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder
from dynamicemb.tables import engine_options


def config(name: str = "t", rows: int = 1000, dim: int = 8) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])


def constraint(**options: Any) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(
        use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options)
    )


def planner(configs: list[Any], constraints: Any, world: int = 1) -> DynamicEmbeddingShardingPlanner:
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    return DynamicEmbeddingShardingPlanner(configs, topology, constraints=constraints, debug=False)


def test_enumerations_have_the_documented_values() -> None:
    assert [(m.name, m.value) for m in DynamicEmbCheckMode] == [("ERROR", 0), ("WARNING", 1), ("IGNORE", 2)]
    assert {m.name: m.value for m in DynamicEmbInitializerMode} == {
        "NORMAL": "normal",
        "TRUNCATED_NORMAL": "truncated_normal",
        "UNIFORM": "uniform",
        "CONSTANT": "constant",
        "DEBUG": "debug",
    }
    assert [s.name for s in sorted(DynamicEmbScoreStrategy)] == [
        "TIMESTAMP",
        "STEP",
        "CUSTOMIZED",
        "LFU",
        "NO_EVICTION",
        "IMPORTANCE",  # ours
    ]
    assert (torch.int64, 512) == (dynamicemb.DEFAULT_INDEX_TYPE, dynamicemb.BATCH_SIZE)


def test_options_come_in_the_documented_order_with_the_documented_defaults() -> None:
    defaults = {f.name: getattr(DynamicEmbTableOptions(), f.name) for f in dataclasses.fields(HKVConfig)}
    assert defaults == {
        "index_type": None,
        "embedding_dtype": None,
        "score_type": torch.uint64,
        "device_id": None,
        "dim": None,
        "max_capacity": None,
        "init_capacity": None,
        "max_load_factor": 0.5,
        "global_hbm_for_values": 0,
        "local_hbm_for_values": 0,
        "evict_strategy": DynamicEmbEvictStrategy.LRU,
        "bucket_capacity": 128,
        "block_size": 128,
        "io_block_size": 1024,
        "io_by_cpu": False,
        "use_constant_memory": False,
        "reserved_key_start_bit": 0,
        "num_of_buckets_per_alloc": 1,
    }
    names = [f.name for f in dataclasses.fields(DynamicEmbTableOptions)]
    assert names[len(defaults) :][:3] == ["initializer_args", "score_strategy", "safe_check_mode"]
    first, second = DynamicEmbParameterConstraints(), DynamicEmbParameterConstraints()
    assert not first.use_dynamicemb and first.dynamicemb_options is not second.dynamicemb_options
    assert isinstance(first, ParameterConstraints)


def test_options_are_equal_where_tables_may_share_a_group() -> None:
    one, other = DynamicEmbTableOptions(), DynamicEmbTableOptions(bucket_capacity=64, index_type=torch.int64)
    assert one == other and hash(one) == hash(other)
    assert one != DynamicEmbTableOptions(embedding_dtype=torch.float16)
    assert one != 3 and one != HKVConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index_type", torch.float32),
        ("embedding_dtype", torch.int8),
        ("score_type", torch.float32),
        ("device_id", -1),
        ("dim", 0),
        ("init_capacity", 0),
        ("max_load_factor", 0.0),
        ("max_load_factor", 1.5),
        ("bucket_capacity", 100),
        ("bucket_capacity", 0),
        ("block_size", 0),
        ("global_hbm_for_values", -1),
        ("evict_strategy", "lru"),
        ("safe_check_mode", 9),
        ("dist_type", "blocks"),
        ("admit_strategy", 3),
        ("initializer_args", None),
    ],
)
def test_a_wrong_option_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} should be"):
        DynamicEmbTableOptions(**{name: value})
    options = DynamicEmbTableOptions()
    setattr(options, name, value)
    with pytest.raises(ValueError, match=f"{name} should be"):
        planner(
            [config()], {"t": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)}
        )


@pytest.mark.parametrize("strategy", list(DynamicEmbScoreStrategy))
def test_lfu_as_evict_strategy_decides_the_order_of_eviction_beside_every_score(
    strategy: DynamicEmbScoreStrategy,
) -> None:
    options = DynamicEmbTableOptions(evict_strategy=DynamicEmbEvictStrategy.LFU, score_strategy=strategy)
    planned = options.planned(num_embeddings=1000, dim=4, world=1, dtype=torch.float32)
    engine = engine_options("t", 4, planned, {"optimizer": EmbOptimType.SGD}, 0)
    assert engine.evict_least_used and engine.score_strategy == embstore.ScoreStrategy(int(strategy))


def test_shared_rows_and_admission_by_frequency_reach_the_engine() -> None:
    options = DynamicEmbTableOptions(
        score_strategy=DynamicEmbScoreStrategy.LFU, admission="frequency", shared_rows=2, half_life=9,
        dist_type="hash_roundrobin",
    )  # fmt: skip
    planned = options.planned(num_embeddings=1000, dim=4, world=1, dtype=torch.float32)
    engine = engine_options("t", 4, planned, {"optimizer": EmbOptimType.SGD}, 0)
    assert (engine.admission.name, engine.shared_rows, engine.half_life) == ("FREQUENCY", 2, 9)
    assert engine.score_strategy.name == "AGED_LFU"
    plain = DynamicEmbTableOptions().planned(num_embeddings=1000, dim=4, world=1, dtype=torch.float32)
    engine = engine_options("t", 4, plain, {"optimizer": EmbOptimType.SGD}, 0)
    assert (engine.admission.name, engine.shared_rows) == ("ALL", 0)
    assert engine.score_strategy.name == "TIMESTAMP"
    with pytest.raises(ValueError, match="admission should be 'frequency' only with"):
        DynamicEmbTableOptions(admission="frequency")


@pytest.mark.parametrize("threshold", [-1, True, 2.0, "3", None])
def test_an_admission_threshold_is_an_integer_of_at_least_zero(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold should be"):
        FrequencyAdmissionStrategy(threshold)


def test_initializers_become_those_of_the_engine() -> None:
    mode, args = DynamicEmbInitializerMode, DynamicEmbInitializerArgs
    assert args().to_engine() == embstore.Uniform(0.0, 1.0)
    assert args(mode.UNIFORM, lower=-1.0, upper=0.0).to_engine() == embstore.Uniform(-1.0, 0.0)
    assert args(mode.NORMAL, mean=1.0, std_dev=0.5).to_engine() == embstore.Normal(1.0, 0.5)
    assert args(mode.TRUNCATED_NORMAL, lower=-1.0, upper=2.0).to_engine() == embstore.TruncatedNormal(
        0.0, 1.0, -1.0, 2.0
    )
    assert args(mode.CONSTANT, value=3.0).to_engine() == embstore.Constant(3.0)
    assert args(mode.DEBUG).to_engine() == embstore.Debug()


@pytest.mark.parametrize(
    ("rows", "world", "bucket", "expected"),
    [
        (1, 1, 128, 128),
        (1000, 1, 128, 1024),
        (1024, 2, 128, 512),
        (1025, 2, 128, 1024),
        (10**9, 8, 128, 1 << 27),
    ],
)
def test_capacity_is_a_power_of_two_and_a_bucket_at_least(
    rows: int, world: int, bucket: int, expected: int
) -> None:
    assert capacity_per_rank(rows, world, bucket) == expected


def test_planning_fills_in_a_copy_and_leaves_the_user_s_objects_alone() -> None:
    configs, constraints = [config(rows=1000)], {"t": constraint(global_hbm_for_values=7)}
    before = repr((configs, constraints))
    plans = [planner(configs, constraints, world=3).planned["t"] for _ in range(2)]
    assert dataclasses.asdict(plans[0]) == dataclasses.asdict(plans[1])
    assert repr((configs, constraints)) == before
    planned = plans[0]
    assert (planned.max_capacity, planned.init_capacity, planned.dim) == (512, 512, 8)
    assert (planned.embedding_dtype, planned.local_hbm_for_values) == (torch.float32, 3)
    bound = math.sqrt(1 / 1000)
    assert (planned.initializer_args.lower, planned.initializer_args.upper) == (-bound, bound)


def test_a_bound_of_zero_is_a_bound() -> None:
    args = DynamicEmbInitializerArgs(lower=-1.0, upper=0.0)
    planned = planner([config()], {"t": constraint(initializer_args=args)}).planned["t"]
    assert (planned.initializer_args.lower, planned.initializer_args.upper) == (-1.0, 0.0)


def test_the_plan_spreads_dynamic_tables_row_wise_and_leaves_static_ones_to_torchrec() -> None:
    configs = [config("t", rows=1000), config("s", rows=100), config("huge", rows=10**12)]
    constraints = {
        "t": constraint(),
        "s": DynamicEmbParameterConstraints(sharding_types=["table_wise"]),
        "huge": constraint(init_capacity=1024),
    }
    module = EmbeddingBagCollection(tables=configs[:2], device=torch.device("meta"))
    planned = planner(configs, constraints, world=2)
    plan = planned.plan(module, [DynamicEmbeddingBagCollectionSharder()]).plan[""]
    shards = plan["t"].sharding_spec.shards
    assert plan["t"].sharding_type == "row_wise" and plan["t"].ranks == [0, 1]
    assert [(s.shard_offsets, s.shard_sizes) for s in shards] == [([0, 0], [512, 8]), ([512, 0], [512, 8])]
    assert plan["s"].sharding_type == "table_wise" and plan["s"].compute_kernel == "fused"
    assert planned.planned["huge"].init_capacity == 1024


def test_constraints_have_to_name_every_table_once() -> None:
    with pytest.raises(ValueError, match="constraints should name every table but is: None"):
        planner([config()], None)
    with pytest.raises(ValueError, match=r"missing: \['u'\]"):
        planner([config(), config("u")], {"t": constraint()})
    with pytest.raises(ValueError, match=r"not there: \['u'\]"):
        planner([config()], {"t": constraint(), "u": constraint()})
    with pytest.raises(ValueError, match=r"occur twice: \['t'\]"):
        planner([config(), config()], {"t": constraint()})
    with pytest.raises(ValueError, match="dim of table 't' should be 8"):
        planner([config()], {"t": constraint(dim=4)})


def test_without_a_topology_there_is_one_for_the_cpu() -> None:
    made = DynamicEmbeddingShardingPlanner([config()], constraints={"t": constraint()}, debug=False)
    assert made.planned["t"].max_capacity == 1024
    topology = Topology(world_size=1, compute_device="cpu")
    module = EmbeddingBagCollection(tables=[config()], device=torch.device("meta"))
    enumerator = DynamicEmbeddingEnumerator(topology, constraints={"t": constraint()})
    (option,) = enumerator.enumerate(module, [DynamicEmbeddingBagCollectionSharder()])
    assert option.sharding_type == "row_wise" and option.total_storage.ddr == 0


def test_collections_are_named_by_path_or_by_the_last_component() -> None:
    found = {path: Collection(path) for path in ("model", "model.a.x", "model.b.x", "model.b.y")}
    assert resolve(found, "model.a.x") is found["model.a.x"]
    assert resolve(found, "y") is found["model.b.y"] and resolve(found, "z") is None
    with pytest.raises(ValueError, match=r"model.a.x, model.b.x"):
        resolve(found, "x")


def test_a_model_without_dynamic_tables_has_no_scores() -> None:
    model = torch.nn.Linear(2, 2)
    assert find_collections(model) == {} and get_score(model) is None
    set_score(model, 3)
    with pytest.warns(UserWarning, match="'x'"):
        set_score(model, {"x": {"t": 1}})


def test_a_table_without_eviction_never_evicts_whatever_evict_strategy_says():
    options = DynamicEmbTableOptions(
        score_strategy=DynamicEmbScoreStrategy.NO_EVICTION, evict_strategy=DynamicEmbEvictStrategy.LFU
    )
    assert options.engine_strategy is embstore.ScoreStrategy.NO_EVICTION
