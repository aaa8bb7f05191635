"""Which rank this is, and the two collectives that everything else is made of.

    init()                  horovod where it is initialised, else torchrun's ranks, else a single process
    tool().all_to_all(...)  parts for each rank out, parts from each rank in
    tool().all_gather(...)  the arrays of all ranks
    rank(), alltoall(...)   the same by SparseOperationKit's names, on tensors

Every rank makes the same calls in the same order, whatever its data. A failure of one rank travels with the
next exchange, so that all of them raise.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

from embstore.process_groups import GlooGroup
from sparse_operation_kit import bridge

TOOLS = ("horovod", "torch", "single")


class Single:
    """One process."""

    name = "single"
    rank = 0
    size = 1
    local_rank = 0

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
        self._torch, self._dist = torch, dist
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
            atexit.register(self._end_default_group)
        # The program may use the default one, also from other threads.
        self._gloo = GlooGroup()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

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
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        # Horovod matches operations of the ranks by name.
        self._numbers = itertools.count()

    def all_to_all(self, parts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        splits = tf.constant([len(part) for part in parts], tf.int32)
        name = f"sok_all_to_all_{next(self._numbers)}"
        received, _ = self._hvd.alltoall(tf.constant(np.concatenate(parts)), splits, name=name)
        return np.split(received.numpy(), np.cumsum(counts)[:-1])

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        number = next(self._numbers)
        lengths = self._hvd.allgather(
            tf.constant([len(array)], tf.int64), name=f"sok_lengths_{number}"
        ).numpy()
        whole = self._hvd.allgather(tf.constant(array), name=f"sok_all_gather_{number}").numpy()
        return np.split(whole, np.cumsum(lengths)[:-1])


_tool: Single | None = None


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True) -> None:
    """Chooses how the processes communicate; call it once, before variables and lookups.

    comm_tool             "horovod" (after hvd.init()), "torch" (started by torchrun) or "single". None:
                          horovod where it is initialised, torch where WORLD_SIZE is above 1, else single
    use_legacy_optimizer  accepted for compatibility; optimizers of every Keras work
    """
    set_comm_tool(_detect() if comm_tool is None else comm_tool)
    logging.getLogger("sparse_operation_kit").info("communication tool: %s", tool().name)


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
    """The tool, or a single process where `init` was not called."""
    return _tool or Single()


# ---- the functions of SparseOperationKit: one device a rank


def rank() -> int:
    """The number of this process, from 0."""
    return tool().rank


def num_ranks() -> int:
    """How many processes there are."""
    return tool().size


def local_rank() -> int:
    """The number of this process on its machine."""
    return tool().local_rank


def id_in_rank() -> int:
    """The number of this device in its process: 0."""
    tool()
    return 0


def num_gpu_per_rank() -> int:
    """Devices of a process: 1."""
    tool()
    return 1


def global_gpu_id() -> int:
    """The number of this device over all processes: the rank."""
    return tool().rank


def num_gpus() -> int:
    """Devices over all processes: one for each."""
    return tool().size


def alltoall(tensor: Any, splits: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends the first splits[0] rows to rank 0, the next splits[1] to rank 1 and so on. A collective.

    Returns the rows received, by rank, and how many came from each.
    """

    def run(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        t = tool()
        fits = counts.shape == (t.size,) and counts.min() >= 0 and counts.sum() == rows.shape[0]
        agree(
            None
            if fits
            else ValueError(
                f"splits should be {t.size} counts that add up to {rows.shape[0]} but are: {counts.tolist()}"
            )
        )
        received = np.concatenate(t.all_to_all(np.split(counts, t.size), [1] * t.size))
        row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        raw = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        parts = t.all_to_all(np.split(raw, np.cumsum(counts * row_bytes)[:-1]), received * row_bytes)
        return [np.concatenate(parts).view(rows.dtype).reshape(-1, *rows.shape[1:]), received]

    tensor = _rows_of("alltoall", tensor)
    rows, received = _collective(
        "alltoall", run, [tensor, tf.cast(splits, tf.int64)], [tensor.dtype, tf.int64]
    )
    rows.set_shape([None, *tensor.shape[1:]])
    received.set_shape([tool().size])
    return rows, received


def allreduce(tensor: Any, op: str = "average") -> tf.Tensor:
    """The sum, average, max or min over the ranks of tensors of one shape. A collective."""
    if op not in REDUCTIONS:
        raise ValueError(f"op should be one of {', '.join(REDUCTIONS)} but is: {op!r}")

    def run(array: np.ndarray) -> list[np.ndarray]:
        whole = reduce(REDUCTIONS[op], tool().all_gather(np.ascontiguousarray(array).reshape(-1)))
        whole = whole / tool().size if op == "average" else whole
        return [whole.astype(array.dtype).reshape(array.shape)]

    tensor = _numbers("allreduce", tensor)
    (reduced,) = _collective("allreduce", run, [tensor], [tensor.dtype])
    reduced.set_shape(tensor.shape)
    return reduced


def allgather(tensor: Any) -> tf.Tensor:
    """The rows of all ranks, in order of rank; numbers of rows may differ. A collective."""
    tensor = _rows_of("allgather", tensor)
    (rows,) = _collective(
        "allgather",
        lambda rows: [np.concatenate(tool().all_gather(np.ascontiguousarray(rows)))],
        [tensor],
        [tensor.dtype],
    )
    rows.set_shape([None, *tensor.shape[1:]])
    return rows


def broadcast(tensor: Any, root: int) -> tf.Tensor:
    """The tensor of rank `root`, on every rank; all have one shape. A collective."""
    if root not in range(tool().size):
        raise ValueError(f"root should be a rank below {tool().size} but is: {root!r}")

    def run(array: np.ndarray) -> list[np.ndarray]:
        flat = np.ascontiguousarray(array).reshape(-1)
        parts = tool().all_gather(flat if tool().rank == root else flat[:0])
        return [parts[root].reshape(array.shape)]

    tensor = _numbers("broadcast", tensor)
    (value,) = _collective("broadcast", run, [tensor], [tensor.dtype])
    value.set_shape(tensor.shape)
    return value


REDUCTIONS = {"sum": np.add, "average": np.add, "max": np.maximum, "min": np.minimum}


def _numbers(name: str, tensor: Any) -> tf.Tensor:
    tool()
    tensor = tf.convert_to_tensor(tensor)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise ValueError(f"tensor of {name} should hold numbers but holds: {tensor.dtype.name}")
    return tensor


def _rows_of(name: str, tensor: Any) -> tf.Tensor:
    tensor = _numbers(name, tensor)
    if tensor.shape.rank == 0:
        raise ValueError(f"tensor of {name} should have rows but is a number")
    return tensor


def _collective(
    name: str, run: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def collective(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: Any) -> Any:
            raise NotImplementedError(f"{name} has no gradient; rows get theirs through sok.lookup_sparse")

        return bridge.call_together(run, tensors, dtypes), gradient

    result = collective(*inputs)
    return list(result) if isinstance(result, (list, tuple)) else [result]


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
