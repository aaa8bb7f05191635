"""Bytes from every rank to every other: a message for each pair of ranks, in pieces.

    rank 0   | to 0 | to 1 .......... |        wait = exchange(group, 0, out, rows, receive, send)
                      ══► ══► ══►              ...
                      a piece each             wait()

gloo's own all-to-all wakes a thread of its pool and writes a message as a whole before it reads. Between two
ranks of one host it takes a third longer for megabytes, with four times as many switches between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 1 << 20  # measured: 6.8 MB take 1.75 ms between two ranks, 2.2 ms as one message
TAG = 0x656D6273  # the program's own send and recv have others

# The pieces of each group that nobody has waited for, by exchange, the oldest first. gloo forgets a piece
# whose handle goes, and its connection is stuck; so they stay until a later exchange is complete.
_unfinished: WeakKeyDictionary[Any, list[list[Any]]] = WeakKeyDictionary()


def exchange(
    group: Any,
    rank: int,
    out: torch.Tensor,
    rows: torch.Tensor,
    receive: Sequence[int],
    send: Sequence[int],
) -> Callable[[], None]:
    """Sends the first send[0] elements of `rows` to rank 0, and so on; receives into `out` likewise. Both are
    flat tensors on the CPU. All ranks make their exchanges in the same order.

    Returns the function that waits. It raises RuntimeError when a rank ends or does not take part within the
    timeout of the group.
    """
    sent, received = rows.split(list(send)), out.split(list(receive))
    if send[rank]:
        received[rank].copy_(sent[rank])
    return exchange_blocks(group, rank, [[part] for part in received], [[part] for part in sent])


def exchange_blocks(
    group: Any,
    rank: int,
    received: Sequence[Sequence[torch.Tensor]],
    sent: Sequence[Sequence[torch.Tensor]],
) -> Callable[[], None]:
    """Sends sent[r] to rank r, block by block, and fills received[r] with what rank r sends: as many blocks,
    of the same sizes, wherever they lie. They are flat tensors on the CPU. Those of this rank stay.

    Returns the function that waits, and raises as `exchange` does.
    """
    world = len(sent)
    peers = [(rank + i) % world for i in range(1, world)]  # every rank begins with another one
    pieces = [group.recv([piece], peer, TAG) for peer in peers for piece in _pieces(received[peer])]
    pieces += [group.send([piece], peer, TAG) for peer in peers for piece in _pieces(sent[peer])]
    unfinished = _unfinished.setdefault(group, [])
    unfinished.append(pieces)

    def wait() -> None:
        # Between two ranks pieces arrive in the order of the exchanges, so this waits no longer.
        while pieces:
            oldest = unfinished[0]
            for piece in oldest:
                piece.wait()
            oldest.clear()
            del unfinished[0]

    return wait


def _pieces(blocks: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for block in blocks:
        if block.numel():
            yield from block.split(PIECE_BYTES // block.element_size())
