"""The owners' part of a step: they look up what all ranks asked for, and the vectors travel back.

Every collective here is issued by every rank in every step, whatever its batch holds. A rank whose lookup
fails says so with its vectors, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from embstore.arrays import empty_tensor
from embstore.distributed.columns import Columns
from embstore.distributed.exchange import as_bytes, set_marks, swap, swap_with_marks, with_marks
from embstore.distributed.ranks import TorchRanks
from embstore.distributed.routing import sum_rows
from embstore.nn.batch import Access, Batch

STEP = "a step of dynamic tables"  # in errors


def _look_up(batch: Batch, access: Access) -> tuple[torch.Tensor, list[BaseException]]:
    """The vectors that this rank looks up for all, and what failed."""
    out = batch.out
    assert out is not None
    failures: list[BaseException] = []
    try:
        batch.forward(access)
    except BaseException as error:  # every rank gets to know
        failures.append(error)
    return out, failures


def _look_up_and_swap(
    batch: Batch, access: Access, send: Sequence[int], receive: Sequence[int], ranks: TorchRanks
) -> torch.Tensor:
    """The vectors that the owners looked up for this rank, with a mark after those of each owner."""
    out, failures = _look_up(batch, access)
    return swap_with_marks(out, send, receive, failures, ranks, STEP)


def _update(batch: Batch, gradient: torch.Tensor, ranks: TorchRanks) -> None:
    if not batch.slots:
        raise RuntimeError("a batch can be backpropagated once: its rows have already been updated")
    try:
        batch.backward([gradient], [False] * len(batch.requests))
    except BaseException as error:
        ranks.report(error)
        raise


class SumOfOwners(torch.autograd.Function):
    """Pooled vectors: each owner sums its share of every bag; the shares of a bag are added up.

        the bags of all ranks on each owner  ->  (own samples, columns)

    The batch writes its bags to `with_marks(samples)`. Backward sends the gradient of the own samples to all
    owners. `anchor` makes autograd call it; None in evaluation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        batch: Batch,
        access: Access,
        samples: list[int],
        ranks: TorchRanks,
    ) -> Any:
        own = samples[ranks.rank]
        ctx.batch, ctx.samples, ctx.ranks = batch, samples, ranks
        shares = _look_up_and_swap(batch, access, samples, [own] * ranks.world, ranks)
        total = shares[:own]
        for owner in range(1, ranks.world):  # always in this order
            total += shares[owner * (own + 1) :][:own]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own, ranks = gradient.shape[0], ctx.ranks
        if len(set(ctx.samples)) == 1:
            everything = empty_tensor((own * ranks.world, gradient.shape[1]), gradient.dtype)
            ranks.all_gather_rows(as_bytes(everything), as_bytes(gradient.contiguous()), STEP)
        else:
            copies = gradient.repeat(ranks.world, 1)
            everything = swap(copies, [own] * ranks.world, ctx.samples, ranks, STEP)
        _update(ctx.batch, everything, ranks)
        return None, None, None, None, None


class ColumnsOfOwners(torch.autograd.Function):
    """Pooled vectors where owners have whole tables: each sends its columns.

        the bags of all ranks on each owner  ->  (own samples, columns)

    The batch writes its bags to `with_marks(samples)`, at least a column wide. Backward sends the gradient of
    its columns to each owner.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        batch: Batch,
        access: Access,
        samples: list[int],
        columns: Columns,
        ranks: TorchRanks,
    ) -> Any:
        ctx.batch, ctx.samples, ctx.columns, ctx.ranks = batch, samples, columns, ranks
        own = samples[ranks.rank]
        widths = [max(width, 1) for width in columns.widths]  # a mark needs a column
        width = widths[ranks.rank]
        sent, failures = _look_up(batch, access)
        set_marks(sent, samples, bool(failures))
        receive = [(own + 1) * w for w in widths]
        blocks = swap(sent.view(-1), [(n + 1) * width for n in samples], receive, ranks, STEP)
        ends = list(accumulate(receive))
        marks = torch.tensor([end - w for end, w in zip(ends, widths, strict=True)])
        if failures or blocks[marks].any():
            ranks.share(failures.pop() if failures else None, STEP)
        return columns.join(blocks, [0, *ends], own, widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        columns, samples, ranks = ctx.columns, ctx.samples, ctx.ranks
        own, width = gradient.shape[0], columns.widths[ranks.rank]
        blocks = columns.split(gradient.contiguous())
        send = [own * w for w in columns.widths]
        everything = swap(blocks, send, [n * width for n in samples], ranks, STEP)
        _update(ctx.batch, everything.view(sum(samples), width), ranks)
        return None, None, None, None, None, None


class AnswersOfOwners(torch.autograd.Function):
    """Single vectors: what the owners answered, put where the batch asked for it.

    The batch writes its vectors to `with_marks(owned)`  ->  (n, dim): reply index[i] for occurrence i
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        batch: Batch,
        access: Access,
        index: torch.Tensor,
        asked: list[int],
        owned: list[int],
        repeated: bool,
        ranks: TorchRanks,
    ) -> Any:
        ctx.batch, ctx.ranks = batch, ranks
        ctx.index, ctx.asked, ctx.owned, ctx.repeated = index, asked, owned, repeated
        replies = _look_up_and_swap(batch, access, owned, asked, ranks)
        out = empty_tensor((index.numel(), replies.shape[1]), replies.dtype)
        return torch.index_select(replies, 0, with_marks(asked)[index], out=out)

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
        _update(ctx.batch, swap(sums, ctx.asked, ctx.owned, ctx.ranks, STEP), ctx.ranks)
        return (None,) * 8
