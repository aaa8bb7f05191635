"""Small TorchRec models for tests: one collection (or two), dynamic or static, over the current ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType

from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbTableOptions
from dynamicemb.discovery import find_collections
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
CONSTANT = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.25)


@dataclass(frozen=True)
class Spec:
    """One table. `options` are for DynamicEmbTableOptions; None makes the table static."""

    name: str
    features: tuple[str, ...]
    dim: int = 8
    rows: int = 1024
    mean: bool = False
    dtype: DataType = DataType.FP32
    options: Mapping[str, Any] | None = field(default_factory=dict)
    sharding: str = ShardingType.ROW_WISE.value

    def config(self, kind: str) -> Any:
        common = {
            "name": self.name,
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": list(self.features),
            "data_type": self.dtype,
            # a static table begins where CONSTANT does
            "init_fn": lambda weight: nn.init.constant_(weight, CONSTANT.value),
        }
        if kind == "ec":
            return EmbeddingConfig(**common)
        return EmbeddingBagConfig(**common, pooling=PoolingType.MEAN if self.mean else PoolingType.SUM)

    def constraint(self) -> DynamicEmbParameterConstraints:
        if self.options is None:
            return DynamicEmbParameterConstraints(
                sharding_types=[self.sharding],
                compute_kernels=[
                    EmbeddingComputeKernel.DENSE.value
                    if self.sharding == ShardingType.DATA_PARALLEL.value
                    else EmbeddingComputeKernel.FUSED.value
                ],
            )
        options = {"initializer_args": CONSTANT, **self.options}
        return DynamicEmbParameterConstraints(
            sharding_types=[self.sharding],
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(**options),
        )


def sharders(
    fused_params: Mapping[str, Any] | None = None,
    dedup: bool = False,
    codecs: dict[str, Any] | None = None,
) -> list[Any]:
    params = dict(SGD if fused_params is None else fused_params)
    return [
        DynamicEmbeddingCollectionSharder(
            fused_params=params, use_index_dedup=dedup, qcomm_codecs_registry=codecs
        ),
        DynamicEmbeddingBagCollectionSharder(fused_params=params, qcomm_codecs_registry=codecs),
    ]


def collection(kind: str, specs: Sequence[Spec], weighted: bool = False, device: str = "meta") -> nn.Module:
    configs = [spec.config(kind) for spec in specs]
    if kind == "ec":
        return EmbeddingCollection(tables=configs, device=torch.device(device))
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))


def topology() -> Topology:
    world = dist.get_world_size()
    return Topology(world_size=world, local_world_size=world, compute_device="cpu")


def shard(
    model: nn.Module,
    specs: Sequence[Spec],
    kind: str,
    fused_params: Mapping[str, Any] | None = None,
    dedup: bool = False,
    codecs: dict[str, Any] | None = None,
) -> DistributedModelParallel:
    """The model as DMP; `specs` are those of all its collections."""
    planner = DynamicEmbeddingShardingPlanner(
        [spec.config(kind) for spec in specs],
        topology=topology(),
        constraints={spec.name: spec.constraint() for spec in specs},
        debug=False,
    )
    all_sharders = sharders(fused_params, dedup, codecs)
    return DistributedModelParallel(
        module=model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=planner.collective_plan(model, all_sharders, dist.group.WORLD),
        sharders=all_sharders,
    )


def dmp(
    kind: str,
    specs: Sequence[Spec],
    fused_params: Mapping[str, Any] | None = None,
    *,
    dedup: bool = False,
    weighted: bool = False,
    codecs: dict[str, Any] | None = None,
) -> DistributedModelParallel:
    return shard(collection(kind, specs, weighted), specs, kind, fused_params, dedup, codecs)


def jagged(
    features: Sequence[str],
    samples: int,
    seed: int,
    *,
    ids: int = 40,
    longest: int = 4,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """A batch with duplicates and empty bags, a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(features) * samples,), generator=generator)
    n = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.randint(0, ids, (n,), generator=generator),
        lengths=lengths,
        weights=torch.rand(n, generator=generator) + 0.5 if weighted else None,
    )


def part(batch: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    """Samples [first, last) of a batch."""
    stride, keys = batch.stride(), batch.keys()
    lengths = batch.lengths().view(len(keys), stride)
    offsets = batch.offsets()
    spans = [(int(offsets[f * stride + first]), int(offsets[f * stride + last])) for f in range(len(keys))]
    weights = batch.weights_or_none()
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([batch.values()[a:b] for a, b in spans]),
        lengths=lengths[:, first:last].reshape(-1),
        weights=None if weights is None else torch.cat([weights[a:b] for a, b in spans]),
        stride=last - first,
    )


def share(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The part of this rank of a global batch, in even parts."""
    world, rank, samples = dist.get_world_size(), dist.get_rank(), batch.stride()
    return part(batch, samples * rank // world, samples * (rank + 1) // world)


def outputs(answer: Any) -> dict[str, torch.Tensor]:
    """The vectors by feature, of either kind of collection."""
    if hasattr(answer, "to_dict"):
        return dict(answer.to_dict())
    return {name: jagged_tensor.values() for name, jagged_tensor in answer.items()}


def loss_of(answer: Any) -> torch.Tensor:
    """A loss whose gradients differ by feature, sample and column."""
    total = torch.zeros(())
    for number, vectors in enumerate(outputs(answer).values(), start=1):
        columns = torch.arange(1, vectors.shape[1] + 1) / vectors.shape[1]
        total = total + (number * columns * torch.sin(vectors.float() + columns)).sum()
    return total


def tables(model: nn.Module) -> dict[str, Any]:
    """Every dynamic table of the model on this rank, by name."""
    return {name: t.table for c in find_collections(model).values() for name, t in c.tables.items()}


def rows(model: nn.Module) -> dict[str, dict[int, list[float]]]:
    """Every stored row of this rank: table -> key -> embedding."""
    found = {}
    for name, table in tables(model).items():
        stored = table.rows()
        found[name] = {int(k): v.tolist() for k, v in zip(stored.keys, stored.values, strict=True)}
    return found


def all_rows(parts: Sequence[Mapping[str, Mapping[int, list[float]]]]) -> dict[str, dict[int, list[float]]]:
    """The rows of all ranks together; no key may be on two of them."""
    whole: dict[str, dict[int, list[float]]] = {}
    for of_rank in parts:
        for name, of_table in of_rank.items():
            target = whole.setdefault(name, {})
            assert not target.keys() & of_table.keys(), "a key should have one owner"
            target.update(of_table)
    return whole
