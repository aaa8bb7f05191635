"""Plans, dumps and views as today's clients ask for them, on one rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faces.dynamicemb.small_tables import (
    CPU,
    QUARTER,
    options,
    tables,
    train,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    dump_load,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables, find_files
from dynamicemb.dump_load import find_sharded_modules, get_dynamic_emb_module
from dynamicemb.dynamicemb_config import (
    DynamicEmbKernel,
)
from dynamicemb.get_planner import get_planner
from dynamicemb.planner import DynamicEmbParameterSharding
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from dynamicemb.shard.embedding import DynamicEmbeddingCollectionContext
from dynamicemb.types import CopyMode, Storage


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- a client that plans itself


def plan_entry(config: Any, made: DynamicEmbTableOptions, rows: int = 97) -> DynamicEmbParameterSharding:
    shard = ShardMetadata([0, 0], [rows, config.embedding_dim], "rank:0/cpu")
    return DynamicEmbParameterSharding(
        sharding_spec=EnumerableShardingSpec([shard]),
        sharding_type="row_wise",
        ranks=[0],
        compute_kernel="customized_kernel",
        customized_compute_kernel=DynamicEmbKernel,
        dist_type="roundrobin",
        dynamicemb_options=made,
    )


def test_a_plan_entry_carries_what_torchrec_hands_on() -> None:
    made = options()
    entry = DynamicEmbParameterSharding("row_wise", dynamicemb_options=made)
    assert entry.compute_kernel == "customized_kernel"
    extra = entry.get_additional_fused_params()
    assert extra == {
        "customized_compute_kernel": "DynamicEmb",
        "dist_type": "roundrobin",
        "dynamicemb_options": made,
    }
    fused = {"learning_rate": 1.0, **extra}
    DynamicEmbParameterSharding.pop_additional_fused_params(fused)
    assert fused == {"learning_rate": 1.0}
    with pytest.raises(ValueError, match="dist_type should be 'hash_roundrobin'"):
        DynamicEmbParameterSharding("row_wise", dynamicemb_options=options(dist_type="hash_roundrobin"))
    with pytest.raises(ValueError, match="customized_compute_kernel should be 'DynamicEmb'"):
        DynamicEmbParameterSharding("row_wise", customized_compute_kernel="Other")


@pytest.mark.parametrize("bags", [False, True])
def test_a_dynamic_table_at_torchrec_s_own_sharder_names_ours(group: None, bags: bool) -> None:
    kind, table = (
        (EmbeddingBagCollection, EmbeddingBagConfig) if bags else (EmbeddingCollection, EmbeddingConfig)
    )
    config = table(name="t", num_embeddings=97, embedding_dim=4, feature_names=["f"])
    model = torch.nn.Sequential(kind(tables=[config], device=torch.device("meta")))
    plan = ShardingPlan({"0": EmbeddingModuleShardingPlan({"t": plan_entry(config, options())})})
    sharder = EmbeddingBagCollectionSharder() if bags else EmbeddingCollectionSharder()
    with pytest.raises(ValueError, match="DynamicEmbeddingCollectionSharder"):
        DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])  # type: ignore[list-item]


def _replaced(
    self: Any,
    sharding_contexts: Any = None,
    input_features: Any = None,
    reverse_indices: Any = None,
    seq_vbe_ctx: Any = None,
    frequency_counters: Any = None,
) -> None:
    self.sharding_contexts, self.input_features = sharding_contexts or [], input_features or []
    self.reverse_indices, self.seq_vbe_ctx = reverse_indices or [], seq_vbe_ctx or []
    self.frequency_counters = frequency_counters or []


@pytest.mark.parametrize("replace_context", [False, True])
def test_a_client_plans_trains_dumps_and_restores(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace_context: bool
) -> None:
    if replace_context:
        monkeypatch.setattr(DynamicEmbeddingCollectionContext, "__init__", _replaced)
    config = EmbeddingConfig(name="t", num_embeddings=97, embedding_dim=4, feature_names=["f"])

    def build() -> DistributedModelParallel:
        made = copy.deepcopy(DynamicEmbTableOptions(max_capacity=97, initializer_args=QUARTER))
        made.caching, made.training, made.local_hbm_for_values = False, True, 1e3
        made.dim, made.max_capacity = 4, 97
        made.embedding_dtype, made.index_type = torch.float32, torch.int64
        entry = plan_entry(config, made)
        sharders: list[Any] = [
            DynamicEmbeddingCollectionSharder({"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}),
            DynamicEmbeddingBagCollectionSharder(),
        ]
        model = torch.nn.Sequential(EmbeddingCollection(tables=[config], device=torch.device("meta")))
        plan = ShardingPlan({"0": EmbeddingModuleShardingPlan({"t": entry})})
        return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)

    model = build()
    batch = KeyedJaggedTensor(["f"], torch.tensor([5, -5, 5]), lengths=torch.tensor([1, 2]))
    model(batch)["f"].values().sum().backward()
    (view,) = get_dynamic_emb_module(model)
    assert get_dynamic_emb_module(model)[0] is view and view.table_names == ["t"]
    assert view._dynamicemb_options[0].dim == 4 and view._dynamicemb_options[0].max_capacity == 128
    ((path, name, module),) = find_sharded_modules(model)
    assert (path, name) == ("model.0", "0") and hasattr(module, "dynamic_tables")

    folder = str(tmp_path / "dump")
    DynamicEmbDump(folder, model, optim=True, counter=True)
    files, world = find_files(f"{folder}/model.0", "t", "emb_keys")
    assert world == 1 and sorted(np.fromfile(files[0], np.int64).tolist()) == [-5, 5]
    again = build()
    DynamicEmbLoad(folder, again, optim=True, counter=True)
    for twin in (model, again):
        twin(batch)["f"].values().sum().backward()
    keys = torch.tensor([-5, 5, 6])
    twins = [
        get_dynamic_emb_module(m)[0].tables.find(keys, torch.zeros_like(keys), CopyMode.VALUE)
        for m in (model, again)
    ]
    assert torch.equal(twins[0][7], twins[1][7]) and twins[0][7][:2].all()


def test_the_view_of_tables_finds_rows_by_key_and_table(group: None) -> None:
    module = tables(options(dim=3), options(dim=5), optimizer=EmbOptimType.EXACT_ADAGRAD)
    module(torch.tensor([1, 2, 2, 3]), torch.tensor([0, 2, 4])).sum().backward()
    (view,) = get_dynamic_emb_module(torch.nn.ModuleList([module]))
    assert isinstance(view.tables, Storage) and view.table_names == ["t0", "t1"]
    view.flush()
    keys, ids = torch.tensor([2, 9, 2]), torch.tensor([1, 0, 0])
    missing, missing_keys, places, missing_ids, none, found, scores, values = view.tables.find(
        keys, ids, CopyMode.VALUE
    )
    assert (missing, missing_keys.tolist(), places.tolist(), missing_ids.tolist()) == (1, [9], [1], [0])
    assert none is None and found.tolist() == [True, False, True] and (scores > 0).tolist() == found.tolist()
    moved = 0.25 - 0.5
    assert values.shape == (3, 10)
    torch.testing.assert_close(values[0], torch.tensor([moved] * 5 + [1.0] * 5))
    torch.testing.assert_close(values[2], torch.tensor([moved] * 3 + [0.0] * 2 + [1.0] * 3 + [0.0] * 2))
    assert not values[1].any()
    assert view.tables.find(keys, ids, CopyMode.EMBEDDING)[7].shape == (3, 5)
    exported = list(view.tables.export_keys_values(CPU, table_id=1))
    assert sorted(torch.cat([block[0] for block in exported]).tolist()) == [2, 3]
    with pytest.raises(ValueError, match="table_ids should be from 0 to 1"):
        view.tables.find(keys, ids + 1, CopyMode.VALUE)


# ---- the planner of HSTU


def test_get_planner_makes_tables_dynamic_copied_or_row_wise(group: None) -> None:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=8, feature_names=[f"f_{name}"])
        for name in ("user", "country", "item")
    ]
    for pipeline in ("none", "native", "prefetch"):
        planner = get_planner(configs, {"country"}, {"user": options(dim=8)}, CPU, pipeline)
        module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        plan = planner.collective_plan(module, [DynamicEmbeddingBagCollectionSharder()], dist.group.WORLD)
        found = {name: (entry.sharding_type, entry.compute_kernel) for name, entry in plan.plan[""].items()}
        assert found["user"] == ("row_wise", "customized_kernel")
        assert found["country"] == ("data_parallel", "dense")
        assert found["item"][0] == "row_wise" and found["item"][1] in ("fused", "dense")
    with pytest.raises(ValueError, match="pipeline_type should be one of"):
        get_planner(configs, set(), {}, CPU, "other")
    with pytest.raises(ValueError, match="should name different tables"):
        get_planner(configs, {"user"}, {"user": options()}, CPU)
    with pytest.raises(ValueError, match="should name different tables"):
        get_planner(configs, {"nobody"}, {}, CPU)


# ---- dump and load


def test_the_fifth_argument_is_a_counter_or_a_process_group(group: None, tmp_path: Path) -> None:
    module = tables(options())
    train(module, 7)
    world = dist.group.WORLD

    def layout(number: int, *arguments: Any, **keywords: Any) -> str:
        path = tmp_path / str(number)
        DynamicEmbDump(str(path), module, None, False, *arguments, **keywords)
        again = tables(options())
        DynamicEmbLoad(str(path), again, None, False, *arguments[:2])
        assert again.dynamic_tables["t0"].table.rows().keys.tolist() == [7]
        return "v2" if list(path.glob("*/t0_emb_keys.rank_0.world_size_1")) else "v1a"

    assert layout(0) == layout(1, None) == layout(2, world) == layout(3, None, world) == "v1a"
    assert layout(4, True) == layout(5, False) == layout(6, True, world) == "v2"
    assert layout(7, True, world, False) == "v2" and layout(8, True, layout="v1a") == "v1a"
    for call in (DynamicEmbDump, DynamicEmbLoad):
        for arguments in ((world, world), (3,), (None, 3), ("x",)):
            with pytest.raises(TypeError, match="counter should be|pg should be"):
                call(str(tmp_path / "no"), module, None, False, *arguments)
    assert not (tmp_path / "no").exists()


def test_the_environment_chooses_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tables(options())
    train(module, 7)
    monkeypatch.setenv("DYNAMICEMB_LAYOUT", "v2")
    DynamicEmbDump(str(tmp_path / "a"), module)
    assert (tmp_path / "a/model/t0_emb_keys.rank_0.world_size_1").stat().st_size == 8
    monkeypatch.setenv("DYNAMICEMB_LAYOUT", "v3")
    with pytest.raises(ValueError, match="DYNAMICEMB_LAYOUT should be v1a or v2"):
        DynamicEmbDump(str(tmp_path / "b"), module)


def test_counts_of_keys_without_a_row_survive_a_dump_for_current_readers(tmp_path: Path) -> None:
    def build() -> BatchedDynamicEmbeddingTables:
        return tables(options(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(64)))

    module, again = build(), build()
    train(module, 7)
    train(module, 7)
    DynamicEmbDump(str(tmp_path / "d"), module, counter=True)
    DynamicEmbLoad(str(tmp_path / "d"), again, counter=True)
    train(again, 7)
    assert len(again.dynamic_tables["t0"].table) == 1


def test_a_model_without_dynamic_tables_warns_once(tmp_path: Path) -> None:
    dump_load._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert (
                DynamicEmbDump(str(tmp_path / "d"), torch.nn.Linear(2, 2), optim=True, counter=True) is None
            )
    assert len(caught) == 1 and not (tmp_path / "d").exists()
