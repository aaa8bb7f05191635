"""The embstore side: modules whose tables are filled before the clock starts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import embstore

from .ids import scatter

BLOCK_ROWS = 1 << 17
INITIALIZER_BOUND = 0.05


def blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, BLOCK_ROWS):
        yield start, min(start + BLOCK_ROWS, last)


def roomy_capacity(rows: int) -> int:
    """Two thirds full: at this load factor no bucket of 128 is expected to overflow, so all rows stay."""
    return rows * 3 // 2


def embedding(dim: int, optimizer: Any, capacity_rows: int, **options: Any) -> Any:
    return embstore.Embedding(
        dim=dim,
        optimizer=optimizer,
        initializer=embstore.Uniform(-INITIALIZER_BOUND, INITIALIZER_BOUND),
        init_capacity=capacity_rows,
        max_capacity=capacity_rows,
        **options,
    ).train()


def twin_of(weights: torch.Tensor, optimizer: Any) -> Any:
    """An embstore.Embedding that holds the rows of a static table, row r under the key scatter(r)."""
    rows, dim = weights.shape
    module = embedding(dim, optimizer, roomy_capacity(rows))
    for start, end in blocks(0, rows):
        module.table.insert_or_assign(scatter(np.arange(start, end)), weights[start:end])
    if len(module.table) != rows:
        raise RuntimeError(f"the table should hold all {rows} rows but holds {len(module.table)}")
    return module


def fill(table: Any, first: int, rows: int) -> None:
    """Inserts the scattered numbers from `first` on until the table holds so many rows."""
    for start, end in blocks(first, first + 2 * rows):
        table.find_or_insert(scatter(np.arange(start, end)))
        if len(table) >= rows:
            return
    raise RuntimeError(f"the table should hold {rows} rows but holds {len(table)}")


def full_embedding(dim: int, optimizer: Any, capacity_rows: int, first: int) -> Any:
    """An embstore.Embedding at load factor 1.0, filled with the scattered numbers from `first` on.

    Buckets fill unevenly, so it takes about half as many keys again until the last one is full.
    """
    module = embedding(dim, optimizer, capacity_rows, score_strategy="timestamp")
    fill(module.table, first, capacity_rows)
    return module


def require_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """After so many equal steps both sides should hold the same rows; else they did not do the same work."""
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
        worst = (ours - theirs).abs().max().item()
        raise RuntimeError(f"the two sides should hold the same rows but differ by up to {worst:g}")
