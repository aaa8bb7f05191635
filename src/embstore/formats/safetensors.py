"""Tables in safetensors files: the tensors keys, values, scores, and state.* for each optimizer state."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embstore.formats.columns import Columns
from embstore.formats.described import DescribedTable, reading, require_columns

SUFFIX = ".safetensors"


def read(file: Path) -> DescribedTable:
    """The tensors of a file. Raises CheckpointError where it is damaged or something else."""
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="np") as opened:
        names = set(opened.keys())
        require_columns(file, "tensor", {"keys", "values"}, names)
        return DescribedTable(
            opened.get_tensor("keys"),
            opened.get_tensor("values"),
            opened.get_tensor("scores") if "scores" in names else None,
            {n.removeprefix("state."): opened.get_tensor(n) for n in sorted(names) if n.startswith("state.")},
            opened.metadata() or {},
        )


def write(file: Path, table: Columns) -> None:
    """Writes one table."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in table.tensors().items()}
    save_file(arrays, file, metadata=table.description() or None)
