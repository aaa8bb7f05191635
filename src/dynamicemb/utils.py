"""Small things that clients of the original package import from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dynamicemb.dtypes import torch_to_dyn_emb
from dynamicemb.sizing import DTYPE_NUM_BYTES

__all__ = ["DTYPE_NUM_BYTES", "TORCHREC_TYPES", "assert_tensors_equal", "tabulate", "torch_to_dyn_emb"]

TORCHREC_TYPES = {EmbeddingBagCollection, EmbeddingCollection}


def tabulate(
    table: Sequence[Sequence[Any]], headers: Sequence[str] | None = None, sub_headers: bool = False
) -> str:
    """A table as text: columns as wide as their longest cell, numbers to the right.

    headers      names of the columns; None: the first row has them
    sub_headers  the row after the headers belongs to them
    """
    rows = [list(row) for row in ([headers, *table] if headers is not None else table)]
    width_of = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]

    def shown(row: list[Any]) -> str:
        cells = [
            f"{cell:>{width}}" if isinstance(cell, (int, float)) else f"{cell!s:<{width}}"
            for cell, width in zip(row, width_of, strict=True)
        ]
        return "  ".join(cells).rstrip()

    count = 2 if sub_headers else 1
    ruler = "=" * (sum(width_of) + 2 * (len(width_of) - 1))
    return "\n".join([*map(shown, rows[:count]), ruler, *map(shown, rows[count:])])


def assert_tensors_equal(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    atol: float = 1e-8,
    rtol: float = 1e-5,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Raises AssertionError unless shapes and values agree, and both have the dtype and device if given."""
    for tensor in (tensor1, tensor2):
        assert dtype is None or tensor.dtype == dtype, f"dtype should be {dtype} but is: {tensor.dtype}"
        assert device is None or tensor.device == device, f"device should be {device} but is: {tensor.device}"
    torch.testing.assert_close(tensor1, tensor2, atol=atol, rtol=rtol, check_dtype=False)
