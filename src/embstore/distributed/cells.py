"""Cells of a batch that go to one rank each as a whole: they travel from where they lie to where they are
needed, and nothing is sorted or copied in between.

    batch of rank 0         cell 0 | cell 1 | cell 2                      owners=[0, 1, 0]
    owned, by sender        0: cell 0 | 0: cell 2 | 1: cell 0 | 1: cell 2
    owned, by cell          0: cell 0 | 1: cell 0 | 0: cell 2 | 1: cell 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from embstore.arrays import empty_tensor
from embstore.distributed.exchange import Layout, rows_in_turn, swap_rows
from embstore.distributed.ranks import TorchRanks


class Cells:
    """Where cells lie in the batch of this rank, and in what this rank owns of all batches.

    owners  the rank of each cell
    own     rows of each cell in the batch of this rank
    sent    (senders, cells): rows of the cells that this rank owns, 0 of others
    rank    this rank

    mine    slices of the own batch, one for each cell
    asked   those that each rank owns
    counts  rows that each rank sent of each cell that this rank owns
    """

    def __init__(
        self, owners: Sequence[int], own: Sequence[int], sent: Sequence[Sequence[int]], rank: int
    ) -> None:
        self.rank, world = rank, len(sent)
        self.mine = rows_in_turn(own)
        self.asked = [[part for part, owner in zip(self.mine, owners) if owner == r] for r in range(world)]
        self.counts = [[n for n, owner in zip(sizes, owners) if owner == rank] for sizes in sent]
        here = len(self.counts[rank])
        parts = rows_in_turn([n for sizes in self.counts for n in sizes])
        self._by_sender = [parts[s * here : (s + 1) * here] for s in range(world)]
        parts = rows_in_turn([n for of_cell in zip(*self.counts) for n in of_cell])
        self._by_cell = [parts[s::world] for s in range(world)]

    def ask(
        self, keys: torch.Tensor, ranks: TorchRanks, what: str
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Sends the keys of the own batch to their owners. Returns those that this rank owns, by cell, and
        the function that waits for them."""
        out = empty_tensor((sum(map(sum, self.counts)),), keys.dtype)
        return out, swap_rows(out, self._by_cell, keys, self.asked, ranks, what)

    def give_back(self, rows: torch.Tensor, ranks: TorchRanks, what: str) -> torch.Tensor:
        """Sends rows of the own batch (n, dim) to their owners, and waits. Returns those that this rank
        owns, by sender."""
        out = empty_tensor((sum(map(sum, self.counts)), rows.shape[1]), rows.dtype)
        swap_rows(out, self._by_sender, rows.contiguous(), self.asked, ranks, what)()
        return out


class CellLayout(Layout):
    """Vectors on their way back from the owners. The own block is the answer to the own batch, in which
    those of other ranks arrive too; a block of another rank has a mark only."""

    def __init__(self, cells: Cells, dim: int) -> None:
        sizes, rank = [sum(of_sender) for of_sender in cells.counts], cells.rank
        rows = cells.mine[-1].stop if cells.mine else 0
        super().__init__([(n + 1) * dim for n in sizes], [dim] * len(sizes), rows * dim, rank)
        self._dim, first = dim, self.own // dim
        self._received: list[list[slice]] = []
        self._outgoing: list[list[slice]] = []
        for r, (parts, counts) in enumerate(zip(cells.asked, cells.counts, strict=True)):
            if r == rank:
                parts, counts = [], []
            answers = [slice(first + part.start, first + part.stop) for part in parts]
            mark = [] if r == rank else [self.of[r] // dim]
            self._received.append([*answers, *(slice(at, at + 1) for at in mark)])
            self._outgoing.append(rows_in_turn([*counts, *(1 for _ in mark)], self.to[r] // dim))

    def exchange(self, buffer: torch.Tensor, ranks: TorchRanks, what: str) -> Callable[[], None]:
        rows = buffer.view(-1, self._dim)
        return swap_rows(rows, self._received, rows, self._outgoing, ranks, what)
