"""Ids and vectors between ranks: every id is looked up by the rank that owns it.

Every rank takes part in every exchange, whatever its own ids are; a rank that fails says so in the exchange,
and then all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from embstore import Ownership, owner
from embstore.distributed.exchange import swap, swap_headers, swap_with_marks, with_marks
from embstore.distributed.ranks import TorchRanks, ranks_of
from embstore.distributed.routing import route_keys

STEP = "forward() and backward() of an embedding"  # in errors


class Ranks:
    """The ranks of torch.distributed, or this process alone.

    Calls have connections of their own: one that some ranks forget does not meet a step of the others.
    """

    def __init__(self) -> None:
        self._calls = ranks_of(None, "an embedding")
        self._steps = ranks_of(None, purpose=None)
        self.rank, self.world = self._calls.rank, self._calls.world

    def together(self, action: Callable[[], Any], what: str) -> Any:
        """Runs the action on every rank; if it fails on some, all raise."""
        return self._calls.together(action, what)

    def same_name(self, name: str) -> str:
        """The name that rank 0 has."""
        return self._calls.gather(name, "state_dict()")[0]

    def gather_numbers(self, *numbers: float) -> np.ndarray:
        """These numbers of every rank: (ranks, numbers)."""
        return np.stack(self._steps.all_gather_equal(np.array(numbers, np.float64), STEP))

    def owners(self, keys: torch.Tensor) -> torch.Tensor:
        return owner(keys, self.world, Ownership.XXH64)

    def look_up(
        self,
        ask: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        width: int,
    ) -> torch.Tensor:
        """Vectors of ids: `ask` returns ids (n) and their tables (n); `answer` is called for them on their
        owner and returns (n, width). When one of the two fails on a rank, all raise."""
        ranks, failures = self._steps, []
        assert isinstance(ranks, TorchRanks)
        ids = tables = torch.empty(0, dtype=torch.int64)
        try:
            ids, tables = ask()
        except BaseException as error:
            failures.append(error)
        route = route_keys(ids, torch.tensor([0, len(ids)]), self.world, Ownership.XXH64)
        received = swap_headers(route.counts, failures, ranks, STEP)()
        sent, back = route.counts[:, 0].tolist(), received[:, 0].tolist()
        tables = torch.empty_like(tables).scatter_(0, route.index, tables)
        asked = swap(torch.stack([route.keys, tables], 1), sent, back, ranks, STEP)
        vectors = torch.zeros(len(asked), width)
        try:
            vectors = answer(asked[:, 0], asked[:, 1])
        except BaseException as error:
            failures.append(error)
        mine = _Swap.apply(vectors, back, sent, failures, ranks)
        return mine[route.index]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send: list[int],
        receive: list[int],
        failures: list[BaseException],
        ranks: TorchRanks,
    ) -> torch.Tensor:
        ctx.way_back = receive, send, ranks
        padded = rows.new_empty(len(rows) + ranks.world, rows.shape[1])
        padded[with_marks(send)] = rows
        return swap_with_marks(padded, send, receive, failures, ranks, STEP)[with_marks(receive)]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return swap(gradient, *ctx.way_back, STEP), None, None, None, None
