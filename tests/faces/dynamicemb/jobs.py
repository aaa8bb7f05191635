"""What the ranks of the tests do. Every function runs on each rank and returns something small."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from faces.dynamicemb.models import Spec, dmp, jagged, loss_of, outputs, rows, share, tables


def _features(specs: Sequence[Spec]) -> list[str]:
    return list(dict.fromkeys(feature for spec in specs for feature in spec.features))


def train(
    kind: str,
    specs: Sequence[Spec],
    fused_params: Mapping[str, Any] | None = None,
    *,
    dedup: bool = False,
    weighted: bool = False,
    steps: int = 10,
    samples: int = 12,
    ids: int = 40,
    batches: Any = None,
) -> dict[str, Any]:
    """Trains on the same global batches whatever the number of ranks; returns outputs and rows."""
    model = dmp(kind, specs, fused_params, dedup=dedup, weighted=weighted)
    features, answers = _features(specs), []
    for step in range(steps):
        batch = share(
            jagged(features, samples, step, ids=ids, weighted=weighted) if batches is None else batches[step]
        )
        answer = model(batch)
        answers.append({name: v.detach().clone() for name, v in outputs(answer).items()})
        # the mean over ranks that TorchRec takes of sharded gradients becomes a sum again
        (loss_of(answer) * dist.get_world_size()).backward()
    return {"answers": answers, "rows": rows(model), "static": static_rows(model)}


def static_rows(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of static tables on this rank, with their first row."""
    found = {}
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for piece in value.local_shards():
                found[key.split(".")[-2]] = (piece.metadata.shard_offsets[0], piece.tensor.detach().clone())
    return found
