"""Columns of a matrix that live on several ranks: blocks of them, and the whole.

whole     a a b c c c            columns = Columns(ranks=[0, 1, 0], widths=[2, 1, 3])
rank 0    a a c c c
rank 1    b
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from embstore import _core


class Columns:
    """Which columns of a matrix are on which rank.

    ranks   the rank of each group of neighbouring columns
    widths  the columns of each group
    world   number of ranks
    """

    def __init__(self, ranks: Sequence[int], widths: Sequence[int], world: int) -> None:
        self.width = sum(widths)
        self.widths = [0] * world  # of each rank
        # (rank, first column on the rank, first column of the whole, columns); neighbours are joined
        self._runs: list[tuple[int, int, int, int]] = []
        for rank, first, width in zip(ranks, accumulate(widths, initial=0), widths):
            if self._runs and self._runs[-1][0] == rank:
                _, on_rank, before, columns = self._runs.pop()
                self._runs.append((rank, on_rank, before, columns + width))
            else:
                self._runs.append((rank, self.widths[rank], first, width))
            self.widths[rank] += width

    @property
    def strides(self) -> list[int]:
        """Elements of a row in the block of each rank for `join`: at least one, so that a mark fits."""
        return [max(width, 1) for width in self.widths]

    def join(self, blocks: torch.Tensor, starts: Sequence[int], out: torch.Tensor, own: int) -> None:
        """Fills out (rows, width) but for the columns of the rank `own`. The block of rank r begins at
        blocks[starts[r]], its rows are strides[r] apart."""
        strides = self.strides
        size = out.element_size()
        source, target = blocks.data_ptr(), out.data_ptr()
        _core.copy_columns(
            [
                (
                    source + (starts[rank] + first) * size,
                    strides[rank] * size,
                    target + to * size,
                    self.width * size,
                    columns * size,
                )
                for rank, first, to, columns in self._runs
                if rank != own
            ],
            out.shape[0],
        )

    def split(self, whole: torch.Tensor, blocks: torch.Tensor, starts: Sequence[int]) -> None:
        """Writes the columns (rows, widths[r]) of a contiguous matrix to blocks[starts[r]], for each rank."""
        size = whole.element_size()
        source, target = whole.data_ptr(), blocks.data_ptr()
        _core.copy_columns(
            [
                (
                    source + first * size,
                    self.width * size,
                    target + (starts[rank] + to) * size,
                    self.widths[rank] * size,
                    columns * size,
                )
                for rank, to, first, columns in self._runs
            ],
            whole.shape[0],
        )
