"""Tables in checkpoints of torch.distributed.checkpoint, beside the dense part of a model.

    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model, "tables": TablesState(tables)}, checkpoint_id=path)
    dcp.load({"model": model, "tables": TablesState(tables, saved_in=path)}, checkpoint_id=path)

Each rank saves its rows as tensors of its own; at a load of another world size every rank reads the rows of
all and keeps those it owns, so it needs memory for all of them. `embstore.dump` streams instead.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from embstore.checkpoint.dumping import OwnershipOf, Tables, ownership_of
from embstore.checkpoint.ranks import CheckpointError, ranks_of
from embstore.checkpoint.spec import TableSpec
from embstore.options import ScoreStrategy
from embstore.ownership import Ownership, owner
from embstore.table import Rows, Table

_PART = re.compile(
    r"(?P<table>.+)\.rank_(?P<rank>\d+)_of_(?P<world>\d+)\.(?P<field>keys|values|states|scores)"
)


class TablesState(Stateful):
    """The rows of tables, {collection: {name: table}}, as a `Stateful` of torch.distributed.checkpoint.

    saved_in   for loading: the folder of the checkpoint, whose sizes decide what is read
    name       the key of this object in the dict that is given to dcp.save and dcp.load
    """

    def __init__(
        self,
        tables: Tables,
        *,
        group: Any = None,
        ownership: OwnershipOf = Ownership.ROUNDROBIN,
        saved_in: str | os.PathLike[str] | None = None,
        name: str = "tables",
    ) -> None:
        self._tables = {f"{c}/{n}": (c, n, table) for c, of in tables.items() for n, table in of.items()}
        self._ranks = ranks_of(group, "TablesState()")
        self._ownership = ownership
        self._saved_in = saved_in
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        """The rows of this rank, or empty tensors for what the checkpoint has."""
        return self._ranks.together(self._template if self._saved_in is not None else self._rows)

    def _rows(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for label, (_, _, table) in self._tables.items():
            rows = table.rows()
            part = f"{label}.rank_{self._ranks.rank}_of_{self._ranks.world}"
            for field in ("keys", "values", "states"):
                state[f"{part}.{field}"] = torch.from_numpy(getattr(rows, field))
            state[f"{part}.scores"] = torch.from_numpy(rows.scores.view(np.int64))
            text = json.dumps(TableSpec.of(table).to_dict(), sort_keys=True)
            state[f"{part}.spec"] = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        return state

    def _template(self) -> dict[str, Any]:
        metadata = FileSystemReader(self._saved_in).read_metadata()  # type: ignore[arg-type]
        prefix = f"{self._name}."
        return {
            key.removeprefix(prefix): torch.empty(stored.size, dtype=stored.properties.dtype)
            for key, stored in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the rows of the tables with those of the checkpoint that this rank owns."""
        self._ranks.together(lambda: self._load(state_dict))

    def _load(self, state_dict: dict[str, Any]) -> None:
        parts: dict[str, dict[int, dict[str, np.ndarray[Any, Any]]]] = {}
        for key, tensor in state_dict.items():
            match = _PART.fullmatch(key)
            if match:
                of_rank = parts.setdefault(match["table"], {}).setdefault(int(match["rank"]), {})
                of_rank[match["field"]] = tensor.numpy()
        for label, (collection, name, table) in self._tables.items():
            if label not in parts:
                raise CheckpointError(f"{self._saved_in}: table {label!r} is missing in the checkpoint")
            (text,) = {
                bytes(tensor.numpy())
                for key, tensor in state_dict.items()
                if key.startswith(f"{label}.rank_0_of_") and key.endswith(".spec")
            }
            self._restore(
                table, TableSpec.from_dict(json.loads(text)), parts[label].values(), collection, name
            )

    def _restore(self, table: Table, spec: TableSpec, parts: Any, collection: str, name: str) -> None:
        now = TableSpec.of(table)
        for field in ("dim", "dtype", "engine_optimizer", "score_strategy"):
            if getattr(now, field) != getattr(spec, field):
                raise CheckpointError(
                    f"{self._saved_in}: {field} of table {name!r} is {getattr(now, field)!r} "
                    f"but that of the checkpoint is: {getattr(spec, field)!r}"
                )
        table.clear()
        for part in parts:
            by = ownership_of(self._ownership, collection, name)
            mine = owner(part["keys"], self._ranks.world, by) == self._ranks.rank
            rows = Rows(*(part[field][mine] for field in ("keys", "values", "states", "scores")))
            if len(rows):
                scores = rows.scores.view(np.uint64)
                table.insert_or_assign(rows.keys, rows.values, states=rows.states, scores=scores)
        table.optimizer_step, table.learning_rate = spec.optimizer_step, spec.learning_rate
        table.reseed(spec.seed)
        strategy = table.options.score_strategy
        if spec.score and strategy in (ScoreStrategy.STEP, ScoreStrategy.CUSTOMIZED):
            table.score = spec.score
