"""What is below a table: the store that a function makes, or a user's `Storage` class as one.

    external_storage=PyDictStorage          PyDictStorage(options of all tables, optimizer), once for a module

Without `caching` the Storage is the table: rows go to it in every pass. With `caching` memory holds the rows
that fit `local_hbm_for_values`, and the Storage gets what is evicted or flushed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import embstore
from dynamicemb.optimizer import optimizer_from
from dynamicemb.optimizers import described
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.types import CopyMode, Storage
from embstore.arrays import torch_dtype
from embstore.stores import Store, row_bytes

Planned = tuple[embstore.TableOptions, DynamicEmbTableOptions]
_SCAN_ROWS = 65536


def is_storage(options: DynamicEmbTableOptions) -> bool:
    """Whether `external_storage` is a Storage class."""
    given = options.external_storage
    return isinstance(given, type) and issubclass(given, Storage)


def stores_of(tables: Sequence[Planned], rank: int) -> list[Store | None]:
    """The store of each table of a module; a Storage class is made once, for all tables that name it."""
    made: dict[type, Storage] = {}
    stores: list[Store | None] = []
    for number, (engine, planned) in enumerate(tables):
        given: Any = planned.external_storage
        if given is None:
            stores.append(None)
        elif not is_storage(planned):
            stores.append(given(engine, rank))
        else:
            same = [(e, p) for e, p in tables if p.external_storage is given]
            args = described(engine.optimizer, float(engine.optimizer.lr))
            optimizer = optimizer_from(args, torch_dtype(engine.dtype))
            if given not in made:
                made[given] = given([p for _, p in same], optimizer)
            numbers = [n for n, (_, p) in enumerate(tables) if p.external_storage is given]
            widest = max(e.dim for e, _ in same)
            width = widest + max(optimizer.get_state_dim(e.dim) for e, _ in same)
            stores.append(StorageStore(made[given], numbers.index(number), engine, widest, width))
    return stores


class StorageStore(Store):
    """A table of a `Storage` as a store. Tensors are on the CPU.

    widest    columns of the longest vector; states begin behind them
    width     columns of a row
    through   whether the Storage is the table, so that every pass writes to it
    updating  whether rows come from a backward pass: their scores stay
    """

    def __init__(
        self, storage: Storage, table_id: int, table: embstore.TableOptions, widest: int, width: int
    ) -> None:
        super().__init__(row_bytes(table.dim, table.optimizer, table.dtype))
        self.storage, self._id, self._table = storage, table_id, table
        self._widest, self._width = widest, width
        self._dtype = torch_dtype(table.dtype)
        self._state_width = sum(width for _, width in table.optimizer.state_names(table.dim))
        self._state_at = self.row_bytes - 4 * self._state_width
        self.through = self.updating = False

    def __repr__(self) -> str:
        return f"<{type(self.storage).__name__} of table {self._table.name!r}>"

    def _ids(self, n: int) -> torch.Tensor:
        return torch.full((n,), self._id, dtype=torch.int64)

    def _rows(self, vectors: torch.Tensor, states: torch.Tensor | None) -> npt.NDArray[np.uint8]:
        rows = np.zeros((len(vectors), self.row_bytes), np.uint8)
        raw = vectors[:, : self._table.dim].to("cpu", self._dtype).contiguous().view(torch.uint8).numpy()
        rows[:, : raw.shape[1]] = raw
        if states is not None and self._state_width:
            floats = states[:, : self._state_width].to("cpu", torch.float32).contiguous()
            rows[:, self._state_at :] = floats.view(torch.uint8).numpy()
        return rows

    def get(self, keys: npt.NDArray[np.int64]) -> Any:
        distinct, which = np.unique(keys, return_inverse=True)
        answer = self.storage.find(torch.from_numpy(distinct), self._ids(len(distinct)), CopyMode.VALUE)
        if len(answer) != 8:
            raise ValueError(
                f"find of {type(self.storage).__name__} should return 8 results but returned: {len(answer)}"
            )
        found, scores, values = (torch.as_tensor(part).to("cpu") for part in answer[5:])
        rows = self._rows(values, values[:, self._widest :])
        given = np.maximum(scores.to(torch.int64).numpy(), 1).astype(np.uint64)
        return rows[which], given[which], found.to(torch.bool).numpy()[which]

    def put(self, keys: Any, rows: Any, scores: Any) -> None:
        n, dim = len(keys), self._table.dim
        values = torch.zeros((n, self._width), dtype=self._dtype)
        # Copies: the rows may be the engine's own, which nobody writes to.
        raw = torch.from_numpy(np.array(rows[:, : dim * self._dtype.itemsize], order="C"))
        values[:, :dim] = raw.view(self._dtype)
        if self._state_width:
            states = torch.from_numpy(np.array(rows[:, self._state_at :], order="C")).view(torch.float32)
            values[:, self._widest : self._widest + self._state_width] = states.to(self._dtype)
        keys = torch.from_numpy(np.array(keys, np.int64))
        if self.updating:
            self.storage.insert(keys, self._ids(n), values, None, preserve_existing=True)
        else:
            times = torch.from_numpy(np.array(scores, np.uint64).view(np.int64))
            self.storage.insert(keys, self._ids(n), values, times)

    def erase(self, keys: Any) -> None:
        raise NotImplementedError(f"a Storage cannot forget keys, so {self!r} cannot be erased or cleared")

    def scan(self) -> Iterator[Any]:
        for block in self.storage.export_keys_values(torch.device("cpu"), _SCAN_ROWS, self._id):
            keys, vectors, states, scores = block
            times = np.maximum(torch.as_tensor(scores).to("cpu", torch.int64).numpy(), 1)
            yield keys.to("cpu", torch.int64).numpy(), self._rows(vectors, states), times.astype(np.uint64)

    def __len__(self) -> int:
        return sum(len(keys) for keys, _, _ in self.scan())
