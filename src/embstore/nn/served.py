"""Native modules over a reader: what `embstore.serving.serving_model` puts in the place of tables.

    serve(keys, rows)                           (n, dim)
    serve_bags(keys, offsets, weights, rows)    (bags, dim)

Both are operators of torch.library, so that torch.export takes a serving model: `rows` is the number of a
`ServedRows` of this process.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from embstore.nn.bags import bag_inputs
from embstore.nn.batch import Pooling, as_key_tensor
from embstore.nn.features import present

if TYPE_CHECKING:
    from embstore.serving.models import ServedTables, Source

_numbers = itertools.count(1)
_rows: weakref.WeakValueDictionary[int, ServedRows] = weakref.WeakValueDictionary()


class ServedRows:
    """A table of a reader, known to graphs by its number."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name
        state = source.state
        self.dim = int(state.tables[state.names[name]].dim)
        self.number = next(_numbers)
        _rows[self.number] = self

    def __deepcopy__(self, memo: object) -> ServedRows:
        return self

    def vectors(self, keys: torch.Tensor) -> torch.Tensor:
        """(n, dim) float32 of keys (n)."""
        vectors: torch.Tensor = self.source.state.find(self.name, keys)[0]
        return vectors

    def bags(
        self, keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, pooling: Pooling
    ) -> torch.Tensor:
        """(bags, dim) float32."""
        pooled: torch.Tensor = self.source.state.bags(
            self.name, keys, offsets, weights=weights, mode=pooling.name.lower()
        )
        return pooled


def rows_by_number(number: int) -> ServedRows:
    rows = _rows.get(number)
    if rows is None:
        raise RuntimeError("an exported lookup needs its serving model, which is gone")
    return rows


@torch.library.custom_op("embstore::serve", mutates_args=())
def serve(keys: torch.Tensor, rows: int) -> torch.Tensor:
    return rows_by_number(rows).vectors(keys)


@serve.register_fake
def _(keys: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty((keys.shape[0], rows_by_number(rows).dim), device="cpu")


@torch.library.custom_op("embstore::serve_bags", mutates_args=())
def serve_bags(
    keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, rows: int, pooling: int
) -> torch.Tensor:
    return rows_by_number(rows).bags(keys, offsets, weights, Pooling(pooling))


@serve_bags.register_fake
def _(
    keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, rows: int, pooling: int
) -> torch.Tensor:
    return torch.empty((offsets.shape[0] - 1, rows_by_number(rows).dim), device="cpu")


class _Served(nn.Module):
    """Base: the tables of a native module. features: the table of each; dtypes: of the vectors."""

    def __init__(self, features: Mapping[str, str], dtypes: Mapping[str, torch.dtype], tables: ServedTables):
        super().__init__()
        self.features = dict(features)
        self._dtypes = dict(dtypes)
        self._rows = {name: ServedRows(tables.source, tables.name_of(name)) for name in dtypes}

    def _vectors(self, feature: str, ids: torch.Tensor) -> torch.Tensor:
        table = self.features[feature]
        rows = self._rows[table]
        vectors: torch.Tensor = serve(as_key_tensor(ids, feature), rows.number)
        return vectors.view(*ids.shape, rows.dim).to(ids.device, self._dtypes[table])

    def _bags(self, feature: str, ids: torch.Tensor, bags: Any) -> torch.Tensor:
        keys, offsets, weights, pooling = bags
        table = self.features[feature]
        pooled: torch.Tensor = serve_bags(keys, offsets, weights, self._rows[table].number, int(pooling))
        return pooled.to(ids.device, self._dtypes[table])


class ServedEmbedding(_Served):
    """Stands for `Embedding`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (feature,) = self.features
        return self._vectors(feature, ids)


class ServedEmbeddingBag(_Served):
    """Stands for `EmbeddingBag`."""

    def __init__(self, *arguments: Any, mode: str, include_last_offset: bool) -> None:
        super().__init__(*arguments)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (feature,) = self.features
        bags = bag_inputs(ids, offsets, per_sample_weights, self.mode, include_last=self.include_last_offset)
        return self._bags(feature, ids, bags)


class ServedEmbeddingCollection(_Served):
    """Stands for `EmbeddingCollection`."""

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            feature: self._vectors(feature, inputs[feature]) for feature in present(self.features, inputs)
        }


class ServedEmbeddingBagCollection(_Served):
    """Stands for `EmbeddingBagCollection`."""

    def __init__(self, *arguments: Any, mode: str) -> None:
        super().__init__(*arguments)
        self.mode = mode

    def forward(self, inputs: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        answers = {}
        for feature in present(self.features, inputs):
            ids, offsets, weights = (*inputs[feature], None, None)[:3]
            if ids is None:
                raise TypeError(f"ids of {feature!r} should be a tensor but is: None")
            bags = bag_inputs(ids, offsets, weights, self.mode, include_last=False)
            answers[feature] = self._bags(feature, ids, bags)
        return answers
