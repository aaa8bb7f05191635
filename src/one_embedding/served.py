"""The modules over a reader: what `embstore.serving.serving_model` puts in the place of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from embstore.nn.served import ServedRows, rows_by_number
from one_embedding.ids import Beginnings, check_tables, checked_ids

if TYPE_CHECKING:
    from embstore.serving.models import Source


class _Rows(ServedRows):
    """Rows of a reader; an id without one reads what it begins with, as in evaluation."""

    def __init__(self, source: Source, name: str, beginnings: Beginnings) -> None:
        super().__init__(source, name)
        self.beginnings = beginnings

    def look_up(self, keys: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        check_tables(tables, len(self.beginnings.initializers))
        vectors, found = self.source.state.find(self.name, keys)
        missing = (~found).nonzero().flatten()
        if len(missing):
            self.beginnings.fill(vectors, missing, keys, tables)
        return vectors


@torch.library.custom_op("one_embedding::serve", mutates_args=())
def serve(keys: torch.Tensor, tables: torch.Tensor, rows: int) -> torch.Tensor:
    of = rows_by_number(rows)
    assert isinstance(of, _Rows)
    return of.look_up(keys, tables)


@serve.register_fake
def _(keys: torch.Tensor, tables: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty((keys.shape[0], rows_by_number(rows).dim), device="cpu")


class ServedMultiTableEmbedding(nn.Module):
    """Stands for MultiTableEmbedding and MultiTableMultiColumnEmbedding."""

    def __init__(
        self,
        source: Source,
        name: str,
        beginnings: Beginnings,
        key_type: torch.dtype,
        padding_idx: int | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._rows = _Rows(source, name, beginnings)
        self.key_type, self.padding_idx, self._dtype = key_type, padding_idx, dtype or torch.float32

    def forward(self, ids: torch.Tensor, table_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Vectors of the shape ids.shape + (embedding_dim,), on the device of the ids."""
        keys, tables = checked_ids(ids, table_ids, self.key_type, len(self._rows.beginnings.initializers))
        vectors = serve(keys, tables, self._rows.number)
        if self.padding_idx is not None:
            vectors = torch.where((keys == self.padding_idx).unsqueeze(1), 0.0, vectors)
        return vectors.view(*ids.shape, self._rows.dim).to(ids.device, self._dtype)
