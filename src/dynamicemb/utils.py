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
    """Rows as text in columns, with a line below the headers: the first row where none are given.

    sub_headers  draws a line below the first row too
    """
    lines = [[str(cell) for cell in row] for row in table]
    top = list(headers) if headers is not None else lines.pop(0)
    widths = [max(map(len, column)) for column in zip(top, *lines, strict=True)]
    rule = " | ".join("-" * width for width in widths)
    text = [" | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
    text[:0] = [" | ".join(cell.center(w) for cell, w in zip(top, widths, strict=True)), rule]
    if sub_headers:
        text.insert(3, rule)
    return "\n".join(text)


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
