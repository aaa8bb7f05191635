"""The ids of all programs: an exact bounded zipf, and a bijection that scatters numbers over int64.

row        0          1          2   ...          what a static table gets
key     scatter(0) scatter(1) scatter(2) ...      what embstore gets

How frequent a row is says nothing about its number, as in a table whose rows were given out by a hash or in
the order of a catalogue. (Rows in the order of their frequency share pages and cache lines with their like:
a static table then ran about a fifth faster in a trial.)
"""

from dataclasses import dataclass

import numpy as np
import torch

EXPONENT = 1.05


def scatter(numbers: np.ndarray) -> torch.Tensor:
    """The finalizer of splitmix64, a bijection of 64-bit numbers: distinct numbers give distinct keys."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64))


def zipf_rows(rows: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` row numbers; the r-th of a random order has a probability of exactly c * r ** -1.05."""
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right").clip(max=rows - 1)
    return np.random.default_rng(rows).permutation(rows)[ranks]


@dataclass(frozen=True)
class Batches:
    rows: list[torch.Tensor]  # row numbers
    keys: list[torch.Tensor]  # the same rows, scattered


def zipf_batches(rows: int, batch: int, batches: int, seed: int = 0) -> Batches:
    numbers = zipf_rows(rows, batch * batches, np.random.default_rng(seed)).reshape(batches, batch)
    return Batches([torch.from_numpy(b.copy()) for b in numbers], [scatter(b) for b in numbers])


class NewIds:
    """Batches in which a share of the positions holds ids that were never seen before.

    at(step) depends on the step alone, so both sides see the same ids; a step that is not repeated
    brings ids that are new. Numbers start at `first`, above all rows and fillers in use.
    """

    def __init__(self, base: Batches, share: float, first: int, seed: int = 1) -> None:
        self._base = base.keys
        self._first = first
        self._count = int(len(base.keys[0]) * share)
        rng = np.random.default_rng(seed)
        self._positions = torch.from_numpy(rng.permutation(len(base.keys[0]))[: self._count])

    def at(self, step: int) -> torch.Tensor:
        keys = self._base[step % len(self._base)].clone()
        start = self._first + step * self._count
        keys[self._positions] = scatter(np.arange(start, start + self._count))
        return keys
