"""DLRM with 26 dynamic tables over several ranks, on data in Criteo's format.

    torchrun --nproc_per_node 2 examples/dlrm_torchrun.py --data day_0
    torchrun --nproc_per_node 2 examples/dlrm_torchrun.py        # made-up lines of the same format

A line is a label, 13 numbers and 26 categories in hex, between tabs; any of them may be empty. A category is
an id as it stands: nothing is hashed into a fixed number of rows, and an empty one is an empty bag.
"""

import argparse
import itertools
import logging
import math
import random

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.discovery import find_collections
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

DENSE, SPARSE, DIM, SAMPLES = 13, 26, 16, 256
ROWS = {"num_embeddings": 1 << 20, "embedding_dim": DIM}  # the most that are stored; ids may be any
CONFIGS = [EmbeddingBagConfig(name=f"cat_{i}", feature_names=[f"cat_{i}"], **ROWS) for i in range(SPARSE)]


class DLRM(nn.Module):  # bottom MLP, dot products between all vectors, top MLP
    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(tables=CONFIGS, device=torch.device("meta"))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM + (SPARSE + 1) * SPARSE // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        together = torch.cat([bottom[:, None], self.sparse(sparse).values().view(-1, SPARSE, DIM)], 1)
        pairs = torch.tril(torch.ones(SPARSE + 1, SPARSE + 1), -1).bool()
        products = (together @ together.transpose(1, 2))[:, pairs]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def made_up():
    """Endless lines. Few categories are frequent, and three of them decide about the click."""
    while ids := [int(random.random() ** 3 * 4000) for _ in range(SPARSE)]:
        clicked = sum(math.sin(12.9898 * i) for i in ids[:3]) > 0
        categories = [f"{i * 2654435761 % 2**32:08x}" if i else "" for i in ids]
        yield "\t".join([str(int(clicked)), *(str(i % 97) for i in ids[:DENSE]), *categories])


def batches(lines):
    """Numbers, ids and labels of this rank, which takes one of every `world` lines."""
    mine, total = slice(dist.get_rank(), None, dist.get_world_size()), SAMPLES * dist.get_world_size()
    while len(part := list(itertools.islice(lines, total))) == total:
        label, *columns = zip(*(line.rstrip("\n").split("\t") for line in part[mine]))
        dense = [[math.log1p(max(0, int(x or 0))) for x in column] for column in columns[:DENSE]]
        categories = list(itertools.chain(*columns[DENSE:]))
        ids = torch.tensor([int(c, 16) for c in categories if c], dtype=torch.int64)
        lengths = torch.tensor([bool(c) for c in categories], dtype=torch.int32)
        kjt = KeyedJaggedTensor([c.name for c in CONFIGS], ids, lengths=lengths)
        yield torch.tensor(dense).T, kjt, torch.tensor([float(x) for x in label])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="a file in Criteo's format")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec has much to tell
    random.seed(17)
    dist.init_process_group("gloo")
    model, grows = DLRM(), DynamicEmbTableOptions(init_capacity=1024)
    dynamic = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=grows)
    planner = DynamicEmbeddingShardingPlanner(CONFIGS, constraints={c.name: dynamic for c in CONFIGS})
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders = [DynamicEmbeddingBagCollectionSharder(fused_params=fused)]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    adam = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=3e-3)
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    tables = [t.table for c in find_collections(model).values() for t in c.tables.values()]
    lines = open(options.data) if options.data else made_up()  # noqa: SIM115
    for step, (dense, sparse, clicked) in enumerate(itertools.islice(batches(lines), options.steps), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
        adam.zero_grad()
        loss.backward()  # the rows of the tables move in here
        adam.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:4}: loss {loss:.4f}, {sum(map(len, tables)):9,} rows on rank 0", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
