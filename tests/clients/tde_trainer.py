"""A trainer on torchrec_dynamic_embedding: TorchRec tables that hold a few of the ids, the rest on a server;
saves, and a second life of the trainer finds the rows there.

python tde_trainer.py URL        one rank; under torchrun, as many as there are
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv

import torchrec_dynamic_embedding as tde
from torchrec_dynamic_embedding.dataloader import wrap

ROWS, DIM, BATCHES, SAMPLES = 120, 8, 12, 16


class Model(nn.Module):
    def __init__(self, configs: list[torchrec.EmbeddingBagConfig]) -> None:
        super().__init__()
        self.sparse = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, kjt: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse(kjt).values().sum(1).sigmoid()


class Batches:
    """(labels, ids) with far more ids than the tables have rows."""

    def __init__(self, first: int, last: int) -> None:
        self._steps = range(first, last)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torchrec.KeyedJaggedTensor]]:
        for step in self._steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            lengths = torch.randint(0, 3, (2 * SAMPLES,), generator=generator)
            ids = torch.randint(0, 600, (int(lengths.sum()),), generator=generator) * 1_000_003 - (1 << 40)
            labels = torch.rand(SAMPLES, generator=generator)
            yield labels, torchrec.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)


def build(configs: list[torchrec.EmbeddingBagConfig]) -> DistributedModelParallel:
    torch.manual_seed(3)
    model, world = Model(configs), dist.get_world_size()
    sharders: Any = [
        EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.5})
    ]
    table_wise = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={config.name: table_wise for config in configs},
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(group),
        plan=planner.collective_plan(model, sharders, group),
        sharders=sharders,
    )


def train(model: Any, loader: Any) -> list[float]:
    losses = []
    for labels, kjt in loader:
        assert kjt.values().numel() == 0 or 0 <= int(kjt.values().min()) <= int(kjt.values().max()) < ROWS
        loss = ((model(kjt) - labels) ** 2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def main(url: str) -> None:
    dist.init_process_group("gloo")
    configs = [
        torchrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
        for f in ("user", "item")
    ]
    model = build(configs)
    loader = tde.wrap(url, Batches(0, BATCHES), model, {"sparse": configs}, num_prefetch=2)
    assert len(loader) == BATCHES
    losses = train(model, loader)
    assert len(losses) == BATCHES
    tde.save(model)
    dist.barrier()

    # An uninterrupted twin on a prefix of its own.
    twin = build(configs)
    whole = train(twin, tde.wrap(f"{url}-twin", Batches(0, 2 * BATCHES), twin, {"sparse": configs}))
    assert whole[:BATCHES] == losses

    again = build(configs)
    loader, same = wrap(
        url,
        Batches(BATCHES, 2 * BATCHES),
        again,
        {"sparse": configs},
        data_info={1: "sparse"},
        eviction_config={"type": "mixed_lru_lfu", "min_used_freq_power": 5},
        transform_config={"type": "naive"},
        ps_config={"chunk_size": 1 << 20},
        parallel=False,
        return_module=True,
    )
    assert same is again
    assert train(again, loader) == whole[BATCHES:], "rows and states came back from the server"
    tde.save(again)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
