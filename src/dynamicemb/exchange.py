"""The owners' part of a step: they look up what all ranks asked for, and the vectors travel back.

    lookup ──► send ──► ... the program goes on ... ──► receive ──► vectors of this rank

Every collective here is issued by every rank in every step, whatever its batch holds. A rank whose lookup
fails says so with its vectors, and all of them raise when they receive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dynamicemb.wire import Wire
from embstore.arrays import empty_tensor
from embstore.distributed.cells import Cells
from embstore.distributed.columns import Columns
from embstore.distributed.exchange import Layout, rows_in_turn, swap_rows
from embstore.distributed.ranks import TorchRanks
from embstore.distributed.routing import sum_rows
from embstore.nn.batch import Access, Batch

STEP = "a step of dynamic tables"  # in errors


class Sent:
    """The vectors of a batch on their way to the ranks that asked.

    layout  of the buffer that the batch writes into
    marks   behind what travels: where those for the ranks are in the buffer, and those of the owners, by
            rank; what they say of this rank is not used
    """

    def __init__(
        self, batch: Batch, access: Access, layout: Layout, marks: Sequence[Sequence[int]], ranks: TorchRanks
    ) -> None:
        self.batch, self.layout, self.ranks = batch, layout, ranks
        sent, self._marks = ([at for r, at in enumerate(places) if r != ranks.rank] for places in marks)
        self._buffer = batch.out
        assert self._buffer is not None
        self._failures: list[BaseException] = []
        try:
            batch.forward(access)
        except BaseException as error:  # every rank gets to know
            self._failures.append(error)
        self._buffer[sent] = float(bool(self._failures))
        self._wait = layout.exchange(self._buffer, ranks, STEP)

    def blocks(self) -> torch.Tensor:
        """The buffer, once the blocks of the owners are there. To be called once."""
        self._wait()
        blocks, self._buffer = self._buffer, None
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


class BagGradients:
    """How the gradient of the bags of this rank is laid out for its owners: feature by feature, so that those
    of one feature, which a row reads in any order, lie in a piece that fits a cache.

    columns  each feature by itself, in the order of the bags
    owners   the rank of each feature, where ranks have whole tables; empty: all ranks get all
    samples  batch size of each rank
    """

    def __init__(
        self, columns: Columns, owners: Sequence[int], samples: Sequence[int], rank: int, wire: Wire
    ) -> None:
        self.columns, self.own, self._wire = columns, samples[rank], wire
        world, widths = len(samples), columns.widths
        sent, befores = [0] * world, []  # columns for each rank; of the owner, before each feature
        for feature, w in enumerate(widths):
            owner = owners[feature] if owners else rank
            befores.append(sent[owner])
            sent[owner] += w
        width = sent[rank]
        self.layout = Layout(
            [self.own * w for w in sent], [n * width for n in samples], self.own * width, rank
        )
        self._starts = [
            self.layout.to[owners[feature] if owners else rank] + self.own * before
            for feature, before in enumerate(befores)
        ]

    def arranged(self, gradient: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """The layout, and a buffer with the gradient in it, in the type in which it travels."""
        gradient = self._wire.gradient(gradient).contiguous()
        buffer = empty_tensor((self.layout.size,), gradient.dtype)
        self.columns.split(gradient, buffer, self._starts)
        return self.layout, buffer


class SumOfOwners(torch.autograd.Function):
    """Pooled vectors: each owner sums its share of every bag; the shares of a bag are added up in float32.

        the bags of all ranks on each owner  ->  (own samples, columns)

    Backward sends the gradient of the own samples to all owners. `anchor` makes autograd call it; None in
    evaluation.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor | None, sent: Sent, gradients: BagGradients) -> Any:
        ctx.sent, ctx.gradients = sent, gradients
        shape = gradients.own, gradients.columns.width
        blocks = sent.blocks()
        shares = [blocks[at : at + math.prod(shape)].view(shape) for at in sent.layout.of]
        total = shares[0].to(torch.float32)
        for share in shares[1:]:  # always in this order
            total += share
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layout, everything = ctx.gradients.arranged(gradient)
        layout.spread(everything, ctx.sent.ranks, STEP)
        _update(ctx.sent.batch, everything, ctx.sent.ranks)
        return None, None, None


