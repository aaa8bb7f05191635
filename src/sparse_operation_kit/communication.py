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

from embstore.distributed.ranks import Ranks, TorchRanks, ranks_of
from embstore.extras import missing
from sparse_operation_kit import bridge

TOOLS = ("horovod", "torch", "single")


class Single:
    """One process."""

    name = "single"
    rank = 0
    size = 1
    local_rank = 0
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
            raise missing("comm_tool='torch'", "torch", error) from error
        self._torch = torch
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")
            atexit.register(_end_default_group)
        # The program may use the default group, also from other threads.
        self.ranks = ranks_of(None, "a call of sok", purpose="sok")
        self.rank, self.size = self.ranks.rank, self.ranks.world
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

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
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        # Horovod matches operations of the ranks by name.
        self._numbers = itertools.count()
        self.ranks = _HorovodRanks(self)

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


class _HorovodRanks(Ranks):
    """Horovod has a deadline of its own: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."""

    def __init__(self, tool: Horovod) -> None:
        self.rank, self.world, self._tool = tool.rank, tool.size, tool

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        return [part.tobytes() for part in self._tool.all_gather(np.frombuffer(payload, np.uint8))]


_tool: Single | None = None
_sums_duplicates = True


def init(comm_tool: str | None = None, use_legacy_optimizer: bool = True, same_bits: bool = False) -> None:
    """Chooses how the processes communicate; call it once, before variables and lookups.

    Args:
        comm_tool: "horovod" (after hvd.init()), "torch" (started by torchrun) or "single". None: horovod
            where it is initialised, torch where WORLD_SIZE is above 1, else single.
        use_legacy_optimizer: accepted for compatibility; optimizers of every Keras work.
        same_bits: train the bits that one rank trains on the same global batch. Each rank then sends the
            gradient of every key occurrence, and only the owner sums them, in the order of the batch; by
            default a rank sums its own duplicates first, which sends less.

    Raises:
        ValueError: there is no such tool.
        RuntimeError: another one was chosen before, or hvd.init() was not called.
        ImportError: the tool is not installed.

    Examples:
        >>> import sparse_operation_kit as sok
        >>> sok.init()
    """
    global _sums_duplicates
    set_comm_tool(_detect() if comm_tool is None else comm_tool)
    _sums_duplicates = not same_bits
    logging.getLogger("sparse_operation_kit").info("communication tool: %s", tool().name)


def _detect() -> str:
    # The name is missing while another thread imports horovod.
    is_initialized = getattr(sys.modules.get("horovod.tensorflow"), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return "horovod"
    return "torch" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"


def set_comm_tool(comm_tool: str) -> None:
    """`init` without the message.

    Args:
        comm_tool: "horovod", "torch" or "single". The same tool may be set again, another one may not.

    Raises:
        ValueError: there is no such tool.
        RuntimeError: another one was chosen before.

    Examples:
        >>> import sparse_operation_kit as sok
        >>> sok.set_comm_tool("single")
    """
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


def sums_duplicates() -> bool:
    """Whether this rank sums the gradients of its own duplicate keys before it sends them."""
    return _sums_duplicates


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
    tool_or_single().ranks.share(error)
