"""The dynamic tables of a collection as one object, for tools that read rows by key.

(view,) = get_dynamic_emb_module(model)
found = view.tables.find(keys, torch.zeros_like(keys), CopyMode.EMBEDDING)     # 8 results
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.tables import DynamicTable
from dynamicemb.types import CopyMode, Storage


class TablesView:
    """What tools read of `BatchedDynamicEmbeddingTablesV2`: the tables of a collection on this rank."""

    def __init__(self, tables: Mapping[str, DynamicTable]) -> None:
        self._by_name = dict(tables)
        self.tables = RowsOfTables(list(tables.values()))

    @property
    def table_names(self) -> list[str]:
        return list(self._by_name)

    @property
    def _dynamicemb_options(self) -> list[DynamicEmbTableOptions]:
        return [table.options for table in self._by_name.values()]

    def flush(self) -> None:
        """Writes changed rows to the stores below, where there are any."""
        for table in self._by_name.values():
            if table.table.store is not None:
                table.table.flush()

    def set_learning_rate(self, lr: float) -> None:
        """For all tables, from the next update on."""
        for table in self._by_name.values():
            table.load_optimizer_args({"lr": lr})


class RowsOfTables(Storage):
    """Rows of several tables by key and number of the table. Tensors come and go on the CPU."""

    def __init__(self, tables: list[DynamicTable]) -> None:
        self._tables = tables

    def embedding_dtype(self) -> torch.dtype:
        return self._tables[0].options.embedding_dtype or torch.float32

    def embedding_dim(self, table_id: int) -> int:
        return self._tables[table_id].table.dim

    def value_dim(self, table_id: int) -> int:
        """Columns of a vector and its optimizer state."""
        return self.embedding_dim(table_id) + self._tables[table_id].table.state_width

    def embedding_dims(self) -> list[int]:
        return [table.table.dim for table in self._tables]

    def max_embedding_dim(self) -> int:
        return max(self.embedding_dims())

    def max_value_dim(self) -> int:
        """Columns of `find` with CopyMode.VALUE: the state begins at column max_embedding_dim()."""
        return self.max_embedding_dim() + max(table.table.state_width for table in self._tables)

    def size(self) -> int:
        """Rows of all tables on this rank."""
        return sum(len(table.table) for table in self._tables)

    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[int, Any, Any, Any, None, Any, Any, Any]:
        """Reads rows and changes nothing, scores neither. A missing key has zeros and score 0.

        Returns the number of missing keys; these keys, their indices and table ids; None; a bool for each
        key; the scores (n); the vectors (n, max_embedding_dim()), or whole rows (n, max_value_dim()).
        """
        keys, ids = unique_keys.to("cpu", torch.int64), table_ids.to("cpu", torch.int64)
        if keys.dim() != 1 or keys.shape != ids.shape:
            raise ValueError(
                f"table_ids should have one number for each key, {tuple(keys.shape)}, but has: "
                f"{tuple(ids.shape)}"
            )
        if keys.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._tables):
            raise ValueError(f"table_ids should be from 0 to {len(self._tables) - 1} but is: {ids.tolist()}")
        whole = CopyMode(copy_mode) is CopyMode.VALUE
        widest = self.max_embedding_dim()
        values = torch.zeros(keys.numel(), self.max_value_dim() if whole else widest)
        scores = torch.zeros(keys.numel(), dtype=torch.int64)
        found = torch.zeros(keys.numel(), dtype=torch.bool)
        for number, table in enumerate(self._tables):
            places = torch.nonzero(ids == number).flatten()
            if not places.numel():
                continue
            asked = keys[places].numpy()
            rows = table.table.read(asked)
            found[places] = torch.from_numpy(np.asarray(table.table.contains(asked)))
            scores[places] = torch.from_numpy(rows.scores.astype(np.int64))
            values[places, : table.table.dim] = torch.from_numpy(rows.values)
            if whole:
                values[places, widest : widest + table.table.state_width] = torch.from_numpy(rows.states)
        missing = torch.nonzero(~found).flatten()
        dtype = self.embedding_dtype()
        return (
            missing.numel(),
            keys[missing],
            missing,
            ids[missing],
            None,
            found,
            scores,
            values.to(dtype),
        )

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Blocks of (keys, float32 vectors, states or None, scores) of a table on this rank."""
        table = self._tables[table_id].table
        for rows in table.export(block_rows=batch_size):
            states = torch.from_numpy(rows.states).to(device) if table.state_width else None
            scores = torch.from_numpy(rows.scores.astype(np.int64))
            keys, values = torch.from_numpy(rows.keys), torch.from_numpy(rows.values)
            yield keys.to(device), values.to(device), states, scores.to(device)

    def insert(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError("insert is not available yet; use insert_or_assign of the embstore.Table")

    def dump(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError("dump is not available yet; use dynamicemb.DynamicEmbDump")

    def load(self, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError("load is not available yet; use dynamicemb.DynamicEmbLoad")


def view_of(module: nn.Module, tables: Mapping[str, DynamicTable]) -> TablesView:
    """The view of a collection, the same object each time."""
    view = module.__dict__.get("_tables_view")
    if not isinstance(view, TablesView):
        view = module.__dict__["_tables_view"] = TablesView(tables)
    return view