class ColumnsOfOwners(torch.autograd.Function):
    """Pooled vectors where owners have whole tables: each sends its columns.

        the bags of all ranks on each owner  ->  (own samples, columns)

    Backward sends the gradient of its columns to each owner.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor | None, sent: Sent, gradients: BagGradients, columns: Columns
    ) -> Any:
        ctx.sent, ctx.gradients = sent, gradients
        blocks, layout = sent.blocks(), sent.layout
        out = blocks[layout.own :].view(gradients.own, columns.width)  # the own columns are there
        columns.join(blocks, layout.of, out, sent.ranks.rank)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layout, everything = ctx.gradients.arranged(gradient)
        layout.exchange(everything, ctx.sent.ranks, STEP)()
        _update(ctx.sent.batch, everything, ctx.sent.ranks)
        return None, None, None, None


class AnswersOfOwners(torch.autograd.Function):
    """Single vectors: what the owners answered, put where the batch asked for it.

    (n, dim): reply index[i] for occurrence i
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        sent: Sent,
        dim: int,
        index: torch.Tensor,
        asked: list[int],
        owned: list[int],
        repeated: bool,
        wire: Wire,
    ) -> Any:
        ctx.sent, ctx.wire = sent, wire
        ctx.index, ctx.asked, ctx.owned, ctx.repeated = index, asked, owned, repeated
        blocks = sent.blocks()
        replies = blocks.view(-1, dim)
        numbers = [torch.arange(n) + at // dim for n, at in zip(asked, sent.layout.of, strict=True)]
        out = empty_tensor((index.numel(), dim), replies.dtype)
        return torch.index_select(replies, 0, torch.cat(numbers)[index], out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks = ctx.sent.ranks
        asked, owned = rows_in_turn(ctx.asked), rows_in_turn(ctx.owned)
        received, sent = ([[part] for part in parts] for parts in (owned, asked))
        if ctx.repeated:
            rows = ctx.wire.gradient(sum_rows(gradient, ctx.index, sum(ctx.asked)))
            arrived = empty_tensor((sum(ctx.owned), rows.shape[1]), rows.dtype)
        else:
            gradient = ctx.wire.gradient(gradient).contiguous()
            n, dim = gradient.shape
            order = torch.empty_like(ctx.index)
            order[ctx.index] = torch.arange(n)
            rows, arrived = (empty_tensor((k, dim), gradient.dtype) for k in (n, sum(ctx.owned)))
            for r, part in enumerate(asked):  # what stays here goes to its place at once
                to = arrived[owned[r]] if r == ranks.rank else rows[part]
                torch.index_select(gradient, 0, order[part], out=to)
            received[ranks.rank], sent[ranks.rank] = [], []
        swap_rows(arrived, received, rows, sent, ranks, STEP)()
        _update(ctx.sent.batch, arrived, ranks)
        return (None,) * 8


class CellsOfOwners(torch.autograd.Function):
    """Single vectors where owners have whole cells: they arrive where the batch asked for them.

    (n, dim): the vectors of the own batch, cell by cell
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor | None, sent: Sent, dim: int, cells: Cells, wire: Wire) -> Any:
        ctx.sent, ctx.cells, ctx.wire = sent, cells, wire
        return sent.blocks()[sent.layout.own :].view(-1, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks = ctx.sent.ranks
        arrived = ctx.cells.give_back(ctx.wire.gradient(gradient), ranks, STEP)
        _update(ctx.sent.batch, arrived, ranks)
        return (None,) * 5
