"""Which rank this is, and the two collectives that everything else is made of.

    init()                  horovod where it is initialised, else torchrun's ranks, else a single process
    tool().all_to_all(...)  parts for each rank out, parts from each rank in
    tool().all_gather(...)  the arrays of all ranks

Every rank makes the same calls in the same order, whatever its data. A failure of one rank travels with the
next exchange, so that all of them raise.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from embstore.distributed.ranks import Ranks, TorchRanks, ranks_of

TOOLS = ("horovod", "torch", "single")


class Single:
    """One process."""

    name = "single"
    rank = 0
    size = 1
    ranks = Ranks()  # how they come to one verdict

    def all_to_all(self, parts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        """Sends parts[r] to rank r; returns what rank r sent, counts[r] elements of the same type."""
        return list(parts)

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays of all ranks; lengths may differ, the other dimensions may not."""
        return [array]


class Torch(Single):
    """torch.distributed over gloo; `torchrun` sets the environment."""

    name = "torch"

    def __init__(self) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise ImportError("comm_tool='torch' needs torch: pip install torch") from error
        self._torch = torch
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
            atexit.register(_end_default_group)
        # The program may use the default group, also from other threads.
        self.ranks = ranks_of(None, "a call of sok", purpose="sok")
        self.rank, self.size = self.ranks.rank, self.ranks.world

    def all_to_all(self, parts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        if not isinstance(self.ranks, TorchRanks):
            return list(parts)
        sent = self._torch.from_numpy(np.concatenate(parts))
        received = self._torch.empty(int(sum(counts)), dtype=sent.dtype)
        self.ranks.all_to_all(received, sent, [int(c) for c in counts], [len(part) for part in parts])()
        return np.split(received.numpy(), np.cumsum(counts)[:-1])

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        lengths = [int(n) for (n,) in self.ranks.all_gather_equal(np.array([len(array)]))]
        padded = np.zeros((max(lengths), *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        # gloo does not know every dtype.
        gathered = self.ranks.all_gather_equal(padded.reshape(-1).view(np.uint8))
        whole = [g.view(array.dtype).reshape(padded.shape) for g in gathered]
        return [part[:length] for part, length in zip(whole, lengths)]


def _end_default_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class Horovod(Single):
    """Horovod, initialised by the program with hvd.init()."""

    name = "horovod"

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
        except ImportError as error:
            raise ImportError("comm_tool='horovod' needs horovod; 'torch' and 'single' do not") from error
        if not hvd.is_initialized():
            raise RuntimeError("hvd.init() should be called before sok.init(comm_tool='horovod')")
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        # Horovod matches operations of the ranks by name.
        self._numbers = itertools.count()
        self.ranks = _HorovodRanks(self)

    def all_to_all(self, parts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        import tensorflow as tf

        splits = tf.constant([len(part) for part in parts], tf.int32)
        name = f"sok_all_to_all_{next(self._numbers)}"
        received, _ = self._hvd.alltoall(tf.constant(np.concatenate(parts)), splits, name=name)
        return np.split(received.numpy(), np.cumsum(counts)[:-1])

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        import tensorflow as tf

        number = next(self._numbers)
        lengths = self._hvd.allgather(
            tf.constant([len(array)], tf.int64), name=f"sok_lengths_{number}"
        ).numpy()
        whole = self._hvd.allgather(tf.constant(array), name=f"sok_all_gather_{number}").numpy()
        return np.split(whole, np.cumsum(lengths)[:-1])


class _HorovodRanks(Ranks):
    """Horovod has a deadline of its own: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."""

    def __init__(self, tool: Horovod) -> None:
        self.rank, self.world, self._tool = tool.rank, tool.size, tool

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        return [part.tobytes() for part in self._tool.all_gather(np.frombuffer(payload, np.uint8))]


_tool: Single | None = None


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True) -> None:
    """Chooses how the processes talk; call it once, before variables and lookups.

    comm_tool             "horovod" (after hvd.init()), "torch" (started by torchrun) or "single". None:
                          horovod where it is initialised, torch where WORLD_SIZE is above 1, else single
    use_legacy_optimizer  accepted for compatibility: optimizers of every Keras are understood as they are
    """
    set_comm_tool(_detect() if comm_tool is None else comm_tool)
    print(f"[SOK INFO] Initialize finished, communication tool: {tool().name}")


def _detect() -> str:
    hvd: Any = sys.modules.get("horovod.tensorflow")
    if hvd is not None and hvd.is_initialized():
        return "horovod"
    return "torch" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"


def set_comm_tool(comm_tool: str) -> None:
    """`init` without the message. The same tool may be set again, another one may not."""
    global _tool
    if comm_tool not in TOOLS:
        raise ValueError(f"comm_tool should be one of {', '.join(TOOLS)} but is: {comm_tool!r}")
    if _tool is not None:
        if _tool.name != comm_tool:
            raise RuntimeError(
                f"comm_tool cannot be set more than once: it is {_tool.name!r}, not {comm_tool!r}"
            )
        return
    _tool = {"horovod": Horovod, "torch": Torch, "single": Single}[comm_tool]()


def tool() -> Single:
    """The tool that `init` chose."""
    if _tool is None:
        raise RuntimeError("Communication tool is not set: call sok.init() first, once in every process")
    return _tool


def tool_or_single() -> Single:
    """For what works alone too: a table before `init` belongs to this process."""
    return _tool or Single()


def agree(error: BaseException | None) -> None:
    """All ranks learn of each other's failures: with any, every rank raises. A collective."""
    tool_or_single().ranks.share(error)
