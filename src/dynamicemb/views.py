"""The dynamic tables of a module or a collection as one object, for tools that work by table and key.

(view,) = get_dynamic_emb_module(model)
found = view.tables.find(keys, torch.zeros_like(keys), CopyMode.EMBEDDING)     # 8 results
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import embstore
from dynamicemb.optimizer import BaseDynamicEmbeddingOptimizer, optimizer_from
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.row_storage import RowsOfTables
from dynamicemb.scores import set_scores, shown_score
from dynamicemb.tables import DynamicTable
from dynamicemb.types import Cache
from embstore.checkpoint.reading import collection_in
from embstore.checkpoint.selecting import rows_since
from embstore.distributed.ranks import ranks_of

_FULLEST = 0.95  # of a bucket; beyond it keys begin to be evicted


class TablesByName:
    """What `BatchedDynamicEmbeddingTablesV2` offers beside its forward pass, over `dynamic_tables`."""

    dynamic_tables: dict[str, DynamicTable]

    @property
    def table_names(self) -> list[str]:
        return list(self.dynamic_tables)

    @property
    def _dynamicemb_options(self) -> list[DynamicEmbTableOptions]:
        return [table.options for table in self.dynamic_tables.values()]

    @property
    def tables(self) -> RowsOfTables:
        """The rows of this rank, by key and number of the table."""
        return RowsOfTables(list(self.dynamic_tables.values()))

    @property
    def cache(self) -> CacheView | None:
        """What memory holds of tables with `caching` over a store; None where there is no such table."""
        if "_cache_view" not in self.__dict__:
            cached = [
                t for t in self.dynamic_tables.values() if t.options.caching and t.table.store is not None
            ]
            self.__dict__["_cache_view"] = CacheView(cached) if cached else None
        found: CacheView | None = self.__dict__["_cache_view"]
        return found

    @property
    def optimizer(self) -> BaseDynamicEmbeddingOptimizer:
        """Kind, sizes and arguments of the optimizer, as they are now."""
        table = next(iter(self.dynamic_tables.values()))
        return optimizer_from(table.optimizer_args(), table.options.embedding_dtype or torch.float32)

    def set_record_cache_metrics(self, record: bool) -> None:
        """Turns `cache.cache_metrics` on or off."""
        if self.cache is not None:
            self.cache.set_record_cache_metrics(record)

    def flush(self) -> None:
        """Writes changed rows to the stores below, where there are any."""
        for table in self.dynamic_tables.values():
            if table.table.store is not None:
                table.table.flush()

    def reset_cache_states(self) -> None:
        """As `flush`: memory keeps the rows that it has."""
        self.flush()

    def set_learning_rate(self, lr: float) -> None:
        """For all tables, from the next update on."""
        for table in self.dynamic_tables.values():
            table.load_optimizer_args({"lr": lr})

    def get_score(self) -> dict[str, int]:
        """The score that the next training forward will give its keys, by table."""
        return {name: shown_score(t.table, t.table.score) for name, t in self.dynamic_tables.items()}

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Sets the scores of CUSTOMIZED tables, by name."""
        self._require_known(named_score)
        set_scores([(self.dynamic_tables[name], score) for name, score in named_score.items()])

    def _require_known(self, names: Any) -> None:
        unknown = [name for name in names if name not in self.dynamic_tables]
        if unknown:
            raise ValueError(f"tables should be among {self.table_names} but some are not: {unknown}")

    def _chosen(self, table_names: Sequence[str] | None) -> dict[str, DynamicTable]:
        self._require_known(table_names or [])
        return {n: t for n, t in self.dynamic_tables.items() if table_names is None or n in table_names}

    # ---- files

    def dump(
        self,
        save_dir: str,
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Writes tables to an empty or new folder in layout v2, without a folder for the collection.

        Raises ValueError for an unknown table, and when the folder has files.
        """
        chosen, folder = self._chosen(table_names), Path(os.path.abspath(save_dir))
        ranks = ranks_of(pg or self._group, "dump()")
        beside = folder.with_name(f".{folder.name}.dump")
        ranks.lead(lambda: _require_empty(folder))
        for table in chosen.values():
            table.optimizer_args()  # lets the learning rate of a scheduler reach the table
        embstore.dump(
            beside,
            {folder.name: {name: table.table for name, table in chosen.items()}},
            optim=optim,
            group=pg or self._group,
            ownership={folder.name: {name: table.ownership for name, table in chosen.items()}},
            layout="v2",
            overwrite=True,
            counts=counter,
        )

        def publish() -> None:
            if folder.is_dir():
                folder.rmdir()
            (written,) = beside.iterdir()
            written.rename(folder)
            beside.rmdir()

        ranks.lead(publish)

    def load(
        self,
        save_dir: str,
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Reads tables from a folder of `dump`, or from that of a collection in a dump of the whole model.

        Raises ValueError for an unknown table, and what `DynamicEmbLoad` raises.
        """
        chosen, folder = self._chosen(table_names), Path(save_dir)
        collection = collection_in(folder)
        embstore.load(
            folder,
            {collection: {name: table.table for name, table in chosen.items()}},
            optim=optim,
            group=pg or self._group,
            ownership={collection: {name: table.ownership for name, table in chosen.items()}},
            allow_missing=table_names is None,
            allow_other_optimizer=True,
            counts=counter,
        )
        for table in chosen.values() if optim else []:
            table.load_optimizer_args({"lr": table.table.learning_rate})

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return next((t.process_group for t in self.dynamic_tables.values()), None)

    # ---- rows

    def export_keys_values(
        self, table_name: str, device: torch.device, batch_size: int = 65536
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n) and float32 vectors (n, dim) of a table on this rank."""
        self._require_known([table_name])
        blocks = list(self.tables.export_keys_values(device, batch_size, self.table_names.index(table_name)))
        return torch.cat([block[0] for block in blocks]), torch.cat([block[1] for block in blocks])

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: dist.ProcessGroup | None = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Keys and vectors whose score is not less than the threshold of their table, from all ranks, and the
        thresholds of the next call. Raises TypeError where rows live in a store, whose scores are older."""
        self._require_plain("incremental_dump")
        known = {name: value for name, value in named_thresholds.items() if name in self.dynamic_tables}
        for name in named_thresholds:
            if name not in known:
                warnings.warn(f"incremental_dump found no table {name!r}", UserWarning, stacklevel=2)
        tables = {"": {name: table.table for name, table in self.dynamic_tables.items()}}
        rows, scores = rows_since(tables, {"": known}, group=pg or self._group)
        found = {
            name: (
                torch.from_numpy(part.keys),
                torch.from_numpy(part.values).to(
                    self.dynamic_tables[name].options.embedding_dtype or torch.float32
                ),
            )
            for name, part in rows.get("", {}).items()
        }
        shown = {n: shown_score(self.dynamic_tables[n].table, s) for n, s in scores.get("", {}).items()}
        return found, shown

    def fill_tables(self, load_factor: float = 0.95, tolerance: float = 1e-5) -> None:
        """Inserts random keys from 0 to 2^63 - 2, with their initial vectors, until each table is this full.

        Raises ValueError for a negative load_factor; one above 0.95 is 0.95. TypeError where rows live in a
        store.
        """
        self._require_plain("fill_tables")
        if not 0 <= load_factor < math.inf:
            raise ValueError(f"load_factor should be at least 0 but is: {load_factor}")
        generator = np.random.default_rng(torch.initial_seed() % (1 << 64))
        for table in self.dynamic_tables.values():
            rows = table.table
            capacity = rows.options.max_capacity
            wanted = int(min(load_factor, _FULLEST) * capacity * (1 - tolerance))
            while (missing := wanted - len(rows)) > 0:
                keys = generator.integers(0, (1 << 63) - 1, min(missing, 65536))
                rows.insert_or_assign(keys, rows.initial_values(keys))

    def _require_plain(self, call: str) -> None:
        stored = [name for name, t in self.dynamic_tables.items() if t.table.store is not None]
        if stored:
            raise TypeError(
                f"{call} should be called for tables in memory but these are in a store: {stored}"
            )


class TablesView(TablesByName):
    """The dynamic tables of a sharded collection on this rank."""

    def __init__(self, tables: Mapping[str, DynamicTable]) -> None:
        self.dynamic_tables = dict(tables)


def view_of(module: nn.Module, tables: Mapping[str, DynamicTable]) -> TablesByName:
    """The view of a collection, the same object each time; a module that is one itself."""
    if isinstance(module, TablesByName):
        return module
    view = module.__dict__.get("_tables_view")
    if not isinstance(view, TablesView):
        view = module.__dict__["_tables_view"] = TablesView(tables)
    return view


def _require_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        raise ValueError(f"save_dir should be a new or an empty folder but is: {folder}")


class CacheView(Cache):
    """Memory as a cache of the stores below some tables. It is filled and emptied by training alone."""

    def __init__(self, tables: Sequence[DynamicTable]) -> None:
        self._tables = list(tables)
        self._recorded: torch.Tensor | None = None
        self._recording = False

    def lookup(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError("lookup is not available; call find of the `tables` of the module")

    def insert_and_evict(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError("insert_and_evict is not available; training fills the cache")

    def reset(self) -> None:
        """Writes changed rows to the stores; memory keeps the rows that it has."""
        for table in self._tables:
            table.table.flush()

    @property
    def cache_metrics(self) -> torch.Tensor | None:
        """Of the last training forward, 10 numbers: distinct keys, hits, inserted and evicted rows, then
        zeros. None while they are not recorded."""
        return self._recorded

    def set_record_cache_metrics(self, record: bool) -> None:
        self._recording = bool(record)
        self._recorded = torch.zeros(10, dtype=torch.int64) if record else None

    def stats(self) -> list[embstore.Stats] | None:
        """The counters of the tables now, for `record`; None while nothing is recorded."""
        return [table.table.stats() for table in self._tables] if self._recording else None

    def record(self, before: list[embstore.Stats] | None, keys: Mapping[str, torch.Tensor]) -> None:
        """Notes what a forward pass over these keys did since `before`."""
        if before is None:
            return
        distinct = sum(int(keys[table.name].unique().numel()) for table in self._tables)
        after = [table.table.stats() for table in self._tables]
        inserted, evicted = (
            sum(getattr(b, name) - getattr(a, name) for a, b in zip(before, after, strict=True))
            for name in ("inserts", "evictions")
        )
        numbers = [distinct, max(distinct - inserted, 0), inserted, evicted]
        self._recorded = torch.tensor([*numbers, *[0] * 6], dtype=torch.int64)
