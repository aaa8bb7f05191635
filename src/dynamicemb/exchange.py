"""The owners' part of a step: they look up what all ranks asked for, and the vectors travel back.

    lookup ──► send ──► ... the program goes on ... ──► receive ──► vectors of this rank

Every collective here is issued by every rank in every step, whatever its batch holds. A rank whose lookup
fails says so with its vectors, and all of them raise when they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dynamicemb.wire import Wire
from embstore.arrays import empty_tensor
from embstore.distributed.columns import Columns
from embstore.distributed.exchange import all_to_all, as_bytes, marks_at, swap, with_marks
from embstore.distributed.ranks import TorchRanks
from embstore.distributed.routing import sum_rows
from embstore.nn.batch import Access, Batch

STEP = "a step of dynamic tables"  # in errors


class Sent:
    """The vectors of a batch on their way to the ranks that asked; they lie at `with_marks(send)`.

    send     rows for each rank
    receive  rows from each owner; a mark follows them
    widths   elements of a row of each owner
    ends     where the block of each owner ends in what comes
    """

    def __init__(
        self,
        batch: Batch,
        access: Access,
        send: Sequence[int],
        receive: Sequence[int],
        widths: Sequence[int],
        ranks: TorchRanks,
    ) -> None:
        self.batch, self.ranks = batch, ranks
        out = batch.out
        assert out is not None
        self._failures: list[BaseException] = []
        try:
            batch.forward(access)
        except BaseException as error:  # every rank gets to know
            self._failures.append(error)
        out[marks_at(send)] = float(bool(self._failures))
        outgoing = [(rows + 1) * out.shape[1] for rows in send]
        incoming = [(rows + 1) * width for rows, width in zip(receive, widths, strict=True)]
        self.ends = list(accumulate(incoming))
        self._marks = [end - width for end, width in zip(self.ends, widths, strict=True)]
        self._blocks: torch.Tensor | None
        self._blocks, self._wait = all_to_all(out.view(-1), outgoing, incoming, ranks, STEP)

    def blocks(self) -> torch.Tensor:
        """What the owners sent, one after the other, each with its mark behind. To be called once."""
        self._wait()
        blocks, self._blocks = self._blocks, None
        assert blocks is not None
        if self._failures or blocks[self._marks].any():
            self.ranks.share(self._failures.pop() if self._failures else None, STEP)
        return blocks


class Pending:
    """Vectors that have not arrived yet, in the place of a tensor; `receive` waits for them."""

    def __init__(self, receive: Callable[[], torch.Tensor]) -> None:
        self.receive = receive

    def view(self, *shape: int) -> Pending:
        """TorchRec gives vectors the shape that they will have anyway."""
        return self


def _update(batch: Batch, gradient: torch.Tensor, ranks: TorchRanks) -> None:
    if not batch.slots:
        raise RuntimeError("a batch can be backpropagated once: its rows have already been updated")
    try:
        batch.backward([gradient], [False] * len(batch.requests))
    except BaseException as error:
        ranks.report(error)
        raise


class SumOfOwners(torch.autograd.Function):
    """Pooled vectors: each owner sums its share of every bag; the shares of a bag are added up in float32.

        the bags of all ranks on each owner  ->  (own samples, columns)

    Backward sends the gradient of the own samples to all owners. `anchor` makes autograd call it; None in
    evaluation.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor | None, sent: Sent, samples: list[int], wire: Wire) -> Any:
        ranks = sent.ranks
        own = samples[ranks.rank]
        ctx.sent, ctx.samples, ctx.wire = sent, samples, wire
        shares = sent.blocks().view(ranks.world, own + 1, -1)
        total = shares[0, :own].to(torch.float32)
        for owner in range(1, ranks.world):  # always in this order
            total += shares[owner, :own]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own, ranks = gradient.shape[0], ctx.sent.ranks
        gradient = ctx.wire.gradient(gradient)
        if len(set(ctx.samples)) == 1:
            everything = empty_tensor((own * ranks.world, gradient.shape[1]), gradient.dtype)
            ranks.all_gather_rows(as_bytes(everything), as_bytes(gradient.contiguous()), STEP)
        else:
            copies = gradient.repeat(ranks.world, 1)
            everything = swap(copies, [own] * ranks.world, ctx.samples, ranks, STEP)
        _update(ctx.sent.batch, everything, ranks)
        return None, None, None, None


class ColumnsOfOwners(torch.autograd.Function):
    """Pooled vectors where owners have whole tables: each sends its columns.

        the bags of all ranks on each owner  ->  (own samples, columns)

    Backward sends the gradient of its columns to each owner.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor | None, sent: Sent, samples: list[int], columns: Columns, wire: Wire
    ) -> Any:
        ctx.sent, ctx.samples, ctx.columns, ctx.wire = sent, samples, columns, wire
        own = samples[sent.ranks.rank]
        return columns.join(sent.blocks(), [0, *sent.ends], own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        columns, samples, ranks = ctx.columns, ctx.samples, ctx.sent.ranks
        own, width = gradient.shape[0], columns.widths[ranks.rank]
        blocks = columns.split(ctx.wire.gradient(gradient).contiguous())
        send = [own * w for w in columns.widths]
        everything = swap(blocks, send, [n * width for n in samples], ranks, STEP)
        _update(ctx.sent.batch, everything.view(sum(samples), width), ranks)
        return None, None, None, None, None


class AnswersOfOwners(torch.autograd.Function):
    """Single vectors: what the owners answered, put where the batch asked for it.

    (n, dim): reply index[i] for occurrence i
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        sent: Sent,
        index: torch.Tensor,
        asked: list[int],
        owned: list[int],
        repeated: bool,
        wire: Wire,
    ) -> Any:
        ctx.sent, ctx.wire = sent, wire
        ctx.index, ctx.asked, ctx.owned, ctx.repeated = index, asked, owned, repeated
        blocks = sent.blocks()
        replies = blocks.view(sum(asked) + len(asked), -1)
        out = empty_tensor((index.numel(), replies.shape[1]), replies.dtype)
        return torch.index_select(replies, 0, with_marks(asked)[index], out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        n, ranks = ctx.index.numel(), ctx.sent.ranks
        if ctx.repeated:
            sums = ctx.wire.gradient(sum_rows(gradient, ctx.index, sum(ctx.asked)))
        else:
            gradient = ctx.wire.gradient(gradient)
            order = torch.empty_like(ctx.index)
            order[ctx.index] = torch.arange(n)
            sums = empty_tensor((n, gradient.shape[1]), gradient.dtype)
            torch.index_select(gradient.contiguous(), 0, order, out=sums)
        _update(ctx.sent.batch, swap(sums, ctx.asked, ctx.owned, ranks, STEP), ranks)
        return (None,) * 7
