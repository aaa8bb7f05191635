"""Shared rows in files: those that serve keys without a row of their own.

    {table}_shared.rank_0.world_size_2      records: int64 number | float32 vector | float32 state

Each rank writes its own. Where the number of ranks divides that of shared rows, a row is trained by one rank
alone (number % world), else every rank has its own copy and readers of another world size take the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.parts import RowFile
from embstore.checkpoint.spec import TableSpec
from embstore.rows import Rows

if TYPE_CHECKING:
    from embstore.checkpoint.reading import DumpTable

Array = npt.NDArray[Any]


def shared_file(name: str, rank: int, world: int) -> str:
    return f"{file_stem(name)}_shared.rank_{rank}.world_size_{world}"


def as_records(shared: Rows, optim: bool) -> Array:
    """The bytes of a file (n, bytes of a record)."""
    columns = [shared.keys.astype("<i8").reshape(-1, 1).view(np.uint8)]
    for floats in (shared.values, shared.states) if optim else (shared.values,):
        if floats.shape[1]:
            columns.append(np.ascontiguousarray(floats, "<f4").view(np.uint8))
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


def read_records(data: Array, spec: TableSpec, state_width: int, whence: object) -> Rows:
    """The shared rows in the bytes of a file. Raises CheckpointError where they are none of this table."""
    size = 8 + 4 * (spec.dim + state_width)
    if data.nbytes % size:
        raise CheckpointError(
            f"{whence}: expected shared rows of {size} bytes each, found {data.nbytes} bytes"
        )
    rows = _from_records(np.ascontiguousarray(data).reshape(-1).view(np.uint8).reshape(-1, size), spec.dim)
    outside = ((rows.keys < 0) | (rows.keys >= spec.shared_rows)).any()
    if outside or len(np.unique(rows.keys)) != len(rows):
        raise CheckpointError(
            f"{whence}: expected shared rows with numbers below {spec.shared_rows}, each once"
        )
    return rows


def _from_records(records: Array, dim: int) -> Rows:
    numbers = np.ascontiguousarray(records[:, :8]).view("<i8")[:, 0]
    floats = np.ascontiguousarray(records[:, 8:]).view("<f4")
    return Rows(numbers, floats[:, :dim], floats[:, dim:], np.zeros(len(numbers), np.uint64))


def stored_shared(stored: DumpTable) -> list[Rows] | None:
    """The shared rows of each rank; None where the dump says nothing about any."""
    if stored.manifest is None or stored.spec is None or not stored.spec.shared_rows:
        return None
    spec, world, found = stored.spec, stored.manifest.world, []
    width = spec.state_width if stored.manifest.optim else 0
    for rank in range(world):
        path = stored.folder / shared_file(stored.name, rank, world)
        listed = stored.files().get(path.name, {"bytes": 0})
        data = RowFile(path, "u1", listed["bytes"], 1).all()
        found.append(read_records(data, spec, width, path))
    return found


def combined(ranks: Sequence[Rows]) -> Rows:
    """One row of each number: the mean of those that ranks have."""
    rows = Rows.concatenate(list(ranks))
    numbers, inverse, counts = np.unique(rows.keys, return_inverse=True, return_counts=True)

    def mean(floats: Array) -> Array:
        sums = np.zeros((len(numbers), floats.shape[1]), np.float64)
        np.add.at(sums, inverse, floats.astype(np.float64))
        return (sums / counts[:, None]).astype(np.float32)

    return Rows(numbers, mean(rows.values), mean(rows.states), np.zeros(len(numbers), np.uint64))


def chosen(
    stored: TableSpec, ranks: Sequence[Rows], wanted: TableSpec, rank: int, world: int, alike: bool
) -> Rows:
    """The shared rows that a rank of a table `wanted` goes on with. `alike`: the dump keeps its rows
    together."""
    same = (stored.shared_rows, stored.shared_by) == (wanted.shared_rows, wanted.shared_by)
    if same and alike:
        return ranks[rank]
    rows = combined(ranks)
    if same:
        mine = rows.keys % world == rank if wanted.shared_rows % world == 0 else slice(None)
        return Rows(rows.keys[mine], rows.values[mine], rows.states[mine], rows.scores[mine])
    if not len(rows):
        return rows
    numbers = np.arange(wanted.shared_rows)
    one = combined([Rows(np.zeros_like(rows.keys), rows.values, rows.states, rows.scores)])
    at = np.zeros_like(numbers)
    return Rows(numbers, one.values[at], one.states[at], one.scores[at])
