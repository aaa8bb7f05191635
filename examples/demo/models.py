"""A click model under TorchRec's DistributedModelParallel, with dynamic or static tables."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.discovery import find_collections
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder
from examples.click_stream import ADAGRAD_LR, DIM
from examples.demo.sources import Batch

INITIAL = 0.05  # new vectors are uniform between -INITIAL and INITIAL


class ClickModel(nn.Module):
    """Dot products of all pairs of vectors, and a small network beside them."""

    def __init__(self, sparse: EmbeddingBagCollection, features: int, numbers: int) -> None:
        super().__init__()
        self.sparse, self.features = sparse, features
        self.top = nn.Sequential(nn.Linear(features * DIM + numbers, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor, numbers: torch.Tensor) -> torch.Tensor:
        vectors = self.sparse(ids).values()
        each = vectors.view(len(vectors), self.features, DIM)
        pairs = (each.sum(1).square().sum(1) - each.square().sum((1, 2))) / 2
        return pairs + self.top(torch.cat([vectors, numbers], 1)).squeeze(1)


class Trainer:
    """The model with its optimizers, on this rank.

    names    of the features, each with a table of its own
    numbers  how many numbers a sample has beside its ids
    rows     of each table, on all ranks together
    hashed   False: dynamic tables. True: static ones, in which an id has the row id % rows
    """

    def __init__(self, names: tuple[str, ...], numbers: int, rows: int, hashed: bool = False) -> None:
        self.names, self.modulus = names, rows if hashed else 0
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                weight_init_min=-INITIAL,
                weight_init_max=INITIAL,
            )
            for name in names
        ]
        options = DynamicEmbTableOptions(
            init_capacity=min(1024, rows // dist.get_world_size()),
            score_strategy=DynamicEmbScoreStrategy.STEP,
            initializer_args=DynamicEmbInitializerArgs(
                mode=DynamicEmbInitializerMode.UNIFORM, lower=-INITIAL, upper=INITIAL
            ),
        )
        constraint = (
            DynamicEmbParameterConstraints()
            if hashed
            else DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
        )
        torch.manual_seed(0)  # the same first weights on all ranks and in all models
        plain = ClickModel(EmbeddingBagCollection(configs, device=torch.device("meta")), len(names), numbers)
        fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": ADAGRAD_LR, "eps": 1e-10}
        sharders = [DynamicEmbeddingBagCollectionSharder(fused)]
        planner = DynamicEmbeddingShardingPlanner(configs, constraints={name: constraint for name in names})
        plan = planner.collective_plan(plain, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(plain, device=torch.device("cpu"), plan=plan, sharders=sharders)
        self.top = plain.top
        self.adam = torch.optim.Adam(self.top.parameters(), lr=1e-3)
        self.collections = find_collections(self.model)
        self.dynamic = [t for c in self.collections.values() for t in c.tables.values()]

    @property
    def bytes(self) -> int:
        """Of the tables on this rank."""
        return sum(t.table.stats().bytes for t in self.dynamic)

    def step(self, batch: Batch) -> np.ndarray:
        """Predicts this rank's part of a batch, then learns from it. Returns the predictions."""
        part = slice(dist.get_rank(), None, dist.get_world_size())
        ids, numbers, clicks = batch[0][:, part], batch[1][part], batch[2][part]
        values = np.ascontiguousarray(ids % self.modulus if self.modulus else ids).reshape(-1)
        lengths = torch.ones(len(values), dtype=torch.int32)
        kjt = KeyedJaggedTensor(list(self.names), torch.from_numpy(values), lengths=lengths)
        logits = self.model(kjt, torch.from_numpy(numbers))
        self.adam.zero_grad()
        # the rows of the tables move in backward
        nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(clicks)).backward()
        self.adam.step()
        return logits.detach().numpy()

    def checksum(self) -> str:
        """Of all rows of all ranks: keys, vectors and optimizer states."""
        digest = hashlib.sha256()
        for dynamic in self.dynamic:
            rows = dynamic.table.rows()
            order = np.argsort(rows.keys)
            for part in (rows.keys, rows.values, rows.states):
                digest.update(part[order].tobytes())
        parts = [""] * dist.get_world_size()
        dist.all_gather_object(parts, digest.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()
