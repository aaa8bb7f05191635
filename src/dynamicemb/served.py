"""Collections over a reader: what `embstore.serving.serving_model` puts in the place of sharded ones.

They take a KeyedJaggedTensor and return what the sharded collection returned, without ranks. Static tables
beside the dynamic ones become a plain TorchRec collection.

Lookups are operators of torch.library: `rows` are numbers of `ServedRows`, one for each output, and
`features` says which of the `count` features of the batch each output reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dynamicemb.enumerations import DynamicEmbPoolingMode
from dynamicemb.routing import averaged
from dynamicemb.variable_batch import expand_variable_batch
from embstore.nn.batch import Pooling
from embstore.nn.served import ServedRows, rows_by_number
from embstore.serving.models import ServedTables


def _spans(lengths: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets (count, samples + 1) of the bags of each feature in the values; lengths (count, samples)."""
    per_feature = lengths.to("cpu", torch.int64).view(count, -1)
    ends = per_feature.reshape(-1).cumsum(0).view(per_feature.shape)
    first = torch.zeros(count, 1, dtype=torch.int64)
    if per_feature.shape[1]:
        first = (ends[:, 0] - per_feature[:, 0]).unsqueeze(1)
    return torch.cat([first, ends], 1), per_feature


@torch.library.custom_op("dynamicemb::serve_bags", mutates_args=())
def serve_bags(
    values: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None,
    rows: Sequence[int],
    features: Sequence[int],
    means: Sequence[bool],
    count: int,
) -> torch.Tensor:
    """(samples, columns of all outputs). Weights of averaged bags are divided by their sum."""
    offsets, per_feature = _spans(lengths, count)
    parts = []
    for number, feature, mean in zip(rows, features, means, strict=True):
        bounds = offsets[feature]
        first, last = int(bounds[0]), int(bounds[-1])
        w = None if weights is None else weights[first:last].float()
        if w is not None and mean:
            w, mean = averaged(w, per_feature[feature]), False
        pooling = Pooling.MEAN if mean else Pooling.SUM
        parts.append(rows_by_number(number).bags(values[first:last], bounds - first, w, pooling))
    return torch.cat(parts, 1)


