"""Ids of a batch, the tables they are of, and what ids without a row begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import embstore
from embstore.initializers import initial_values

# Initial values depend on the seed, the id and the column alone, not on the name of an embedding.
STREAM = "one_embedding"


def checked_ids(
    ids: torch.Tensor, table_ids: torch.Tensor | None, key_type: torch.dtype, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (n) and their tables (n), int64 on the CPU. Without table_ids the last dimension of ids runs over
    the `count` tables."""
    if not isinstance(ids, torch.Tensor) or ids.dtype != key_type:
        told = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids should be a tensor of the key_type {key_type} but are: {told}")
    if ids.device.type == "meta":
        raise ValueError("ids should have data but their device is: meta")
    if table_ids is None:
        if count > 1 and (ids.dim() == 0 or ids.shape[-1] % count):
            raise ValueError(
                f"ids should have a last dimension of {count} (one for each table) without table_ids "
                f"but have the shape: {tuple(ids.shape)}"
            )
        tables = torch.arange(ids.numel()) % count
    else:
        if not isinstance(table_ids, torch.Tensor) or table_ids.shape != ids.shape:
            shaped = isinstance(table_ids, torch.Tensor)
            found = tuple(table_ids.shape) if shaped else type(table_ids).__name__
            raise ValueError(f"table_ids should have the shape {tuple(ids.shape)} of ids but have: {found}")
        if table_ids.is_floating_point() or table_ids.dtype == torch.bool:
            raise TypeError(f"table_ids should be integers but their dtype is: {table_ids.dtype}")
        tables = table_ids.to("cpu", torch.int64).reshape(-1)
    return ids.detach().to("cpu", torch.int64).reshape(-1), tables


def check_tables(tables: torch.Tensor, count: int) -> None:
    """Raises ValueError where one of the numbers is not that of a table."""
    wrong = tables[(tables < 0) | (tables >= count)]
    if len(wrong):
        raise ValueError(f"table_ids should be between 0 and {count - 1} but one is: {int(wrong[0])}")


class Beginnings:
    """The vectors that ids start with: `initializers` has those of the columns of each table."""

    def __init__(
        self,
        initializers: Sequence[Sequence[embstore.Initializer]],
        columns: Sequence[int],
        seed: int,
    ) -> None:
        self.initializers, self.columns, self.seed = initializers, columns, seed

    def fill(
        self, vectors: torch.Tensor, missing: torch.Tensor, keys: torch.Tensor, tables: torch.Tensor
    ) -> None:
        """Writes into the rows `missing` of vectors (n, dim) what their ids begin with."""
        for number, columns in enumerate(self.initializers):
            chosen = missing[tables[missing] == number]
            if len(chosen):
                vectors[chosen] = self._of(keys[chosen].numpy(), columns)

    def _of(self, keys: np.ndarray, initializers: Sequence[embstore.Initializer]) -> torch.Tensor:
        parts = []
        for number, (initializer, width) in enumerate(zip(initializers, self.columns, strict=True)):
            stream = STREAM if number == 0 else f"{STREAM}/{number}"
            parts.append(initial_values(initializer, keys, width, seed=self.seed, stream=stream))
        return torch.from_numpy(np.concatenate(parts, axis=1))
