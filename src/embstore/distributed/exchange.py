"""What travels between ranks, and the mark by which a rank says that it failed and has nothing to send.

    headers                mark, sizes ... for rank 0 | mark, sizes ... for rank 1
    rows                   rows for rank 0 | mark | rows for rank 1 | mark

The marks ride on an exchange that is needed anyway, so a step costs no collective more. When one is set, all
ranks call `share`, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from embstore.arrays import empty_tensor
from embstore.distributed.ranks import TorchRanks


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """gloo does not know every dtype. An empty tensor may have strides that `view` refuses."""
    return rows.view(-1).view(torch.uint8) if rows.numel() else torch.empty(0, dtype=torch.uint8)


def all_to_all(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], ranks: TorchRanks, what: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Sends the first send[0] rows to rank 0, and so on. Returns what comes, and the function that waits."""
    row = rows.shape[1:]
    # The pool of the engine has pages that are mapped already.
    out = empty_tensor((sum(receive), *row), rows.dtype)
    width = rows.dtype.itemsize * row.numel()
    wait = ranks.all_to_all(
        as_bytes(out),
        as_bytes(rows.contiguous()),
        [n * width for n in receive],
        [n * width for n in send],
        what,
    )
    return out, wait


def to_others(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], ranks: TorchRanks, what: str
) -> tuple[torch.Tensor, Callable[[], None]]:
    """`all_to_all` without what stays on this rank: neither `rows` nor what comes has it."""
    own = ranks.rank
    sent, received = ([0 if r == own else n for r, n in enumerate(sizes)] for sizes in (send, receive))
    return all_to_all(rows, sent, received, ranks, what)


def swap_rows(
    out: torch.Tensor,
    received: Sequence[Sequence[slice]],
    rows: torch.Tensor,
    sent: Sequence[Sequence[slice]],
    ranks: TorchRanks,
    what: str,
) -> Callable[[], None]:
    """Sends the slices sent[r] of `rows` to rank r, and puts what rank r sends into the slices received[r] of
    `out`. What is for this rank is copied. Both tensors are contiguous. Returns the function that waits."""
    wait = ranks.exchange_blocks(
        [[as_bytes(out[part]) for part in parts] for parts in received],
        [[as_bytes(rows[part]) for part in parts] for parts in sent],
        what,
    )
    for to, of in zip(received[ranks.rank], sent[ranks.rank], strict=True):
        out[to] = rows[of]
    return wait


def rows_in_turn(sizes: Sequence[int], begin: int = 0) -> list[slice]:
    """Slices of these sizes, one after the other."""
    ends = accumulate(sizes, initial=begin)
    return [slice(at, at + size) for at, size in zip(ends, sizes)]


class Layout:
    """Blocks of several ranks in one buffer: those for other ranks, then those of other ranks, then the own
    one, which does not travel.

        send=[5, 5, 5], receive=[2, 2, 2], own=4, rank=1
        buffer   to 0 | to 2 | of 0 | of 2 | own
        to        0     5                    14         by rank: [0, 14, 5]
        of                     10     12     14                  [10, 14, 12]

    send, receive  elements for, and of, each rank; nothing is sent to this rank, whatever they say
    own            elements of the own block
    to, of         where the block for, or of, each rank begins; on this rank both are the own one
    """

    def __init__(self, send: Sequence[int], receive: Sequence[int], own: int, rank: int) -> None:
        self.send = [0 if r == rank else n for r, n in enumerate(send)]
        self.receive = [0 if r == rank else n for r, n in enumerate(receive)]
        ends = list(accumulate([*self.send, *self.receive], initial=0))
        world = len(self.send)
        self.to, self.of, self.own = ends[:world], ends[world:-1], ends[-1]
        self.to[rank] = self.of[rank] = self.own
        self.size = self.own + own
        self._rank, self._sent = rank, ends[world]

    def exchange(self, buffer: torch.Tensor, ranks: TorchRanks, what: str) -> Callable[[], None]:
        """Sends the blocks for other ranks. Returns the function that waits for theirs."""
        return self._exchange(buffer, buffer[: self._sent], self.send, ranks, what)

    def spread(self, buffer: torch.Tensor, ranks: TorchRanks, what: str) -> None:
        """Sends the own block to every other rank, in a layout without blocks for them, and waits. (gloo's
        all-gather took three times as long.)"""
        block = buffer[self.own :]
        others = len(self.send) - 1
        send = [0 if r == self._rank else block.numel() for r in range(others + 1)]
        self._exchange(buffer, block if others == 1 else block.repeat(others), send, ranks, what)()

    def _exchange(
        self, buffer: torch.Tensor, outgoing: torch.Tensor, send: list[int], ranks: TorchRanks, what: str
    ) -> Callable[[], None]:
        width = buffer.dtype.itemsize
        return ranks.all_to_all(
            as_bytes(buffer[self._sent : self.own]),
            as_bytes(outgoing),
            [n * width for n in self.receive],
            [n * width for n in send],
            what,
        )


def swap(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], ranks: TorchRanks, what: str
) -> torch.Tensor:
    """`all_to_all`, and waits."""
    out, wait = all_to_all(rows, send, receive, ranks, what)
    wait()
    return out


def swap_headers(
    headers: torch.Tensor, failures: list[BaseException], ranks: TorchRanks, what: str
) -> Callable[[], torch.Tensor]:
    """Sends headers[r] of (world, n) to rank r. Returns the function that waits for those of all ranks.

    A rank that has nothing valid to send has the reason in `failures`; then all ranks raise.
    """
    # One type on all ranks, whatever they were given: a message of another size would end the process.
    mark = torch.full((ranks.world, 1), int(bool(failures)), dtype=torch.int64)
    sent = torch.cat([mark, headers.to(torch.int64)], 1)
    ones = [1] * ranks.world
    received, wait = all_to_all(sent, ones, ones, ranks, what)

    def finish() -> torch.Tensor:
        wait()
        if received[:, 0].any():
            ranks.share(failures.pop() if failures else None, what)
        return received[:, 1:]

    return finish


def with_marks(counts: Sequence[int]) -> torch.Tensor:
    """(n) for n = sum of counts: where each row is once the rows of every rank are followed by a mark."""
    ranks = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.arange(sum(counts)) + ranks


def swap_with_marks(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    failures: list[BaseException],
    ranks: TorchRanks,
    what: str,
) -> torch.Tensor:
    """Exchanges rows that lie at `with_marks(send)`; what comes lies at `with_marks(receive)`.

    A rank whose rows are not what they should be has the reason in `failures`; then all ranks raise.
    """
    rows[marks_at(send)] = float(bool(failures))
    out = swap(rows, [n + 1 for n in send], [n + 1 for n in receive], ranks, what)
    if failures or out[marks_at(receive), 0].any():
        ranks.share(failures.pop() if failures else None, what)
    return out


def marks_at(counts: Sequence[int]) -> torch.Tensor:
    """Where the marks are among rows that lie at `with_marks(counts)`."""
    return torch.tensor(counts).cumsum(0) + torch.arange(len(counts))
