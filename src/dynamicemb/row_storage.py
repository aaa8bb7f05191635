"""Rows of several tables by key and number of the table: `tables` of a module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb.tables import DynamicTable
from dynamicemb.types import CopyMode, Storage
from embstore.checkpoint.spec import TableSpec


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

    def embedding_dims(self, on_device: bool = False) -> list[int] | torch.Tensor:
        """Of each table; as a tensor where the original has one on its device."""
        dims = [table.table.dim for table in self._tables]
        return torch.tensor(dims) if on_device else dims

    def all_dims_vec4(self) -> bool:
        """Whether every dim is a multiple of 4."""
        return all(table.table.dim % 4 == 0 for table in self._tables)

    def init_optimizer_state(self) -> float:
        """What the state of a new row is filled with."""
        return self._tables[0].table.options.optimizer.initial_accumulator

    def max_embedding_dim(self) -> int:
        return max(table.table.dim for table in self._tables)

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
        keys, ids = self._places(unique_keys, table_ids)
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

    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Stores vectors (n, max_embedding_dim()), or whole rows (n, max_value_dim()) as `find` has them.
        Without scores rows get that of a training batch; with preserve_existing those that are there keep
        theirs. A new row without a state starts with a fresh one."""
        flat, ids = self._places(keys, table_ids)
        rows = values.detach().to("cpu", torch.float32)
        widest = self.max_embedding_dim()
        if (
            rows.dim() != 2
            or rows.shape[0] != flat.numel()
            or rows.shape[1] not in (widest, self.max_value_dim())
        ):
            raise ValueError(
                f"values should be ({flat.numel()}, {widest} or {self.max_value_dim()}) but are: "
                f"{tuple(rows.shape)}"
            )
        if scores is not None and scores.numel() != flat.numel():
            raise ValueError(f"scores should have {flat.numel()} elements but has: {scores.numel()}")
        for number, table in enumerate(self._tables):
            mine = torch.nonzero(ids == number).flatten()
            if not mine.numel():
                continue
            engine, asked = table.table, flat[mine].numpy()
            vectors = rows[mine, : engine.dim].contiguous().numpy()
            states = None
            if rows.shape[1] > widest and engine.state_width:
                states = rows[mine, widest : widest + engine.state_width].contiguous().numpy()
            given = None if scores is None else np.maximum(scores[mine].cpu().numpy().astype(np.uint64), 1)
            if preserve_existing:
                known = engine.read(asked).scores
                given = np.where(known > 0, known, max(engine.score, 1) if given is None else given)
            engine.insert_or_assign(asked, vectors, states=states, scores=given)

    def _places(self, keys: torch.Tensor, table_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat, ids = keys.to("cpu", torch.int64), table_ids.to("cpu", torch.int64)
        if flat.dim() != 1 or flat.shape != ids.shape:
            raise ValueError(
                f"table_ids should have one number for each key, {tuple(flat.shape)}, but has: "
                f"{tuple(ids.shape)}"
            )
        if flat.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._tables):
            raise ValueError(f"table_ids should be from 0 to {len(self._tables) - 1} but is: {ids.tolist()}")
        return flat, ids

    def dump(
        self,
        table_id: int,
        meta_json_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None = None,
        opt_file_path: str | None = None,
        include_optim: bool = False,
        include_meta: bool = True,
        current_score: int | None = None,
        timestamp: int = 0,
    ) -> None:
        """Writes a table to files of layout v2. Ages count from `timestamp`, in nanoseconds; where it is 0,
        scores are written as they are."""
        table = self._tables[table_id].table
        rows, spec = table.rows(), TableSpec.of(table)
        if include_meta:
            meta = spec.original_arguments(self._tables[table_id].options.dist_type)
            if current_score is not None:
                meta["step_score"] = current_score
            Path(meta_json_file_path).write_text(json.dumps(meta, indent=4), encoding="utf-8")
        rows.keys.tofile(emb_key_path)
        rows.values.tofile(embedding_file_path)
        if score_file_path is not None:
            scores = rows.scores.astype(np.int64)
            (timestamp - scores if timestamp and spec.keeps_ages else scores).tofile(score_file_path)
        if include_optim and opt_file_path is not None:
            rows.states.tofile(opt_file_path)

    def load(
        self,
        table_id: int,
        meta_json_file_path: str | None,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None = None,
        opt_file_path: str | None = None,
        include_optim: bool = False,
        timestamp: int = 0,
    ) -> int | None:
        """Reads a table from files of layout v2; returns its step, if the meta file has one."""
        table = self._tables[table_id].table
        meta = {}
        if meta_json_file_path is not None and Path(meta_json_file_path).is_file():
            meta = json.loads(Path(meta_json_file_path).read_text(encoding="utf-8"))
        keys = np.fromfile(emb_key_path, np.int64)
        values = np.fromfile(embedding_file_path, np.float32)
        states = np.fromfile(opt_file_path, np.float32) if include_optim and opt_file_path else None
        for array, width, file in (
            (values, table.dim, embedding_file_path),
            (states, table.state_width, opt_file_path),
        ):
            if array is not None and array.size != len(keys) * width:
                raise ValueError(f"{file}: expected {len(keys)} rows of {width} floats, found {array.size}")
        scores = np.zeros(len(keys), np.int64)
        if score_file_path is not None and Path(score_file_path).is_file():
            scores = np.fromfile(score_file_path, np.int64)
            if len(scores) != len(keys):
                raise ValueError(f"{score_file_path}: expected {len(keys)} scores, found {len(scores)}")
            if timestamp and TableSpec.of(table).keeps_ages:
                scores = np.maximum(timestamp - scores, 1)
        fresh = max(table.score, 1)
        table.insert_or_assign(
            keys,
            values.reshape(-1, table.dim),
            states=None if states is None else states.reshape(-1, table.state_width),
            scores=np.where(scores > 0, scores, fresh).astype(np.uint64),
        )
        step = meta.get("step_score")
        return int(step) if step is not None else None
