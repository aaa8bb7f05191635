"""The modules: ids in, vectors out; rows in memory or on SSD, as the store options say."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import embstore
from embstore.display import as_html
from embstore.nn.batch import Access, Request, run
from embstore.nn.row_module import RowModule
from embstore.stores import SsdStore
from one_embedding.ids import STREAM, Beginnings, check_tables, checked_ids
from one_embedding.optimizer import Rule, rule_of
from one_embedding.options import Options, StoreOptions, columns_of, initializers_of
from one_embedding.persistent_table import as_numpy_dtype, make_persistent_table_reader
from one_embedding.ranks import Ranks
from one_embedding.served import ServedMultiTableEmbedding

if TYPE_CHECKING:
    from embstore.serving.models import ServedTables

_names: weakref.WeakValueDictionary[str, MultiTableMultiColumnEmbedding] = weakref.WeakValueDictionary()


class MultiTableMultiColumnEmbedding(RowModule):
    """Vectors of ids of several tables that share one space of ids; a vector may consist of columns.

    Train it with torch.optim.SGD, Adam, Adagrad, one_embedding.Ftrl or SmartDecayAdam over `parameters()`.
    Under an initialised torch.distributed each id is kept by one rank, and a batch of each rank gets the
    vectors of all; gradients of all ranks are added up.

    Args:
        name: unique in the process.
        embedding_dim: components of a vector, or a list of those of each column.
        dtype: torch.float32, or numpy's, or its name.
        key_type: torch.int64 or torch.int32, the dtype of ids.
        tables: from `make_table_options`; they choose the initializer of an id. None: one table.
        store_options: from one of the make_*_store_options.
        default_initializer: for tables=None; normal with std 0.05 when not given.
        padding_idx: an id whose vector is 0, gets no gradient and is never stored.
        seed: of the initial values.

    Raises:
        ValueError: an argument is out of range, or an embedding of this name exists.
        OSError: the files of the store cannot be opened; on every rank.
        RuntimeError: at a call, new ids do not fit the capacity of the store.

    Examples:
        >>> import one_embedding, tempfile, torch
        >>> starts = [one_embedding.make_constant_initializer(value) for value in (1, 2)]
        >>> columns = [one_embedding.make_column_options(start) for start in starts]
        >>> rows = one_embedding.MultiTableMultiColumnEmbedding(
        ...     "columns",
        ...     embedding_dim=[2, 1],
        ...     dtype=torch.float32,
        ...     key_type=torch.int64,
        ...     tables=[one_embedding.make_table_options(columns)],
        ...     store_options=one_embedding.make_cached_ssd_store_options(1, tempfile.mkdtemp()),
        ... )
        >>> rows(torch.tensor([7])).tolist()
        [[1.0, 1.0, 2.0]]
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int | Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[Options] | None,
        store_options: Options,
        default_initializer: Options | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(name, str) or not name:
            raise ValueError(f"name should be a non-empty string but is: {name!r}")
        if name in _names:
            raise ValueError(f"an embedding named {name!r} already exists in this process")
        if as_numpy_dtype(dtype, "dtype") != np.float32:
            raise ValueError(f"dtype should be torch.float32 but is: {dtype}")
        kinds = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
        torch_key_type = kinds.get(as_numpy_dtype(key_type, "key_type"))
        if torch_key_type is None:
            raise ValueError(f"key_type should be torch.int64 or torch.int32 but is: {key_type}")
        if padding_idx is not None and (isinstance(padding_idx, bool) or not isinstance(padding_idx, int)):
            raise ValueError(f"padding_idx should be an integer or None but is: {padding_idx!r}")
        self.name, self.key_type, self.padding_idx, self.seed = name, torch_key_type, padding_idx, seed
        self.columns = columns_of(embedding_dim)
        self.embedding_dim = sum(self.columns)
        self._initializers = initializers_of(tables, default_initializer, len(self.columns))
        self._beginnings = Beginnings(self._initializers, self.columns, seed)
        self._options = StoreOptions.from_dict(store_options)
        self._row_floats = self._options.row_floats(self.embedding_dim)
        if self._row_floats < self.embedding_dim:
            raise ValueError(
                f"storage_dim should be at least embedding_dim ({self.embedding_dim}) "
                f"but is: {self._row_floats}"
            )
        self._ranks = Ranks()
        self._table = self._ranks.together(self._open, "making an embedding")
        # All rows of a cached SSD store fit; its capacity is a hint.
        self._capacity = self._rank_share() if self._options.cache_budget_bytes is None else None
        self._rows_at_most = 0  # rows that there may be now
        self._steps = 0
        _names[name] = self

    # ---- the store

    def _folder(self) -> str:
        path, rank, world = self._options.path, self._ranks.rank, self._ranks.world
        if isinstance(path, str):
            return os.path.join(path, _rank_folder(rank, world))
        if len(path) != world:
            raise ValueError(
                f"persistent_path should have one directory a rank ({world}) but has: {len(path)}"
            )
        return path[rank]

    def _open(self) -> embstore.Table:
        # The optimizer is known when it first steps; until then any with as much state stands for it.
        stand_ins = (embstore.SmartDecayAdam(), embstore.Adam(), embstore.SGD(momentum=0.9), embstore.SGD())
        optimizer = next(o for o in stand_ins if self._floats_for(o) <= self._row_floats)
        row_bytes = embstore.stores.row_bytes(self.embedding_dim, optimizer)
        budget = self._options.cache_budget_bytes
        store = SsdStore(
            self._folder(),
            row_bytes,
            key_bytes=self.key_type.itemsize,
            physical_block_bytes=self._options.physical_block_size,
        )
        if budget is None:
            sizes: dict[str, Any] = {"score_strategy": "no_eviction"}
        else:
            sizes = {"max_capacity": max(128, budget // row_bytes)}
        table = embstore.Table(
            STREAM,
            dim=self.embedding_dim,
            optimizer=optimizer,
            initializer=self._initializers[0][0],
            seed=self.seed,
            check_mode="error",
            ttl=self._options.ttl,
            store=store,
            **sizes,
        )
        with contextlib.suppress(MemoryError):  # only to grow less often later
            table.reserve(min(self._rank_share() or 0, table.stats().max_capacity))
        return table

    def _floats_for(self, optimizer: embstore.Optimizer) -> int:
        states = optimizer.state_names(self.embedding_dim)
        return self.embedding_dim + sum(width for _, width in states)

    @property
    def store(self) -> SsdStore:
        """The files below the rows in memory."""
        store = self._table.store
        assert isinstance(store, SsdStore)
        return store

    @property
    def table(self) -> embstore.Table:
        """The rows of this rank."""
        return self._table

    def _rank_share(self) -> int | None:
        """How many rows of the capacity this rank may get."""
        capacity, world = self._options.capacity, self._ranks.world
        if capacity is None or world == 1:
            return capacity
        share = capacity // world
        return share + max(share // 20, 4096)  # hashing does not divide evenly

    def _require_room(self, keys: torch.Tensor) -> None:
        """Raises when new ids of a batch would exceed the capacity. Counts only when it is near."""
        if self._capacity is None:
            return
        self._rows_at_most += keys.numel()
        if self._rows_at_most <= self._capacity:
            return
        table = self._table
        resident = np.concatenate([r.keys for r in _resident(table)])
        rows = len(self.store) + int((~self.store.contains(resident)).sum())
        fresh = torch.unique(keys)
        fresh = fresh[~table.contains(fresh)]
        if rows + len(fresh) > self._capacity:
            self._rows_at_most = rows
            raise RuntimeError(
                f"embedding {self.name!r} is full: it holds {rows} of {self._capacity} rows and was given "
                f"{len(fresh)} new ids; a larger capacity is needed"
            )
        self._rows_at_most = rows + len(fresh)

    # ---- forward

    def forward(self, ids: torch.Tensor, table_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Vectors of ids. In training, new ids get a row; in evaluation they read their initial value.

        Args:
            ids: integers of any shape, of the key_type.
            table_ids: the table of each id, in the shape of `ids`. None: the last dimension of `ids` runs
                over the tables.

        Returns:
            ids.shape + (embedding_dim,), on the device of the ids.

        Raises:
            TypeError: ids are not of the key_type; on every rank.
            ValueError: table_ids do not fit; on every rank.
            RuntimeError: new ids do not fit the capacity of the store.
        """
        stored = None

        def ask() -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal stored
            keys, tables = checked_ids(ids, table_ids, self.key_type, len(self._initializers))
            check_tables(tables, len(self._initializers))
            if self.padding_idx is None:
                return keys, tables
            stored = keys != self.padding_idx
            return keys[stored], tables[stored]

        if self._ranks.world == 1:
            vectors = self._answer(*ask())
        else:
            vectors = self._ranks.look_up(ask, self._answer, self.embedding_dim)
        if stored is not None:
            whole = vectors.new_zeros(ids.numel(), self.embedding_dim)
            vectors = whole.masked_scatter(stored.unsqueeze(1), vectors)
        return self._in_dtype(vectors.view(*ids.shape, self.embedding_dim).to(ids.device))

    def _answer(self, keys: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Vectors of ids that this rank owns."""
        keys = keys.contiguous()
        if self.trains:
            self._require_room(keys)
        (vectors,) = run(
            [Request(self._table, keys, initial=self._initial(keys, tables))],
            access=Access.TRAIN if self.trains else Access.READ_INITIAL,
            anchor=self.shadow,
            update=self._keep_gradients,
            counts=False,
            accumulates=True,
        )
        return vectors

    def _initial(self, keys: torch.Tensor, tables: torch.Tensor) -> torch.Tensor | None:
        """What the missing ids of a batch begin with; None where the table knows by itself."""
        if len(self.columns) == 1 and all(t == self._initializers[0] for t in self._initializers):
            return None
        missing = (~self._table.contains(keys)).nonzero().flatten()
        if not len(missing):
            return None
        initial = torch.empty(len(keys), self.embedding_dim)
        self._beginnings.fill(initial, missing, keys, tables)
        return initial

    def prefetch(self, ids: torch.Tensor) -> Any:
        """Brings the rows of a coming batch up from the files; they stay while the result lives."""
        return self._table.prefetch(ids.detach().to("cpu", torch.int64).reshape(-1))

    def to_serving(self, tables: ServedTables) -> ServedMultiTableEmbedding:
        """What `embstore.serving.serving_model` puts in its place: the rows of the collection that has the
        name of this embedding."""
        rows = tables.name_of(STREAM, self.name)
        return ServedMultiTableEmbedding(
            tables.source, rows, self._beginnings, self.key_type, self.padding_idx, self._output_dtype
        )

    # ---- gradients

    def _over_ranks(self, squares: float, largest: float) -> tuple[float, float]:
        # So that every rank clips, or skips a step, alike.
        measures = self._ranks.gather_numbers(squares, largest)
        return float(measures[:, 0].sum()), float(measures[:, 1].max())

    def check_rule(self, rule: Rule) -> None:
        """Raises when rows have no room, or too much, for the state of this optimizer."""
        wanted = self._floats_for(rule.optimizer)
        if wanted != self._row_floats:
            factor, rest = divmod(wanted, self.embedding_dim)
            option, right = (
                ("storage_dim", str(wanted)) if rest else ("size_factor", f"{factor} ({wanted} floats)")
            )
            raise ValueError(
                f"{option} of embedding {self.name!r} should be {right} for {type(rule.optimizer).__name__} "
                f"but its rows have {self._row_floats} floats"
            )

    def before_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        self.check_rule(rule_of(optimizer, group, {}, 0))

    def after_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        state = optimizer.state.get(self.shadow, {})
        self._ranks.together(
            lambda: self._step_rows(lambda steps: rule_of(optimizer, group, state, steps)),
            "step() of an optimizer",
        )

    def _step_rows(self, rule_at: Callable[[int], Rule]) -> None:
        """One step of the rows that have gradients; rule_at(steps so far) makes it."""
        self._drop_zeroed()
        if self.shadow.grad is None:
            return
        rule = rule_at(self._steps)
        self._steps += 1
        self._table.set_optimizer(rule.optimizer)
        self._table.optimizer_step = rule.step - 1
        factor, bound = self._changes()
        self._pending.apply([self._table], rule.scale * factor, bound)  # kept until zero_grad, as torch does

    # ---- snapshots

    def save_snapshot(self, snapshot_name: str) -> None:
        """Keeps all rows under a name, in <persistent_path>/<rank>-<ranks>/snapshots. All ranks call it.

        Args:
            snapshot_name: a name of a folder.

        Raises:
            OSError: the files cannot be written.
        """
        self._ranks.together(lambda: self._table.save_snapshot(snapshot_name), "save_snapshot()")

    def load_snapshot(self, snapshot_name: str) -> None:
        """Replaces all rows with those of a snapshot, whatever the number of ranks that saved it.

        Args:
            snapshot_name: as given to `save_snapshot`.

        Raises:
            FileNotFoundError: there is none; on every rank.
        """
        self._ranks.together(lambda: self._load(snapshot_name), "load_snapshot()")

    def _load(self, name: str) -> None:
        if name in self.store.snapshots() or not isinstance(self._options.path, str):
            self._table.load_snapshot(name)
        else:
            self._reshard(self._other_ranks(self._options.path, name), name)
        if self._options.ttl is not None:
            self._date_rows()
        self.zero_grad()
        self._rows_at_most = len(self.store)
        if self._options.cache_budget_bytes is None:
            for keys, _, _ in self.store.scan():
                self._table.prefetch(keys)  # all rows are to be in memory

    def _date_rows(self) -> None:
        """Rows of files that do not say when they were used, such as OneEmbedding's own, count as used now;
        else all of them would expire at once."""
        store, now = self.store, self._table.score
        undated = [keys[scores <= 1] for keys, _, scores in store.scan()]
        for keys in undated:
            if len(keys):
                rows, _, _ = store.get(keys)
                store.put(keys, rows, np.full(len(keys), now, np.uint64))

    def _other_ranks(self, path: str, name: str) -> list[str]:
        """The directories of another number of ranks that hold this snapshot."""
        worlds = {int(m[1]) for f in Path(path).iterdir() if (m := re.fullmatch(r"\d+-(\d+)", f.name))}
        for world in sorted(worlds - {self._ranks.world}):
            folders = [os.path.join(path, _rank_folder(rank, world)) for rank in range(world)]
            if all(os.path.isdir(os.path.join(folder, "snapshots", name)) for folder in folders):
                return folders
        raise FileNotFoundError(f"snapshot_name should be that of a snapshot under {path} but is: {name!r}")

    def _reshard(self, folders: list[str], name: str) -> None:
        store = self.store
        floats = store.row_bytes // 4
        key_type = np.int64 if self.key_type == torch.int64 else np.int32
        block = self._options.physical_block_size
        with make_persistent_table_reader(folders, name, key_type, np.float32, floats, block) as reader:
            self._table.clear()
            for keys, values in reader:
                mine = self._ranks.owners(torch.from_numpy(keys).long()).numpy() == self._ranks.rank
                store.put(keys[mine], values[mine])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The state holds the name of a snapshot that is made here, not the rows."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = self._ranks.same_name(datetime.now().strftime("%Y-%m-%d-%H-%M-%S-%f"))
        self.save_snapshot(name)
        destination[prefix + "OneEmbeddingSnapshot"] = name

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        name = state_dict.pop(prefix + "OneEmbeddingSnapshot", None)
        if name is None:
            arguments[2].append(prefix + "OneEmbeddingSnapshot")  # missing_keys
        else:
            self.load_snapshot(name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def close(self) -> None:
        """Releases the directory and the name. Only snapshots stay."""
        self._pending.clear()
        store = self.store
        self._table.close()
        store.close()
        _names.pop(self.name, None)

    def extra_repr(self) -> str:
        sizes = f"embedding_dim={self.embedding_dim}, tables={len(self._initializers)}"
        return f"{self.name!r}, {sizes}, {self.store!r}\n{self._table!r}"

    def _repr_html_(self) -> str:
        return as_html([self._table], title=type(self).__name__)


class MultiTableEmbedding(MultiTableMultiColumnEmbedding):
    """Vectors of ids of several tables that share one space of ids; a vector is one column.

    Args:
        name: unique in the process.
        embedding_dim: components of a vector.
        dtype: torch.float32, or numpy's, or its name.
        key_type: torch.int64 or torch.int32, the dtype of ids.
        tables: from `make_table_options`; they choose the initializer of an id. None: one table.
        store_options: from one of the make_*_store_options.
        default_initializer: for tables=None; normal with std 0.05 when not given.
        padding_idx: an id whose vector is 0, gets no gradient and is never stored.
        seed: of the initial values.

    Raises:
        ValueError: an argument is out of range, or an embedding of this name exists.
        OSError: the files of the store cannot be opened; on every rank.
        RuntimeError: at a call, new ids do not fit the capacity of the store.

    Examples:
        >>> import one_embedding, tempfile, torch
        >>> start = one_embedding.make_constant_initializer(1.0)
        >>> rows = one_embedding.MultiTableEmbedding(
        ...     "user",
        ...     embedding_dim=2,
        ...     dtype=torch.float32,
        ...     key_type=torch.int64,
        ...     tables=[one_embedding.make_table_options(start)],
        ...     store_options=one_embedding.make_cached_ssd_store_options(1, tempfile.mkdtemp()),
        ... )
        >>> optimizer = torch.optim.SGD(rows.parameters(), lr=0.5)
        >>> rows(torch.tensor([7, 7])).sum().backward()
        >>> optimizer.step()
        >>> rows.eval()(torch.tensor([7])).tolist()
        [[0.0, 0.0]]
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[Options] | None,
        store_options: Options,
        default_initializer: Options | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(embedding_dim, bool) or not isinstance(embedding_dim, int):
            raise ValueError(f"embedding_dim should be an integer but is: {embedding_dim!r}")
        super().__init__(
            name,
            embedding_dim,
            dtype,
            key_type,
            tables,
            store_options,
            default_initializer,
            padding_idx,
            seed,
        )


def _rank_folder(rank: int, world: int) -> str:
    return f"{rank:0{len(str(world))}}-{world}"


def _resident(table: embstore.Table) -> Iterator[embstore.Rows]:
    return table.resident(with_values=False, with_states=False)
