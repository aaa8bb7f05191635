"""Models, batches and plans for the tests: a wrapped model and its static twin with room for all ids."""

import logging
import warnings
from dataclasses import dataclass

warnings.filterwarnings("ignore")
logging.getLogger("torchrec").setLevel(logging.ERROR)  # TorchRec's planner says a lot

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torch import nn  # noqa: E402
from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.types import ParameterConstraints  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402
from torchrec.modules.embedding_configs import DataType  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

from embstore import Uniform  # noqa: E402

DIM, LR, EPS = 8, 0.25, 0.5  # eps: see tolerances.py
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
TABLES = {"user": ["user"], "item": ["clicked", "shown"]}  # one of them serves two features
FEATURES = ["user", "clicked", "shown"]


class BagSharder(EmbeddingBagCollectionSharder):
    """TorchRec offers row_wise bags for cuda only, though they run on the CPU."""

    def sharding_types(self, compute_device_type):
        return [*super().sharding_types(compute_device_type), "row_wise"]


@dataclass
class Trainer:
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    configs: list

    def step(self, kjt, label):
        """One step; the loss of this rank."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(kjt)[:, 0], label)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Model(nn.Module):
    def __init__(self, kind, configs):
        super().__init__()
        self.kind = kind
        collection = EmbeddingCollection if kind == "ec" else EmbeddingBagCollection
        self.emb = collection(tables=configs, device=torch.device("meta"))
        self.dense = nn.Linear(len(FEATURES) * DIM, 1)

    def forward(self, kjt):
        out = self.emb(kjt)
        if self.kind == "ebc":
            return self.dense(out.values().float())
        pooled = [
            torch.segment_reduce(
                out[f].values().float(), "sum", lengths=out[f].lengths(), unsafe=True, initial=0.0
            )
            for f in FEATURES
        ]
        return self.dense(torch.cat(pooled, 1))


def trainer(rows, kind="ebc", sharding="row_wise", optimizer="adagrad", dtype=DataType.FP32):
    """A sharded model whose tables have `rows` rows each."""
    config = EmbeddingConfig if kind == "ec" else EmbeddingBagConfig
    configs = [
        config(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=features,
            data_type=dtype,
            weight_init_min=-0.5,
            weight_init_max=0.5,
        )
        for name, features in TABLES.items()
    ]
    torch.manual_seed(3)
    model = Model(kind, configs)
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": LR, "eps": EPS}
    sharders = [EmbeddingCollectionSharder(fused_params=fused), BagSharder(fused_params=fused)]
    constraint = ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"], min_partition=4)
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={name: constraint for name in TABLES},
        batch_size=16,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    dmp = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=plan,
        sharders=sharders,
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=LR)
    )
    return Trainer(dmp, CombinedOptimizer([dmp.fused_optimizer, dense]), configs)


def scattered(numbers):
    """Distinct ids of all kinds: negative ones, some beyond 32 bits, INT64_MIN among them."""
    spread = numbers * np.int64(0x9E3779B97F4A7C1) - np.int64(1 << 40)
    return np.where(numbers == 0, np.iinfo(np.int64).min, spread)


def batches(count, ids, size=8, rank=0, seed=0, longest=3):
    """(label, row numbers) of `count` batches; of all numbers the low ones come more often."""
    rng = np.random.default_rng(1000 * seed + rank)
    found = []
    for _ in range(count):
        lengths = rng.integers(0, longest + 1, len(FEATURES) * size)
        numbers = (ids * rng.random(int(lengths.sum())) ** 2).astype(np.int64)
        found.append(
            (torch.from_numpy(rng.random(size, dtype=np.float32)), numbers, torch.from_numpy(lengths))
        )
    return found


def kjt(numbers, lengths, of=scattered):
    return KeyedJaggedTensor(keys=FEATURES, values=torch.from_numpy(of(numbers)), lengths=lengths)


def fill(twin, ids, table_prefix="emb"):
    """Gives row r of the static twin the vector that the id scattered(r) begins with."""
    for key, weight in twin.model.state_dict().items():
        if not key.startswith("emb."):
            continue
        name = key.split(".")[-2]
        rows = Uniform(-0.5, 0.5).rows(scattered(np.arange(ids)), DIM, table=f"{table_prefix}.{name}")
        for shard in weight.local_shards():
            (row, column), (count, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            part = torch.from_numpy(rows[row : row + count, column : column + width])
            shard.tensor[: len(part)].copy_(part)


def full_weights(trainer_):
    """name -> (rows, dim) of every table, on every rank."""
    found = {}
    for key, weight in trainer_.model.state_dict().items():
        if key.startswith("emb."):
            whole = torch.zeros(weight.metadata().size)
            for shard in weight.local_shards():
                (row, column), (count, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole[row : row + count, column : column + width] = shard.tensor.detach().float()
            dist.all_reduce(whole)
            found[key.split(".")[-2]] = whole
    return found
