"""What ranks do in the tests of `embstore.distributed`. Every function runs on all ranks of a group."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from embstore.distributed.cells import CellLayout, Cells
from embstore.distributed.process_groups import GlooGroup
from embstore.distributed.ranks import TorchRanks, ranks_of


class OwnError(Exception):
    """Of a class that the other ranks cannot make."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


FAILURES: dict[str, Callable[[], Any]] = {
    "errno": lambda: OSError(28, "No space left on device", "/data/rows"),
    "key": lambda: KeyError("user"),
    "own": lambda: OwnError(7, "lost"),
    "ctrl-c": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "codec": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}


def outcome(action: Callable[[], Any]) -> tuple[str, str, int | None]:
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "errno", None)
    return "nothing", "", None


def fail(method: str, which: str, failing: int) -> tuple[str, str, int | None]:
    ranks = ranks_of()

    def work() -> int:
        if ranks.rank == failing:
            raise FAILURES[which]()
        return ranks.rank

    def share() -> None:
        ranks.share(FAILURES[which]() if ranks.rank == failing else None)

    answer = outcome(share if method == "share" else lambda: getattr(ranks, method)(work))
    assert ranks.gather(ranks.rank) == list(range(ranks.world))  # the ranks are still in step
    return answer


def unpicklable_result(failing: int) -> tuple[str, str, int | None]:
    ranks = ranks_of()
    return outcome(lambda: ranks.agree(lambda: (lambda: 0) if ranks.rank == failing else 0))


def gathered(sizes: list[int]) -> list[list[bytes]]:
    ranks = ranks_of()
    return [ranks.all_gather(bytes([ranks.rank]) * (size * (ranks.rank + 1)), "sizes") for size in sizes]


def gathered_rows(rows: int) -> Any:
    ranks = ranks_of()
    return ranks.gather_rows(np.full((rows * ranks.rank, 3), ranks.rank, np.float32))


def exchanged(sizes: list[int]) -> bool:
    """Whether everything arrives: rank r sends size * (r + 1) + destination bytes, from bytes of its own."""
    ranks = ranks_of()
    assert isinstance(ranks, TorchRanks)
    world, rank = ranks.world, ranks.rank

    def message(sender: int, to: int, size: int) -> torch.Tensor:
        values = torch.arange(size * (sender + 1) + to if size else 0)
        return (values * (2 * sender + 1) + to).to(torch.uint8)

    waits = []
    for size in sizes:  # all on their way at once
        sent = [message(rank, to, size) for to in range(world)]
        wanted = [message(sender, rank, size) for sender in range(world)]
        out = torch.empty(sum(len(part) for part in wanted), dtype=torch.uint8)
        counts = [len(part) for part in wanted], [len(part) for part in sent]
        waits.append((ranks.all_to_all(out, torch.cat(sent), *counts), out, torch.cat(wanted)))
    waits.reverse()  # in any order
    for wait, out, wanted_bytes in waits:
        wait()
        if not torch.equal(out, wanted_bytes):
            return False
    return True


