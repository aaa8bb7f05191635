"""TorchEasyRec's use of dynamicemb: its imports, its patches, a plan of its own, training, save, export by
reading files, restore, a dump written by hand, and a delta read by key.

python dynamicemb_torcheasyrec.py FOLDER        one rank; under torchrun, as many as there are
"""

from __future__ import annotations

import copy
import glob
import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ShardingPlan

has_dynamicemb = False
try:
    import dynamicemb
    from dynamicemb import (
        DynamicEmbInitializerArgs,
        DynamicEmbInitializerMode,
        DynamicEmbScoreStrategy,
        FrequencyAdmissionStrategy,
        KVCounter,
        align_to_table_size,
    )
    from dynamicemb.dynamicemb_config import DynamicEmbKernel
    from dynamicemb.planner import DynamicEmbParameterConstraints, DynamicEmbParameterSharding
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
    from dynamicemb.shard.embedding import DynamicEmbeddingCollectionContext

    has_dynamicemb = True
except Exception:
    pass
assert has_dynamicemb, "one name is missing, and the client believes that dynamicemb is not installed"

from dynamicemb.batched_dynamicemb_tables import (  # noqa: E402
    encode_checkpoint_file_path,
    encode_meta_json_file_path,
)
from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad, get_dynamic_emb_module  # noqa: E402
from dynamicemb.incremental_dump import incremental_dump  # noqa: E402
from dynamicemb.types import CopyMode  # noqa: E402

ROWS, DIM, STEPS = 1000, 8, 4


def _init_context(
    self: Any,
    sharding_contexts: Any = None,
    input_features: Any = None,
    reverse_indices: Any = None,
    seq_vbe_ctx: Any = None,
    frequency_counters: Any = None,
) -> None:
    super(DynamicEmbeddingCollectionContext, self).__init__(
        sharding_contexts or [], input_features or [], reverse_indices or [], seq_vbe_ctx or []
    )
    self.frequency_counters = frequency_counters or []


def patch() -> None:
    DynamicEmbeddingCollectionContext.__init__ = _init_context
    for sharder in (DynamicEmbeddingCollectionSharder, DynamicEmbeddingBagCollectionSharder):

        def compute_kernels(self: Any, sharding_type: str, device: str, sharder: Any = sharder) -> list[str]:
            kernels = list(super(sharder, self).compute_kernels(sharding_type, device))
            return [*kernels, EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value] if device == "cuda" else kernels

        sharder.compute_kernels = compute_kernels


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        bag = torchrec.EmbeddingBagConfig(
            name="user", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user_id"]
        )
        sequence = torchrec.EmbeddingConfig(
            name="click", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["clicks"]
        )
        self.ebc = torchrec.EmbeddingBagCollection(tables=[bag], device=meta)
        self.ec = torchrec.EmbeddingCollection(tables=[sequence], device=meta)

    def forward(self, batch: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        clicks = self.ec(batch)["clicks"].values()
        return self.ebc(batch).values().tanh().sum() + (clicks * clicks).sum()


def constraints(world: int) -> Any:
    """What the configuration of a feature becomes."""
    options = dynamicemb.DynamicEmbTableOptions(
        max_capacity=ROWS,
        init_capacity=align_to_table_size(64),
        initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.1),
        eval_initializer_args=DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.0),
        score_strategy=DynamicEmbScoreStrategy.STEP,
        admit_strategy=FrequencyAdmissionStrategy(threshold=2),
        admission_counter=KVCounter(capacity=align_to_table_size(int(ROWS / world)), bucket_capacity=1024),
    )
    return DynamicEmbParameterConstraints(
        use_dynamicemb=True,
        sharding_types=["row_wise"],
        compute_kernels=["customized_kernel"],
        dynamicemb_options=options,
        cache_params=(CacheParams(load_factor=0.5),),
    )


