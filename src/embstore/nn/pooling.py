"""Bags made of single vectors by torch, for paths in which the engine does not pool."""

from __future__ import annotations

import torch

from embstore.lookup import Pooling


def check_offsets(offsets: torch.Tensor, n: int) -> None:
    """Raises ValueError unless the offsets (bags + 1) rise from 0 to n, as the engine wants them."""
    if offsets.numel() == 0 or offsets[0] != 0 or offsets[-1] != n or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets should rise from 0 to {n} but are: {offsets}")


def pool(
    vectors: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, pooling: Pooling
) -> torch.Tensor:
    """Sums or means of bags of vectors (n, dim), with gradients for vectors and weights (n)."""
    lengths = offsets.diff().to(vectors.device)
    numbers = torch.arange(lengths.shape[0], device=vectors.device)
    bag_of = numbers.repeat_interleave(lengths, output_size=vectors.shape[0])
    if weights is not None:
        vectors = (vectors * weights.reshape(-1, 1).to(vectors.device, torch.float32)).to(vectors.dtype)
    if pooling == Pooling.MEAN:
        vectors = vectors / lengths.to(vectors.dtype).index_select(0, bag_of).unsqueeze(1)
    return vectors.new_zeros(lengths.shape[0], vectors.shape[1]).index_add(0, bag_of, vectors)
