"""Bags as `torch.nn.EmbeddingBag` takes them."""

from __future__ import annotations

import torch

from embstore.lookup import Pooling
from embstore.nn.batch import as_key_tensor, as_offsets, as_weights


def bag_inputs(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    *,
    include_last: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Pooling]:
    """Keys (n), offsets (bags + 1), weights (n) without their graph, and the pooling: ids (n) with offsets
    (bags), or ids (bags, length) without."""
    keys = as_key_tensor(ids)
    if offsets is None:
        if ids.dim() != 2:
            raise ValueError(f"ids should have two dimensions without offsets but have: {ids.dim()}")
        offsets = torch.arange(ids.shape[0] + 1, dtype=torch.int64) * ids.shape[1]
    else:
        if ids.dim() != 1:
            raise ValueError(f"ids should have one dimension with offsets but have: {ids.dim()}")
        offsets = as_offsets(offsets, keys.numel(), include_last=include_last)
    values = None if weights is None else as_weights(weights, keys.numel()).detach()
    return keys, offsets, values, Pooling.MEAN if mode == "mean" else Pooling.SUM