def build() -> DistributedModelParallel:
    world = dist.get_world_size()
    model = Model()
    for collection in (model.ebc, model.ec):
        apply_optimizer_in_backward(torchrec.optim.Adam, collection.parameters(), {"lr": 0.05})
    rows = -(-ROWS // world)

    def entry() -> DynamicEmbParameterSharding:
        options = copy.deepcopy(constraints(world).dynamicemb_options)
        options.caching = False
        options.training, options.local_hbm_for_values = True, 0.5 * ROWS
        options.dim, options.max_capacity = DIM, rows
        options.embedding_dtype, options.index_type = torch.float32, torch.int64
        shards = [ShardMetadata([r * rows, 0], [rows, DIM], f"rank:{r}/cpu") for r in range(world)]
        return DynamicEmbParameterSharding(
            sharding_spec=EnumerableShardingSpec(shards),
            sharding_type="row_wise",
            ranks=list(range(world)),
            compute_kernel="customized_kernel",
            customized_compute_kernel=DynamicEmbKernel,
            dist_type="roundrobin",
            dynamicemb_options=options,
        )

    plan = {
        "ebc": EmbeddingModuleShardingPlan({"user": entry()}),
        "ec": EmbeddingModuleShardingPlan({"click": entry()}),
    }
    sharders: Any = [DynamicEmbeddingBagCollectionSharder(), DynamicEmbeddingCollectionSharder()]
    ours = {sharder.module_type for sharder in sharders}
    sharders += [sharder for sharder in get_default_sharders() if sharder.module_type not in ours]
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders
    )


def batch(step: int) -> torchrec.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (2 * 17,), generator=generator)
    ids = torch.randint(-40, 40, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(["user_id", "clicks"], ids, lengths=lengths)


def rows_of(model: Any) -> dict[str, dict[int, list[float]]]:
    answer = incremental_dump(model, 0)
    assert answer is not None
    tables = {name: found for tables in answer[0].values() for name, found in tables.items()}
    return {name: dict(zip(k.tolist(), v.tolist(), strict=True)) for name, (k, v) in tables.items()}


def exported(folder: str) -> dict[str, dict[int, list[float]]]:
    """As the exporter reads a checkpoint: by globbing and numpy alone."""
    found: dict[str, dict[int, list[float]]] = {}
    for keys_file in glob.glob(f"{folder}/*/*_emb_keys.rank_*.world_size_*"):
        name = os.path.basename(keys_file).split("_emb_keys")[0]
        keys = np.fromfile(keys_file, np.int64)
        values = np.fromfile(keys_file.replace("_emb_keys", "_emb_values"), np.float32).reshape(-1, DIM)
        scores = np.fromfile(keys_file.replace("_emb_keys", "_emb_scores"), np.int64)
        assert len(keys) == len(values) == len(scores)
        found.setdefault(name, {}).update(zip(keys.tolist(), values.tolist(), strict=True))
    return found


def write_by_hand(folder: str) -> None:
    for path, name in (("model.ebc", "user"), ("model.ec", "click")):
        root = f"{folder}/{path}"
        os.makedirs(root)
        keys = np.array([5, -7, 1 << 60], np.int64)
        keys.tofile(encode_checkpoint_file_path(root, name, 0, 1, "keys"))
        np.full((3, DIM), 0.75, np.float32).tofile(encode_checkpoint_file_path(root, name, 0, 1, "values"))
        np.zeros(3, np.int64).tofile(encode_checkpoint_file_path(root, name, 0, 1, "scores"))
        with open(encode_meta_json_file_path(root, name), "w") as file:
            json.dump({}, file)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    patch()
    model = build()
    for step in range(STEPS):
        model(batch(step)).backward()
    trained = rows_of(model)
    assert trained["user"] and trained["click"]

    checkpoint = f"{folder}/model.ckpt-{STEPS}/dynamicemb"
    DynamicEmbDump(checkpoint, model, optim=True, counter=True)
    assert exported(checkpoint) == trained

    again = build()
    assert os.path.exists(checkpoint)
    DynamicEmbLoad(checkpoint, again, table_names=None, optim=True, counter=True)
    assert rows_of(again) == trained
    for twin in (model, again):
        for step in range(STEPS, 2 * STEPS):
            twin(batch(step)).backward()
    assert rows_of(again) == rows_of(model), "states and counts came back too"

    if dist.get_rank() == 0:
        write_by_hand(f"{folder}/by_hand")
    dist.barrier()
    tuned = build()
    DynamicEmbLoad(f"{folder}/by_hand", tuned, optim=False, counter=True)
    assert rows_of(tuned)["user"] == {key: [0.75] * DIM for key in (5, -7, 1 << 60)}

    now = rows_of(model)
    for module in get_dynamic_emb_module(model):
        module.flush()
        (name,) = module.table_names
        number = module.table_names.index(name)
        ids = torch.tensor([k for k in now[name] if k % dist.get_world_size() == dist.get_rank()])
        _, _, _, _, _, found, _, values = module.tables.find(
            ids, torch.full_like(ids, number), CopyMode.EMBEDDING
        )
        assert found.all() and values.shape == (len(ids), module._dynamicemb_options[number].dim)
        assert values.tolist() == [now[name][key] for key in ids.tolist()]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
