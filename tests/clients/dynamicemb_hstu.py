"""HSTU's planner and collection, and the example beside it: sizes, options, increments, a checkpoint.

python dynamicemb_hstu.py FOLDER        one rank; under torchrun, as many as there are
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dynamicemb import (
    DynamicEmbCheckMode,
    DynamicEmbDump,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from dynamicemb.get_planner import get_planner
from dynamicemb.incremental_dump import get_score, incremental_dump
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from dynamicemb.utils import TORCHREC_TYPES

CPU = torch.device("cpu")
DIM = 8
COPIED = {"action"}
CONFIGS = [
    EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{name}"])
    for name, rows in (("item", 1000), ("user", 700), ("action", 10), ("context", 60))
]
FUSED = {
    "optimizer": EmbOptimType.EXACT_ADAGRAD,  # FBGEMM has no Adam for static tables on the CPU
    "learning_rate": 0.05,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "output_dtype": SparseType.FP32,
    "cache_precision": SparseType.FP32,
    "stochastic_rounding": False,
    "prefetch_pipeline": False,
}


def options(world: int) -> dict[str, DynamicEmbTableOptions]:
    item, user = CONFIGS[:2]
    half = get_table_value_bytes(item, EmbOptimType.EXACT_ADAGRAD, world, 128) * 0.5
    zero = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.0)
    return {
        "item": DynamicEmbTableOptions(
            global_hbm_for_values=half,
            evict_strategy=DynamicEmbEvictStrategy.LRU,
            safe_check_mode=DynamicEmbCheckMode.IGNORE,
            bucket_capacity=128,
            training=True,
            caching=False,
            dist_type="roundrobin",
        ),
        "user": DynamicEmbTableOptions(
            score_strategy=DynamicEmbScoreStrategy.STEP,
            initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.1),
            admit_strategy=FrequencyAdmissionStrategy(threshold=2, initializer_args=zero),
            admission_counter=KVCounter(
                capacity=get_sharded_table_capacity(user, world, 128),
                bucket_capacity=1024,
                key_type=torch.int64,
            ),
        ),
    }


class Model(torch.nn.Module):
    """Data-parallel tables are in a collection of their own, which stays a plain module."""

    def __init__(self) -> None:
        super().__init__()
        sharded = [config for config in CONFIGS if config.name not in COPIED]
        copied = [config for config in CONFIGS if config.name in COPIED]
        self.sparse = EmbeddingCollection(tables=sharded, device=torch.device("meta"))
        self.copied = EmbeddingCollection(tables=copied, device=CPU)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        return {**self.sparse(features), **self.copied(features)}


def build() -> DistributedModelParallel:
    planner = get_planner(CONFIGS, COPIED, options(dist.get_world_size()), CPU, "native")
    torch.manual_seed(3)
    model = Model()
    assert [type(module) in TORCHREC_TYPES for module in model.children()] == [True, True]
    sharders: Any = [
        DynamicEmbeddingBagCollectionSharder(qcomm_codecs_registry=None, fused_params=dict(FUSED)),
        DynamicEmbeddingCollectionSharder(
            qcomm_codecs_registry=None, use_index_dedup=True, fused_params=dict(FUSED)
        ),
    ]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    assert plan.plan.pop("copied")["action"].sharding_type == "data_parallel"
    return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan, init_data_parallel=False)


def batch(step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    features = [config.feature_names[0] for config in CONFIGS]
    lengths = torch.randint(1, 5, (4 * 13,), generator=generator)
    return KeyedJaggedTensor(
        features, torch.randint(0, 10, (int(lengths.sum()),), generator=generator), lengths=lengths
    )


def train(model: Any, step: int) -> None:
    sum(jagged.values().square().sum() for jagged in model(batch(step)).values()).backward()


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = build()
    score: Any = 0
    for step in range(4):
        train(model, step)
        answer = incremental_dump(model, score)
        assert answer is not None
        tensors, _ = answer
        assert tensors["model.sparse"].keys() == {"item", "user"}
        assert len(tensors["model.sparse"]["item"][0]) > 0, "every step uses items"
        score = get_score(model)
        assert isinstance(score["model.sparse"]["item"], int) and score["model.sparse"]["user"] == step + 2

    path = f"{folder}/ckpt"
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    unwrapped = model.module
    DynamicEmbDump(path, unwrapped, optim=True)
    again = build()
    DynamicEmbLoad(path, again.module, optim=True)
    again.load_state_dict(model.state_dict())
    one, other = (incremental_dump(m, 0) for m in (model, again))
    assert one is not None and other is not None
    for name, (keys, values) in one[0]["model.sparse"].items():
        assert torch.equal(keys, other[0]["model.sparse"][name][0]), name
        assert torch.equal(values, other[0]["model.sparse"][name][1]), name
    with torch.no_grad():
        vectors = [m.eval()(batch(9)) for m in (model, again)]
    for name, jagged in vectors[0].items():
        assert torch.equal(jagged.values(), vectors[1][name].values()), name
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
