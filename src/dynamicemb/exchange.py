"""What travels between ranks: keys to their owners, vectors back, gradients to the owners again.

Every collective here is issued by every rank in every step, whatever its batch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from embstore.arrays import empty_tensor
from embstore.routing import sum_rows


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """gloo does not know every dtype. An empty tensor may have strides that `view` refuses."""
    return rows.view(-1).view(torch.uint8) if rows.numel() else torch.empty(0, dtype=torch.uint8)


def all_to_all(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Sends the first send[0] rows to rank 0, and so on. Returns what came, and what to wait for."""
    row = rows.shape[1:]
    # The pool of the engine has pages that are mapped already.
    out = empty_tensor((sum(receive), *row), rows.dtype)
    width = rows.dtype.itemsize * row.numel()
    work = dist.all_to_all_single(
        _bytes(out),
        _bytes(rows.contiguous()),
        [n * width for n in receive],
        [n * width for n in send],
        group=group,
        async_op=async_op,
    )
    return out, work


class SumOfOwners(torch.autograd.Function):
    """Pooled vectors: each owner has summed its share of every bag; the shares of a bag are added up.

        partial (all samples, columns) on each owner  ->  (own samples, columns)

    Backward sends the gradient of the own samples to all owners.
    """

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, samples: list[int], group: dist.ProcessGroup) -> Any:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        own = samples[rank]
        ctx.samples, ctx.group = samples, group
        shares, _ = all_to_all(partial, samples, [own] * world, group)
        total = shares[:own]
        for owner in range(1, world):  # always in this order
            total += shares[owner * own : (owner + 1) * own]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        world = dist.get_world_size(ctx.group)
        own = gradient.shape[0]
        if len(set(ctx.samples)) == 1:
            everything = empty_tensor((own * world, gradient.shape[1]), gradient.dtype)
            dist.all_gather_into_tensor(_bytes(everything), _bytes(gradient.contiguous()), group=ctx.group)
        else:
            copies = gradient.repeat(world, 1)
            everything, _ = all_to_all(copies, [own] * world, ctx.samples, ctx.group)
        return everything, None, None


class AnswersOfOwners(torch.autograd.Function):
    """Single vectors: what the owners answered, put where the batch asked for it.

    answers (keys that I own, dim)  ->  (n, dim): vector index[i] of all replies for occurrence i
    """

    @staticmethod
    def forward(
        ctx: Any,
        answers: torch.Tensor,
        index: torch.Tensor,
        asked: list[int],
        owned: list[int],
        repeated: bool,
        group: dist.ProcessGroup,
    ) -> Any:
        ctx.index, ctx.asked, ctx.owned, ctx.repeated, ctx.group = index, asked, owned, repeated, group
        replies, _ = all_to_all(answers, owned, asked, group)
        out = empty_tensor((index.numel(), answers.shape[1]), answers.dtype)
        return torch.index_select(replies, 0, index, out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        n = ctx.index.numel()
        if ctx.repeated:
            sums = sum_rows(gradient, ctx.index, sum(ctx.asked))
        else:
            order = torch.empty_like(ctx.index)
            order[ctx.index] = torch.arange(n)
            sums = empty_tensor((n, gradient.shape[1]), gradient.dtype)
            torch.index_select(gradient.contiguous(), 0, order, out=sums)
        gradients, _ = all_to_all(sums, ctx.asked, ctx.owned, ctx.group)
        return gradients, None, None, None, None, None
