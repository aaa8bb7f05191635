"""The rows of a table and the store they are pushed to and pulled from.

    table t, column_wise on 2 ranks              row of an id in the store

    rank 0   weight[:, :4]   momentum1[:, :4]    column 0: [weight | momentum1]
    rank 1   weight[:, 4:]   momentum1[:, 4:]    column 1: [weight | momentum1]

A shard is a range of slots of one column. A row in the store holds the weight and all optimizer states of an
id in that column, so it does not matter in which slot, and on which rank, the id was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embstore.nn.row_pieces import RowPieces
from embstore.stores import Store
from embstore.stores.urls import is_shared, open_store

DEFAULT_PS_CHUNK_SIZE = 8 * 1024 * 1024
MOST_ROWS = (
    4096  # of one call to a store: what is moved stays in the processor's cache, and is not mapped again
)
PS_CONFIG_KEYS = ("chunk_size", "seed")

Ids = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64]  # (n, 2): id, slot
# Vectors (n, columns of the table) for ids that the store does not have.
Initial = Callable[[Ids], npt.NDArray[np.float32]]
Url = str | Callable[[str, str], str]


class Shard(RowPieces):
    """Slots [first, first + rows) of the columns [first_column, ...) of a table.

    column   which column shard, counted from the left
    tensors  weight, then states; 2-D, one row for each slot
    """

    def __init__(self, first: int, first_column: int, column: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.first, self.first_column, self.column = first, first_column, column


def _local_parts(tensor: torch.Tensor | ShardedTensor) -> list[tuple[torch.Tensor, list[int]]]:
    if isinstance(tensor, ShardedTensor):
        return [(shard.tensor, list(shard.metadata.shard_offsets)) for shard in tensor.local_shards()]
    return [(tensor, [0, 0])]


def shards_of(tensors: Sequence[torch.Tensor | ShardedTensor], columns: Sequence[int]) -> list[Shard]:
    """The local shards of a table: its weight and those states that have a value for each row.

    `columns` are the first columns of all column shards of the table, on any rank.
    """
    shards = []
    parts = [_local_parts(tensor) for tensor in tensors]
    for number, (weight, offsets) in enumerate(parts[0]):
        local = []
        for state in parts:
            if len(state) != len(parts[0]):
                continue
            values = state[number][0].detach()
            if values.dim() and values.shape[0] == weight.shape[0]:
                local.append(values.view(values.shape[0], -1))
        shards.append(Shard(offsets[0], offsets[1], columns.index(offsets[1]), local))
    return shards


class FetchHandle:
    """What `PS.fetch` returns: the rows are in place by then."""

    def wait(self) -> None:
        """Returns at once."""


class PS:
    """The local rows of one table, and its store.

    `tensors` are the weight and its optimizer states, plain or sharded. `url` names the store.
    `chunk_size` bounds how many numbers one call to the store moves.
    """

    def __init__(
        self,
        table_name: str,
        tensors: Sequence[torch.Tensor | ShardedTensor],
        url: str,
        chunk_size: int = DEFAULT_PS_CHUNK_SIZE,
        columns: Sequence[int] = (0,),
    ) -> None:
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size should be an integer above 0 but is: {chunk_size!r}")
        self.table_name = table_name
        self.shards = shards_of(tensors, columns)
        self._stores: dict[int, Store] = {}
        self._chunk_rows: dict[int, int] = {}
        for shard in self.shards:
            numbers = sum(tensor.shape[1] for tensor in shard.tensors)
            if chunk_size < numbers:
                raise ValueError(
                    f"chunk_size should hold a row of {table_name} ({numbers} numbers) but is: {chunk_size}"
                )
            self._chunk_rows[shard.column] = min(chunk_size // numbers, MOST_ROWS)
            if shard.column not in self._stores:
                self._stores[shard.column] = open_store(
                    url, table=table_name, tensor_bytes=shard.tensor_bytes, column=shard.column
                )

    def _local(self, pairs: Pairs) -> Iterator[tuple[Shard, Store, Ids, Ids]]:
        """Chunks of the pairs whose slot is here: ids, and slots within the shard."""
        for shard in self.shards:
            ids, slots = np.ascontiguousarray(pairs[:, 0]), pairs[:, 1] - shard.first
            here = (slots >= 0) & (slots < shard.rows)
            if not here.all():
                ids, slots = ids[here], slots[here]
            step = self._chunk_rows[shard.column]
            for begin in range(0, len(ids), step):
                yield (
                    shard,
                    self._stores[shard.column],
                    ids[begin : begin + step],
                    slots[begin : begin + step],
                )

    def push(self, pairs: Pairs) -> None:
        """Stores the rows of these (id, slot); pairs whose slot is on another rank are skipped."""
        for shard, store, ids, slots in self._local(pairs):
            store.put(ids, shard.gather(slots), np.ones(len(ids), np.uint64))

    def pull(self, pairs: Pairs, initial: Initial | None) -> None:
        """Fetches the rows of these (id, slot). An id that the store lacks gets `initial` and states of 0,
        or without `initial` keeps what its slot holds."""
        for shard, store, ids, slots in self._local(pairs):
            rows, _, found = store.get(ids)
            if not found.all():
                if initial is None:
                    rows, slots = np.ascontiguousarray(rows[found]), np.ascontiguousarray(slots[found])
                else:
                    rows[~found] = _new_rows(shard, initial(ids[~found]))
            if len(slots):
                shard.scatter(slots, rows)

    def evict(self, ids_to_evict: torch.Tensor) -> None:
        """Stores the rows of these pairs (n, 2)."""
        self.push(ids_to_evict.numpy())

    def fetch(
        self,
        ids_to_fetch: torch.Tensor,
        time: int,
        reinit: bool = False,
        weight_init_min: float = 0.0,
        weight_init_max: float = 0.0,
    ) -> FetchHandle:
        """Fetches the rows of these pairs (n, 2). `reinit`: an id that the store lacks starts fresh."""
        initial = None
        if reinit:
            initial = uniform(self, weight_init_min, weight_init_max)
        self.pull(ids_to_fetch.numpy(), initial)
        return FetchHandle()

    def flush(self) -> None:
        """Makes what was pushed durable, where the store can."""
        for store in self._stores.values():
            store.flush()


def uniform(ps: PS, lower: float, upper: float, seed: int = 0, dim: int | None = None) -> Initial:
    """Vectors uniform in [lower, upper), a function of the seed, the table and the id."""
    from embstore import Uniform

    if dim is None:
        dim = max((s.first_column + s.tensors[0].shape[1] for s in ps.shards), default=0)
    return lambda ids: Uniform(lower, upper).rows(ids, dim, seed=seed, table=ps.table_name)


def _new_rows(shard: Shard, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    weight = shard.tensors[0]
    columns = vectors[:, shard.first_column : shard.first_column + weight.shape[1]]
    bytes_ = torch.from_numpy(np.ascontiguousarray(columns)).to(weight.dtype).view(torch.uint8).numpy()
    rows = np.zeros((len(vectors), sum(shard.tensor_bytes)), np.uint8)
    rows[:, : bytes_.shape[1]] = bytes_
    return rows


class PSCollection:
    """The tables of one sharded module, by name. `plan` maps a table to its tensors, weight first.

    `url` may be a function of (path, table name).
    """

    def __init__(
        self,
        path: str,
        plan: Mapping[str, Sequence[torch.Tensor | ShardedTensor]],
        url: Url,
        ps_config: Mapping[str, Any] | None = None,
        columns: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        config = dict(ps_config or {})
        if unknown := sorted(set(config) - set(PS_CONFIG_KEYS)):
            raise ValueError(f"ps_config should have no other keys than {PS_CONFIG_KEYS} but has: {unknown}")
        self.path = path
        self.seed = config.get("seed", 0)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed should be an integer from 0 to 2^64 - 1 but is: {self.seed!r}")
        chunk_size = config.get("chunk_size", DEFAULT_PS_CHUNK_SIZE)
        self._tables = {
            table: PS(
                f"{path}.{table}",
                tensors,
                url if isinstance(url, str) else url(path, table),
                chunk_size,
                (columns or {}).get(table, (0,)),
            )
            for table, tensors in plan.items()
        }

    @classmethod
    def fromModule(
        cls,
        path: str,
        sharded_module: torch.nn.Module,
        params_plan: Mapping[str, Any],
        url: Url,
        ps_config: Mapping[str, Any] | None = None,
    ) -> PSCollection:
        """Takes the tensors of a module that TorchRec sharded; `params_plan` is its part of the plan."""
        weights = {
            key.split(".")[-2]: (key, value)
            for key, value in sharded_module.state_dict().items()
            if key.endswith(".weight")
        }
        states = sharded_module.fused_optimizer.state_dict()["state"]
        plan, columns = {}, {}
        for table, sharding in params_plan.items():
            key, weight = weights[table]
            if not isinstance(weight, ShardedTensor):
                raise ValueError(
                    f"{path}.{table} should be sharded by rows, columns or as a table "
                    f"but is: {sharding.sharding_type}"
                )
            plan[table] = [weight, *states.get(key, {}).values()]
            offsets = [tuple(shard.shard_offsets) for shard in weight.metadata().shards_metadata]
            columns[table] = sorted({column for _, column in offsets})
            table_url = url if isinstance(url, str) else url(path, table)
            if len({row for row, _ in offsets}) > 1 and not is_shared(table_url):
                raise ValueError(
                    f"url should name a server that all ranks reach, since the rows of {path}.{table} move "
                    f"between ranks, but is: {table_url.split(':', 1)[0]}://"
                )
        return cls(path, plan, url, ps_config, columns)

    def table_names(self) -> list[str]:
        return list(self._tables)

    def __getitem__(self, table: str) -> PS:
        return self._tables[table]
