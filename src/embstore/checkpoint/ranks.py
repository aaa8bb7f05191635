"""Ranks that dump or load together, and how they come to one verdict.

    sizes = ranks.agree(lambda: local_size())      # [size of rank 0, size of rank 1, ...]

If the work of one rank fails, `agree` raises on every rank, so none waits for another for ever.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, TypeVar

from embstore.process_groups import GlooGroup

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A dump is damaged, incomplete or does not fit; the message names the file and the reason."""


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _same_kind(kind: str, message: str) -> Exception:
    found = CheckpointError if kind == CheckpointError.__name__ else getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:
            pass
    return RuntimeError(f"{kind}: {message}")


class Ranks:
    """One process alone. `TorchRanks` is the same for a process group."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        """What every rank passed, in the order of the ranks."""
        return [value]

    def gather_rows(self, array: Any) -> Any:
        """The rows of all ranks, in the order of the ranks: a numpy array on each."""
        return array

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns all results, or raises everywhere."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        answers = self.gather((result, None if error is None else _described(error)))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                kind, message = failure
                raise _same_kind(kind, f"{message} (on rank {rank})")
        return [answer for answer, _ in answers]

    def lead(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and returns its result on every rank, or raises everywhere."""
        return self.agree(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def background(self) -> Ranks:
        """The same ranks for another thread: its messages do not meet those of this one."""
        return self


class TorchRanks(Ranks):
    """The ranks of a torch.distributed process group, over gloo connections of their own."""

    _made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def __init__(self, group: Any, purpose: str = "foreground") -> None:
        import torch.distributed as dist

        self._base = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        # A group is made once; one of an earlier init_process_group may have had the same name.
        key = (group.group_name, purpose)
        base, made = self._made.get(key, (None, None))
        if base is not group:
            made = GlooGroup(dist.get_process_group_ranks(group))
            self._made[key] = (group, made)
        self._gloo = made

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, value, group=self._gloo.group)
        return answers

    def gather_rows(self, array: Any) -> Any:
        import numpy as np
        import torch
        import torch.distributed as dist

        counts = self.gather(len(array))
        # gloo wants tensors of one size: pad to the largest share.
        shape = (max(counts), *array.shape[1:])
        padded = np.zeros(shape, array.dtype)
        padded[: len(array)] = array
        parts = [torch.from_numpy(np.empty_like(padded).view(np.uint8)) for _ in counts]
        dist.all_gather(parts, torch.from_numpy(padded.view(np.uint8)), group=self._gloo.group)
        return np.concatenate([part.numpy().view(array.dtype)[:n] for part, n in zip(parts, counts)])

    def background(self) -> Ranks:
        return TorchRanks(self._base, "background")


def ranks_of(group: Any = None) -> Ranks:
    """The ranks of a process group; without one those of the default group, if there is any."""
    import sys

    if isinstance(group, Ranks):
        return group
    if group is None:
        dist: Any = sys.modules.get("torch.distributed")
        # The name is missing without torch.distributed, and while another thread imports it.
        is_initialized = getattr(dist, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return Ranks()
        group = dist.group.WORLD
    return TorchRanks(group)