@serve_bags.register_fake
def _(
    values: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None,
    rows: Sequence[int],
    features: Sequence[int],
    means: Sequence[bool],
    count: int,
) -> torch.Tensor:
    width = sum(rows_by_number(number).dim for number in rows)
    return torch.empty((lengths.shape[0] // count, width), device="cpu")


@torch.library.custom_op("dynamicemb::serve_values", mutates_args=())
def serve_values(
    values: torch.Tensor, lengths: torch.Tensor, rows: Sequence[int], features: Sequence[int], count: int
) -> list[torch.Tensor]:
    """(ids, dim) of each output."""
    offsets, _ = _spans(lengths, count)
    return [
        rows_by_number(number).vectors(values[int(offsets[f, 0]) : int(offsets[f, -1])])
        for number, f in zip(rows, features, strict=True)
    ]


@serve_values.register_fake
def _(
    values: torch.Tensor, lengths: torch.Tensor, rows: Sequence[int], features: Sequence[int], count: int
) -> list[torch.Tensor]:
    context = torch.library.get_ctx()
    return [torch.empty((context.new_dynamic_size(), rows_by_number(n).dim), device="cpu") for n in rows]


@dataclass(eq=False)
class _Output:
    """One feature in one dynamic table."""

    feature: str
    rows: ServedRows
    dtype: torch.dtype
    mean: bool


class _ServedCollection(nn.Module):
    """Base: `names` are the outputs in their order; those without an entry in `dynamic` are of `static`."""

    def __init__(
        self, names: Sequence[str], dynamic: Mapping[str, _Output], static: nn.Module | None
    ) -> None:
        super().__init__()
        self.names, self._dynamic, self.static = list(names), dict(dynamic), static

    def _inputs(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[int], list[int]]:
        """The batch, the rows and the position of the feature of each dynamic output."""
        features = expand_variable_batch(features)
        keys = features.keys()
        missing = [output.feature for output in self._dynamic.values() if output.feature not in keys]
        if missing:
            raise ValueError(f"features should have {missing} but have: {keys}")
        positions = [keys.index(output.feature) for output in self._dynamic.values()]
        return features, [output.rows.number for output in self._dynamic.values()], positions


class ServedEmbeddingBagCollection(_ServedCollection):
    """Stands for a sharded EmbeddingBagCollection."""

    def __init__(self, *arguments: Any, weighted: bool) -> None:
        super().__init__(*arguments)
        self._weighted = weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """(samples, columns) by the names of the outputs."""
        found = {} if self.static is None else self.static(features).to_dict()
        if self._dynamic:
            features, rows, positions = self._inputs(features)
            means = [output.mean for output in self._dynamic.values()]
            weights = features.weights() if self._weighted else None
            pooled = serve_bags(
                features.values(), features.lengths(), weights, rows, positions, means, len(features.keys())
            )
            parts = pooled.split([output.rows.dim for output in self._dynamic.values()], 1)
            for (name, output), part in zip(self._dynamic.items(), parts, strict=True):
                found[name] = part.to(output.dtype)
        values = [found[name] for name in self.names]
        return KeyedTensor(self.names, [part.shape[1] for part in values], torch.cat(values, 1))


class ServedEmbeddingCollection(_ServedCollection):
    """Stands for a sharded EmbeddingCollection."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """A vector for every id, by the names of the outputs."""
        found = {} if self.static is None else self.static(features)
        if self._dynamic:
            features, rows, positions = self._inputs(features)
            count = len(features.keys())
            vectors = serve_values(features.values(), features.lengths(), rows, positions, count)
            lengths = features.lengths().view(count, -1)
            for (name, output), of_name, position in zip(
                self._dynamic.items(), vectors, positions, strict=True
            ):
                found[name] = JaggedTensor(of_name.to(output.dtype), lengths=lengths[position])
        return {name: found[name] for name in self.names}


class ServedBatchedTables(nn.Module):
    """Stands for BatchedDynamicEmbeddingTables."""

    def __init__(
        self,
        rows: Sequence[ServedRows],
        mode: DynamicEmbPoolingMode,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._rows, self._mode, self._dtype, self._device = list(rows), mode, dtype, device

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As BatchedDynamicEmbeddingTables; `rows` has those of each feature."""
        count, lengths = len(self._rows), offsets.diff()
        if lengths.shape[0] % count:
            raise ValueError(
                f"offsets should have samples x {count} features + 1 elements but has: {offsets.shape[0]}"
            )
        numbers, positions = [rows.number for rows in self._rows], list(range(count))
        if self._mode == DynamicEmbPoolingMode.NONE:
            if per_sample_weights is not None:
                raise ValueError("per_sample_weights should be None without pooling")
            out = torch.cat(serve_values(indices, lengths, numbers, positions, count))
        else:
            mean, weights = self._mode == DynamicEmbPoolingMode.MEAN, per_sample_weights
            if weights is not None and mean:  # as FBGEMM: by length, not by weight
                weights, mean = weights / lengths.repeat_interleave(lengths), False
            out = serve_bags(indices, lengths, weights, numbers, positions, [mean] * count, count)
        here = self._device if self._device is not None and indices.device.type == "cpu" else indices.device
        return out.to(here, self._dtype)


# ---- from sharded collections


def served_collection(
    sharded: Any, configs: Sequence[Any], attribute: str, tables: ServedTables, group: Any
) -> Any:
    """What stands for a sharded collection. All ranks call it where it has static tables."""
    names = get_embedding_names_by_table(list(configs))
    outputs: dict[str, _Output] = {}
    static = [config for config in configs if config.name not in sharded.dynamic_tables]
    for config, of_table in zip(configs, names, strict=True):
        if config.name in sharded.dynamic_tables:
            rows = ServedRows(tables.source, tables.name_of(config.name))
            dtype = sharded.output_dtype(config.name)
            mean = getattr(config, "pooling", None) == PoolingType.MEAN
            for name, feature in zip(of_table, config.feature_names, strict=True):
                outputs[name] = _Output(feature, rows, dtype, mean)
    plain = _plain(sharded, static, attribute, group) if static else None
    everything = [name for of_table in names for name in of_table]
    if attribute == "embeddings":
        return ServedEmbeddingCollection(everything, outputs, plain)
    trained = list(sharded._embedding_names)
    return ServedEmbeddingBagCollection(trained, outputs, plain, weighted=bool(sharded._is_weighted))


def _plain(sharded: Any, static: Sequence[Any], attribute: str, group: Any) -> nn.Module:
    made: nn.Module
    if attribute == "embeddings":
        made = EmbeddingCollection(tables=list(static), device=torch.device("cpu"))
    else:
        weighted = bool(sharded._is_weighted)
        made = EmbeddingBagCollection(tables=list(static), is_weighted=weighted, device=torch.device("cpu"))
    state = sharded.state_dict()
    keys = [f"{attribute}.{config.name}.weight" for config in static]
    made.load_state_dict({key: _whole(state[key], group) for key in keys})
    return made


def _whole(weight: Any, group: Any) -> torch.Tensor:
    """A weight of which each rank has some pieces."""
    if isinstance(weight, DTensor):
        whole: torch.Tensor = weight.full_tensor()
        return whole
    if not isinstance(weight, ShardedTensor):
        return weight
    mine = [(s.metadata.shard_offsets, s.tensor.detach().cpu()) for s in weight.local_shards()]
    pieces: list[Any] = [mine]
    if group is not None and group.size() > 1:
        pieces = [None] * group.size()
        dist.all_gather_object(pieces, mine, group=group)
    whole = torch.zeros(weight.size())
    for (row, column), piece in (entry for of_rank in pieces for entry in of_rank):
        whole[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
    return whole
