"""Tables in Parquet files: the columns key, vector, score, and one for each optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.errors import CheckpointError
from embstore.formats.columns import DESCRIPTION, SHARED, Columns
from embstore.formats.described import DescribedTable, reading, require_columns

SUFFIX = ".parquet"
ROWS_AT_ONCE = 65536


def read(file: Path) -> DescribedTable:
    """The columns of a file. Raises CheckpointError where it is damaged or something else."""
    with reading(file):
        return _read(file)


def _read(file: Path) -> DescribedTable:
    import pyarrow as pa
    import pyarrow.parquet

    # Not all at once: pyarrow takes memory for as many rows as a group says that it has.
    with pyarrow.parquet.ParquetFile(file) as opened:
        table = pa.Table.from_batches(opened.iter_batches(ROWS_AT_ONCE), opened.schema_arrow)
    require_columns(file, "column", {"key", "vector"}, set(table.column_names))

    def vectors(name: str) -> npt.NDArray[Any]:
        column = table[name]
        width = column.type.list_size
        chunks = [chunk.flatten() for chunk in column.chunks]
        if column.null_count or any(chunk.null_count for chunk in chunks):
            raise CheckpointError(f"{file}: expected no nulls in the column {name}")
        parts = [np.asarray(chunk).reshape(-1, width) for chunk in chunks]
        return np.concatenate(parts) if parts else np.empty((0, width), np.float32)

    found = table.schema.metadata or {}  # that of others need not be text
    lists = [f.name for f in table.schema if pa.types.is_fixed_size_list(f.type)]
    if "vector" not in lists or table["key"].null_count:
        raise CheckpointError(f"{file}: expected keys without nulls, and vectors as lists of a fixed size")
    return DescribedTable(
        table["key"].to_numpy(),
        vectors("vector"),
        table["score"].to_numpy() if "score" in table.column_names else None,
        {name: vectors(name) for name in lists if name != "vector"},
        {key: found[key.encode()].decode() for key in (DESCRIPTION, SHARED) if key.encode() in found},
    )


def write(file: Path, table: Columns) -> None:
    """Writes one table."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(table.to_arrow(), file)
