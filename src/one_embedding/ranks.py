"""Ids and vectors between ranks: every id is looked up by the rank that owns it.

Every rank takes part in every exchange, whatever its own ids are; a rank that fails says so in the exchange,
and then all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from embstore import Ownership, owner
from embstore.process_groups import GlooGroup


class Ranks:
    """The ranks of torch.distributed, or this process alone."""

    def __init__(self) -> None:
        self._own: GlooGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            # Rows are in host memory, which gloo moves.
            if self.world > 1 and dist.get_backend() != "gloo":
                self._own = GlooGroup()

    @property
    def group(self) -> Any:
        return self._own.group if self._own else dist.group.WORLD

    def together(self, action: Callable[[], Any], what: str) -> Any:
        """Runs the action on every rank; if it fails on some, all raise."""
        if self.world == 1:
            return action()
        error: Exception | None = None
        result = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failed = torch.zeros(self.world, dtype=torch.int64)
        failed[self.rank] = error is not None
        dist.all_reduce(failed, group=self.group)
        if error is not None:
            raise error
        if failed.any():
            ranks = failed.nonzero().flatten().tolist()
            raise RuntimeError(f"{what} failed on rank {ranks[0]}, so it is given up here too")
        return result

    def same_name(self, name: str) -> str:
        """The name that rank 0 has."""
        if self.world == 1:
            return name
        names = [name]
        dist.broadcast_object_list(names, src=0, group=self.group)
        return names[0]

    def owners(self, keys: torch.Tensor) -> torch.Tensor:
        return owner(keys, self.world, Ownership.XXH64)

    def swap(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Sends `sent[r]` rows to each rank r, in order, and returns what came."""
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out

    def look_up(self, columns: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Vectors of ids: columns (n, 2) hold an id and a table each; `answer` is called on their owner."""
        owners = self.owners(columns[:, 0].contiguous())
        order = torch.argsort(owners, stable=True)
        sent = torch.bincount(owners, minlength=self.world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        to, back = sent.tolist(), received.tolist()
        asked = self.swap(columns[order], to, back)
        vectors = self.together(lambda: answer(asked), "a lookup")
        mine = _Swap.apply(vectors, self, back, to)
        return mine[torch.argsort(order)]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ranks: Ranks, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.way_back = ranks, received, sent
        return ranks.swap(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks, sent, received = ctx.way_back
        return ranks.swap(gradient, sent, received), None, None, None
