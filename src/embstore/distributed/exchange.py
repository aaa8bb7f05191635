"""What travels between ranks, and the mark by which a rank says that it failed and has nothing to send.

    headers                mark, sizes ... for rank 0 | mark, sizes ... for rank 1
    rows                   rows for rank 0 | mark | rows for rank 1 | mark

The marks ride on an exchange that is needed anyway, so a step costs no collective more. When one is set, all
ranks call `share`, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
