"""DLRM with dynamic tables over several ranks, on a stream whose ids never stop coming.

    torchrun --nproc_per_node 2 examples/dlrm_torchrun.py
    torchrun --nproc_per_node 4 examples/dlrm_torchrun.py --steps 200 --samples 512

A click model of the DLRM shape: 13 numbers and 26 categorical features a sample, each feature with a dynamic
table of its own. Ids are any 64-bit numbers; every step brings some that nobody has seen. One line of the
output is one stretch of training; the last lines show where the rows live and that evaluation stores nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.discovery import find_collections
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

DENSE, SPARSE, DIM = 13, 26, 16
FEATURES = [f"cat_{i}" for i in range(SPARSE)]
OLD_IDS = 4_000  # ids that come again and again
NEW_SHARE = 0.02  # of the ids are new


class DLRM(nn.Module):
    """Bottom MLP, dot products between all vectors, top MLP."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = (SPARSE + 1) * SPARSE // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("rows", torch.tril_indices(SPARSE + 1, SPARSE + 1, -1)[0], persistent=False)
        self.register_buffer("columns", torch.tril_indices(SPARSE + 1, SPARSE + 1, -1)[1], persistent=False)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = self.sparse(sparse).values().view(-1, SPARSE, DIM)
        together = torch.cat([bottom[:, None], vectors], 1)
        products = torch.bmm(together, together.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


class Clicks:
    """An endless stream. Whether a sample is clicked depends on its ids, so there is something to learn."""

    def __init__(self, samples: int, rank: int, world: int) -> None:
        self.samples = samples
        self.random = torch.Generator().manual_seed(17 + rank)
        self.new_ids = 1 + rank  # every rank has new ids of its own
        self.world = world

    def next(self) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
        shape = (SPARSE, self.samples)
        # squares of uniform numbers: a few ids are frequent, most are rare
        numbers = (torch.rand(shape, generator=self.random).square() * OLD_IDS).long()
        ids = numbers * 0x5DEECE66D + torch.arange(SPARSE)[:, None] * 1_000_003
        new = torch.rand(shape, generator=self.random) < NEW_SHARE
        count = int(new.sum())
        ids[new] = -torch.arange(self.new_ids, self.new_ids + count * self.world, self.world)
        self.new_ids += count * self.world
        dense = torch.rand(self.samples, DENSE, generator=self.random)
        taste = torch.sin(numbers.double() * 12.9898).float().mul(~new).mean(0) * 12
        clicked = (taste + dense[:, 0] - 0.5 > 0).float()
        lengths = torch.ones(SPARSE * self.samples, dtype=torch.int32)
        return dense, KeyedJaggedTensor(FEATURES, ids.reshape(-1), lengths=lengths), clicked


def build(rank: int, world: int) -> DistributedModelParallel:
    configs = [
        EmbeddingBagConfig(name=f"t_{f}", num_embeddings=100_000, embedding_dim=DIM, feature_names=[f])
        for f in FEATURES
    ]
    model = DLRM(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    constraints = {
        config.name: DynamicEmbParameterConstraints(
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(
                init_capacity=1024, score_strategy=DynamicEmbScoreStrategy.STEP
            ),
        )
        for config in configs
    }
    planner = DynamicEmbeddingShardingPlanner(configs, constraints=constraints, debug=False)
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    sharders = [DynamicEmbeddingBagCollectionSharder(fused_params=fused_params)]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if rank == 0:
        rows = planner.planned["t_cat_0"].max_capacity
        print(f"{SPARSE} dynamic tables of dim {DIM} over {world} ranks, up to {rows:,} rows each on a rank")
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def rows_of(model: nn.Module) -> int:
    return sum(len(t.table) for c in find_collections(model).values() for t in c.tables.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples", type=int, default=256, help="of each rank in a step")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec's planner has much to tell
    warnings.filterwarnings("ignore", module="torch")

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build(rank, world)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: torch.optim.Adam(p, lr=3e-3)
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    clicks, loss_function = Clicks(arguments.samples, rank, world), nn.BCEWithLogitsLoss()

    losses = []
    for step in range(1, arguments.steps + 1):
        dense_part, sparse_part, clicked = clicks.next()
        optimizer.zero_grad()
        loss = loss_function(model(dense_part, sparse_part), clicked)
        loss.backward()  # the rows of the tables move in here
        optimizer.step()  # moves the dense layers
        losses.append(loss.item())
        if step % max(1, arguments.steps // 6) == 0:
            numbers = torch.tensor([sum(losses) / len(losses) / world, float(rows_of(model))])
            dist.all_reduce(numbers)
            losses = []
            if rank == 0:
                print(f"step {step:4}: loss {numbers[0]:.4f}, {int(numbers[1]):9,} rows stored")

    model.eval()
    before = rows_of(model)
    with torch.no_grad():
        probabilities = torch.sigmoid(model(*clicks.next()[:2]))
    assert rows_of(model) == before, "evaluation should store nothing"
    counts = [0] * world
    dist.all_gather_object(counts, before)
    if rank == 0:
        print("rows on each rank: " + ", ".join(f"{n:,}" for n in counts))
        print(f"evaluation of ids that nobody has seen: mean {probabilities.mean():.3f}, nothing was stored")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
