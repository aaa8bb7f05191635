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
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from embstore.extras import missing

try:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.stateful import Stateful
except ImportError as error:
    raise missing("torch_checkpoint", "torch", error) from error

from embstore.checkpoint.admission import restore_counters
from embstore.checkpoint.dumping import OwnershipOf, Tables, ownership_of
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.fitting import CARRIED_SCORES, scores_carry
from embstore.checkpoint.loading import ORDERED_ROWS, ascending_rows, losses_told
from embstore.checkpoint.parts import Array
from embstore.checkpoint.shared import as_records, chosen, read_records
from embstore.checkpoint.spec import TableSpec
from embstore.distributed.ranks import ranks_of
from embstore.ownership import AnyOwnership, Ownership, owner
from embstore.rows import Rows
from embstore.table import Table

_PART = re.compile(
    r"(?P<table>.+)\.rank_(?P<rank>\d+)_of_(?P<world>\d+)\.(?P<field>keys|values|states|scores|admission|shared|spec)"
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
        return self._ranks.together(self._template if self._saved_in is not None else self._tensors)

    def _tensors(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for label, (_, _, table) in self._tables.items():
            rows = table.rows()
            part = f"{label}.rank_{self._ranks.rank}_of_{self._ranks.world}"
            for field in ("keys", "values", "states"):
                state[f"{part}.{field}"] = torch.from_numpy(getattr(rows, field))
            state[f"{part}.scores"] = torch.from_numpy(rows.scores.view(np.int64))
            admission = table.admission_counters()
            if admission is not None:
                state[f"{part}.admission"] = torch.from_numpy(admission.view(np.int16))
            if table.options.shared_rows:
                records = as_records(table.shared_rows(), optim=True)
                state[f"{part}.shared"] = torch.from_numpy(records)
            described = {**TableSpec.of(table).to_dict(), "ownership": self._owners(label).name}
            text = json.dumps(described, sort_keys=True)
            state[f"{part}.spec"] = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        return state

    def _owners(self, label: str) -> AnyOwnership:
        collection, name, _ = self._tables[label]
        return ownership_of(self._ownership, collection, name)

    def _template(self) -> dict[str, Any]:
        metadata = FileSystemReader(self._saved_in).read_metadata()  # type: ignore[arg-type]
        prefix = f"{self._name}."
        return {
            key.removeprefix(prefix): torch.empty(stored.size, dtype=stored.properties.dtype)
            for key, stored in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the rows of the tables with those of the checkpoint that this rank owns.

        Raises CheckpointError, before any table changes, where the checkpoint does not fit. Warns with the
        number of rows that found no room.
        """
        self._ranks.together(lambda: self._load(state_dict))

    def _load(self, state_dict: dict[str, Any]) -> None:
        parts: dict[str, dict[tuple[int, int], dict[str, Array]]] = {}
        for key, tensor in state_dict.items():
            match = _PART.fullmatch(key)
            if match:
                rank = int(match["rank"]), int(match["world"])
                parts.setdefault(match["table"], {}).setdefault(rank, {})[match["field"]] = tensor.numpy()
        for label, (_, _, table) in self._tables.items():
            self._check(label, table, parts.get(label, {}))
        built = [
            (table, self._build(label, table, parts[label])) for label, (_, _, table) in self._tables.items()
        ]
        for table, twin in built:
            if table.store is None:
                table.exchange(twin)

    def _build(self, label: str, table: Table, parts: dict[tuple[int, int], dict[str, Array]]) -> Table:
        """A table with the rows of the checkpoint; the table itself where it lives in a store."""
        spec, saved_by = self._described(label, table, parts)
        world = len(parts)
        by = self._owners(label)
        mine = [self._rows(parts[rank, world], by) for rank in range(world)]
        rows = Rows.concatenate(mine)
        if table.store is None:
            table = Table(table.options)
        else:
            table.clear()
        strategy = TableSpec.of(table).score_strategy
        keep_scores = scores_carry(spec.score_strategy, strategy)
        if not keep_scores:
            warnings.warn(
                f"scores of table {label!r} start fresh: those of the checkpoint follow the strategy "
                f"{spec.score_strategy!r}, those of the table {strategy!r}",
                stacklevel=4,
            )
            fresh = 1 if strategy == "lfu" else max(table.score, 1)
            rows = replace(rows, scores=np.full(len(rows), fresh, np.uint64))
        # Keys of one call do not make way for each other, so none may fill a bucket.
        crowded = len(rows) > table.stats().max_capacity // 2
        at_once = table.options.bucket_capacity if crowded else ORDERED_ROWS
        with losses_told(table, self._saved_in) as count:
            for block in ascending_rows(rows, at_once):
                table.insert_or_assign(block.keys, block.values, states=block.states, scores=block.scores)
                count(len(block))
        table.optimizer_step, table.learning_rate = spec.optimizer_step, spec.learning_rate
        table.reseed(spec.seed)
        if spec.score and strategy == spec.score_strategy and strategy in CARRIED_SCORES:
            table.score = spec.score
        alike = saved_by == by.name and world == self._ranks.world
        self._restore_admission(label, table, parts, alike)
        if spec.shared_rows and table.options.shared_rows:
            whence = f"{self._saved_in}: table {label!r}"
            saved = [
                read_records(parts[rank, world]["shared"], spec, table.state_width, whence)
                for rank in range(world)
            ]
            mine_shared = chosen(spec, saved, TableSpec.of(table), self._ranks.rank, self._ranks.world, alike)
            table.assign_shared_rows(mine_shared.keys, mine_shared.values, mine_shared.states)
        return table

    def _described(
        self, label: str, table: Table, parts: dict[tuple[int, int], dict[str, Array]]
    ) -> tuple[TableSpec, str]:
        """What the checkpoint says about a table. Raises CheckpointError where it does not fit."""
        if not parts:
            raise CheckpointError(f"{self._saved_in}: table {label!r} is missing in the checkpoint")
        world = len(parts)
        if sorted(parts) != [(rank, world) for rank in range(world)] or "spec" not in parts[0, world]:
            raise CheckpointError(f"{self._saved_in}: rows of some ranks of table {label!r} are missing")
        try:
            document = json.loads(bytes(parts[0, world]["spec"]))
            spec = TableSpec.from_dict(document)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._saved_in}: table {label!r} is not described: {error}") from error
        now = TableSpec.of(table)
        for field in ("dim", "engine_optimizer"):
            if getattr(now, field) != getattr(spec, field):
                raise CheckpointError(
                    f"{self._saved_in}: {field} of table {label!r} is {getattr(now, field)!r} "
                    f"but that of the checkpoint is: {getattr(spec, field)!r}"
                )
        return spec, str(document.get("ownership", ""))

    def _check(self, label: str, table: Table, parts: dict[tuple[int, int], dict[str, Array]]) -> None:
        self._described(label, table, parts)
        shapes = {"keys": (), "values": (table.dim,), "states": (table.state_width,), "scores": ()}
        for part in parts.values():
            for field, shape in shapes.items():
                if field not in part or part[field].shape != (len(part["keys"]), *shape):
                    raise CheckpointError(f"{self._saved_in}: {field} of table {label!r} do not fit its keys")

    def _rows(self, part: dict[str, Array], by: AnyOwnership) -> Rows:
        mine = owner(part["keys"], self._ranks.world, by) == self._ranks.rank
        return Rows(
            part["keys"][mine],
            part["values"][mine],
            part["states"][mine],
            np.maximum(part["scores"][mine].view(np.uint64), np.uint64(1)),
        )

    def _restore_admission(
        self, label: str, table: Table, parts: dict[tuple[int, int], dict[str, Array]], alike: bool
    ) -> None:
        counters = parts[self._ranks.rank if alike else 0, len(parts)].get("admission")
        if not table.options.counts_keys or counters is None:
            return
        whence = f"{self._saved_in}: table {label!r}"
        if not alike or not restore_counters(table, counters, whence):
            warnings.warn(
                f"admission counters of table {label!r} are not loaded: those of the checkpoint are for "
                "another world size, ownership or admission_threshold; keys without a row are counted from 0",
                stacklevel=5,
            )
