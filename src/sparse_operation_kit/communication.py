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

from embstore.extras import missing
from embstore.process_groups import GlooGroup

TOOLS = ("horovod", "torch", "single")


class Single:
    """One process."""

    name = "single"
    rank = 0
    size = 1

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
            raise missing("comm_tool='torch'", "torch", error) from error
        self._torch, self._dist = torch, dist
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
            atexit.register(self._end_default_group)
        # The program may use the default one, also from other threads.
        self._gloo = GlooGroup()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def _end_default_group(self) -> None:
        self._gloo.end()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def all_to_all(self, parts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        sent = self._torch.from_numpy(np.concatenate(parts))
        received = self._torch.empty(int(sum(counts)), dtype=sent.dtype)
        self._dist.all_to_all_single(
            received, sent, [int(c) for c in counts], [len(part) for part in parts], group=self._gloo.group
        )
        return np.split(received.numpy(), np.cumsum(counts)[:-1])

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        torch = self._torch
        lengths = [int(n) for n in self._gather_equal(torch.tensor([len(array)]))]
        padded = np.zeros((max(lengths), *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        gathered = self._gather_equal(torch.from_numpy(padded.reshape(-1).view(np.uint8)))
        whole = [g.numpy().view(array.dtype).reshape(padded.shape) for g in gathered]
        return [part[:length] for part, length in zip(whole, lengths)]

    def _gather_equal(self, tensor: Any) -> list[Any]:
        gathered = [self._torch.empty_like(tensor) for _ in range(self.size)]
        self._dist.all_gather(gathered, tensor, group=self._gloo.group)
        return gathered


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
    # The name is missing while another thread imports horovod.
    is_initialized = getattr(sys.modules.get("horovod.tensorflow"), "is_initialized", None)
    if is_initialized is not None and is_initialized():
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
    t = tool_or_single()
    message = b"" if error is None else f"{type(error).__name__}: {error}".encode()
    messages = t.all_gather(np.frombuffer(message, np.uint8))
    if error is not None:
        raise error
    for rank, text in enumerate(messages):
        if len(text):
            raise RuntimeError(f"rank {rank} failed: {text.tobytes().decode()}")