def cells_there_and_back(sizes: list[list[int]], owners: list[int]) -> dict[str, Any]:
    """sizes[r]: rows of each cell in the batch of rank r. A key is 1000 * rank + 100 * cell + number."""
    ranks = ranks_of()
    assert isinstance(ranks, TorchRanks)
    rank = ranks.rank
    keys = [1000 * rank + 100 * cell + i for cell, n in enumerate(sizes[rank]) for i in range(n)]
    sent = [[n if owner == rank else 0 for n, owner in zip(row, owners, strict=True)] for row in sizes]
    cells = Cells(owners, sizes[rank], sent, rank)
    batch = torch.tensor(keys, dtype=torch.int64)
    owned, wait = cells.ask(batch, ranks, "asking")
    wait()
    given = cells.give_back(batch[:, None].repeat(1, 3).float(), ranks, "giving back")
    layout = CellLayout(cells, 2)  # the answer to key k is (k, -k)
    buffer = torch.full((layout.size,), float("nan"))
    rows = buffer.view(-1, 2)
    for sender, to in enumerate(layout.to):
        theirs = given[[int(k) // 1000 == sender for k in given[:, 0]], 0]
        if sender != rank:
            rows[to // 2 :][: len(theirs)] = torch.stack([theirs, -theirs], 1)
    for part, owner in zip(cells.mine, owners, strict=True):
        if owner == rank:
            mine = batch[part].float()
            rows[layout.own // 2 :][part] = torch.stack([mine, -mine], 1)
    layout.exchange(buffer, ranks, "answering")()
    answer = rows[layout.own // 2 :]
    return {
        "owned": owned.tolist(),
        "given": given[:, 2].int().tolist(),
        "answered": torch.equal(answer, torch.stack([batch, -batch], 1).float()),
    }


def forgotten(nbytes: int) -> list[int]:
    """Nobody waits for the first exchange, and its pieces are let go before the other rank has come."""
    ranks = ranks_of()
    assert isinstance(ranks, TorchRanks)
    others = [nbytes * (r != ranks.rank) for r in range(ranks.world)]
    ranks.gather(0)
    time.sleep(0.3 * ranks.rank)
    found = []
    for number in range(2):
        out, rows = torch.zeros(nbytes, dtype=torch.uint8), torch.full((nbytes,), 7 + number).to(torch.uint8)
        wait = ranks.all_to_all(out, rows, others, others)
        if number == 0:
            del wait, out, rows
            gc.collect()
        else:
            wait()
            found = out.unique().tolist()
    return found


def kept_alive_by_a_failure() -> bool:
    ranks, seen = ranks_of(), []

    class Rows:
        pass

    def work() -> None:
        rows = Rows()
        seen.append(weakref.ref(rows))
        if ranks.rank == 1:
            raise OSError("full")

    gc.disable()
    try:
        outcome(lambda: ranks.agree(work))
        outcome(lambda: ranks.share(OSError("full") if ranks.rank == 1 else None))
        return seen[0]() is not None
    finally:
        gc.enable()


def own_timeouts() -> list[float]:
    some = dist.new_group([0, 1], timeout=timedelta(seconds=55))
    made = [GlooGroup(purpose="tests"), GlooGroup(purpose="tests")]
    assert ranks_of().gather(dist.get_rank()) == [0, 1, 2]
    if dist.get_rank() < 2:
        made.append(GlooGroup(some))
    ranks_of().gather(0)  # who leaves while another still connects breaks its connection
    return [own.group.options._timeout.total_seconds() for own in made]


def absent(absentees: list[int], fresh: bool) -> tuple[str, str, float]:
    """All ranks but some make a call; `fresh`: it is the first one."""
    if not fresh:
        ranks_of().gather(0)
    begin = time.monotonic()
    if dist.get_rank() in absentees:
        return "", "", 0.0
    kind, message, _ = outcome(lambda: ranks_of(None, "state_dict()").gather(0))
    return kind, message, time.monotonic() - begin


def different_calls() -> tuple[str, str, int | None]:
    call = "dump()" if dist.get_rank() == 0 else "load()"
    return outcome(lambda: ranks_of(None, call).gather(0))


def reported() -> tuple[str, str, int | None]:
    """Rank 1 fails where no exchange tells the others, and goes away."""
    ranks = ranks_of()
    ranks.gather(0)
    if ranks.rank == 1:
        ranks.report(OSError("the store of this rank is full"))
        return "", "", None
    return outcome(lambda: ranks.gather(0, "a forward pass"))


def killed(rank: str, folder: str) -> None:
    """A process of its own; rank 1 kills itself while the others wait for it."""
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=3, timeout=timedelta(seconds=20))
    ranks = ranks_of()
    assert isinstance(ranks, TorchRanks)
    ranks.gather(0)
    begin = time.monotonic()
    if rank == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    print(*outcome(lambda: ranks.gather(0, "a training step"))[:2], f"{time.monotonic() - begin:.1f} s")
    os._exit(0)
