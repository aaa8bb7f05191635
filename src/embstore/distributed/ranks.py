"""All ranks succeed, or all of them raise.

    sizes = ranks.agree(local_size, "dump()")        # [size of rank 0, size of rank 1, ...]

    rank 0   work ────────────┐             raises OSError("disk full (on rank 1)")
    rank 1   work: OSError ───┼─ gather ──► raises its own OSError("disk full")
    rank 2   work ────────────┘             raises OSError("disk full (on rank 1)")

Work that communicates by itself carries a failure mark in an exchange that it needs anyway; when a mark
arrives, every rank calls `share`, which tells the reason and raises.

A rank that does not come, or is gone, ends the wait of the others after the timeout of the process group,
with an error that names it. So does a network that is gone, also where the rendezvous store is behind it.
"""

from __future__ import annotations

import builtins
import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from embstore.distributed.messages import exchange, exchange_blocks
from embstore.distributed.process_groups import STORE_SECONDS, GlooGroup, group_store, timeout_of, within

T = TypeVar("T")
Array = npt.NDArray[Any]

# (classes from the most special one on, message, errno): what is told about an exception
Description = tuple[list[tuple[str, str]], str, int | None]


class RankError(RuntimeError):
    """Some ranks did not take part in a collective, or are gone; the message names them."""


def describe(error: BaseException) -> Description:
    """An exception in a form that every rank can read, whatever its class."""
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    errno = getattr(error, "errno", None)
    return kinds, message, errno if isinstance(errno, int) else None


def reconstruct(description: Description, rank: int) -> Exception:
    """The exception for the ranks that did not fail themselves: of the same kind where that is built in or
    ours, else a RuntimeError. Ctrl-C on one rank is a RuntimeError on the others."""
    kinds, message, errno = description
    for module, name in kinds:
        found = None
        if module == "builtins":
            found = getattr(builtins, name, None)
        elif module.split(".")[0] == "embstore":
            found = getattr(sys.modules.get(module), name, None)
        if found is Exception or not (isinstance(found, type) and issubclass(found, Exception)):
            continue
        try:
            error: Exception = found(f"{message} (on rank {rank})" if message else f"failed on rank {rank}")
        except TypeError:  # wants other arguments
            continue
        if errno is not None and isinstance(error, OSError):
            error.errno = errno
        return error
    return RuntimeError(f"{kinds[0][1]}: {message} (on rank {rank})")


class Ranks:
    """One process alone, and the base for several.

    A subclass sets `rank` and `world` and implements `all_gather`, which raises when the other ranks do not
    come within its deadline. Everything else follows from it.
    """

    rank = 0
    world = 1
    call = "this call"  # what the user called, for errors; methods that take `what` default to it

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """The payloads of all ranks, of any lengths, in the order of the ranks. `what` is for the error."""
        return [payload]

    def all_gather_equal(self, array: Array, what: str = "") -> list[Array]:
        """The arrays of all ranks, of one shape and type: one collective whatever their size."""
        return [array]

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """What every rank passed, in the order of the ranks."""
        return self.agree(lambda: value, what)

    def gather_rows(self, array: Any, what: str = "") -> Any:
        """The rows of all ranks, in the order of the ranks: a numpy array on each."""
        if self.world == 1:
            return array
        flat = np.ascontiguousarray(array)
        parts = self.all_gather(flat.tobytes(), what)
        return np.concatenate([np.frombuffer(p, flat.dtype).reshape(-1, *flat.shape[1:]) for p in parts])

    def agree(self, work: Callable[[], T], what: str = "") -> list[T]:
        """Runs `work` on every rank and returns all results, or raises everywhere."""
        if self.world == 1:
            return [work()]
        what = what or self.call
        error: BaseException | None = None
        try:
            payload = pickle.dumps((what, work(), None))
        except BaseException as caught:
            error = caught
            payload = pickle.dumps((what, None, describe(caught)))
        try:
            return self._verdict(payload, error, what)
        finally:
            del error  # its traceback holds this frame: a cycle would keep the rows of a batch pinned

    def together(self, work: Callable[[], T], what: str = "") -> T:
        """Runs `work` on every rank and returns the own result, or raises everywhere."""
        result: list[T] = []
        self.agree(lambda: result.append(work()), what)
        return result[0]

    def lead(self, work: Callable[[], T], what: str = "") -> T:
        """Runs `work` on rank 0 and returns its result on every rank, or raises everywhere."""
        return self.agree(lambda: work() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]

    def share(self, error: BaseException | None, what: str = "") -> None:
        """Raises on every rank when one has an error: its own where there is one, else that of the first."""
        what = what or self.call
        try:
            failure = None if error is None else describe(error)
            self._verdict(pickle.dumps((what, None, failure)), error, what)
        finally:
            del error

    def require_same(self, what: str, description: Mapping[str, str]) -> None:
        """Raises ValueError on every rank when the descriptions differ, naming the first entry that does."""
        first, *others = self.gather(dict(description), what)
        for rank, other in enumerate(others, start=1):
            for name in [*first, *(name for name in other if name not in first)]:
                if first.get(name) != other.get(name):
                    raise ValueError(
                        f"{what} should be the same on every rank but {name!r} differs: rank 0 has "
                        f"{first.get(name, 'nothing')} and rank {rank} has {other.get(name, 'nothing')}"
                    )

    def report(self, error: BaseException) -> None:
        """Leaves word of a failure that no exchange carries: others that wait in vain will name it."""

    def background(self, purpose: str = "background") -> Ranks:
        """The same ranks for another thread, whose messages cannot mix with those of this thread or of
        threads with another purpose."""
        return self

    def _verdict(self, payload: bytes, error: BaseException | None, what: str) -> list[Any]:
        try:
            answers = [pickle.loads(answer) for answer in self.all_gather(payload, what)]
            if error is not None:
                raise error
            for rank, (_, _, failure) in enumerate(answers):
                if failure is not None:
                    raise reconstruct(failure, rank)
            for rank, (call, _, _) in enumerate(answers):
                if call != what:
                    raise RankError(f"{what} should be called by every rank but rank {rank} is in {call}")
            return [answer for _, answer, _ in answers]
        except RankError:
            if error is not None:  # the own reason says more
                raise error from None
            raise
        finally:
            del error


class TorchRanks(Ranks):
    """The ranks of a torch.distributed process group.

    purpose  of connections of our own, made together at first use. None: the connections of the group itself,
             for calls that keep their order with those of the program (own ones where it does not have gloo)
    """

    FRAME_BYTES = 1016  # payloads up to here take one collective
    GRACE_SECONDS = 2.0  # to hear from ranks whose collective broke too

    _made: dict[tuple[str, str], tuple[Any, GlooGroup]] = {}

    def __init__(self, group: Any, purpose: str | None = "calls", call: str = "") -> None:
        import torch.distributed as dist

        self._base = group
        self.call = call or Ranks.call
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group should hold this process but does not")
        self._own: GlooGroup | None = None
        if purpose is None and dist.get_backend(group) == "gloo":
            return
        # Made once. A group of an earlier init_process_group may have had the same name.
        key = (group.group_name, purpose or "host")
        base, made = self._made.get(key, (None, None))
        if base is not group or made is None or made.group is None:
            with self._watching(self.call, "/".join(key)):
                made = GlooGroup(group, key[1])
            self._made[key] = (group, made)
        self._own = made

    @property
    def _group(self) -> Any:
        return self._base if self._own is None else self._own.group

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        head = np.zeros(8 + self.FRAME_BYTES, np.uint8)
        head[:8] = np.array([len(payload)], np.int64).view(np.uint8)
        first = payload[: self.FRAME_BYTES]
        head[8 : 8 + len(first)] = np.frombuffer(first, np.uint8)
        frames = self.all_gather_equal(head, what)
        lengths = [int(frame[:8].view(np.int64)[0]) for frame in frames]
        parts = [frame[8 : 8 + length].tobytes() for frame, length in zip(frames, lengths)]
        longest = max(lengths) - self.FRAME_BYTES
        if longest > 0:
            tail = np.zeros(longest, np.uint8)
            rest = payload[self.FRAME_BYTES :]
            tail[: len(rest)] = np.frombuffer(rest, np.uint8)
            for rank, more in enumerate(self.all_gather_equal(tail, what)):
                parts[rank] += more[: max(0, lengths[rank] - self.FRAME_BYTES)].tobytes()
        return parts

    def all_gather_equal(self, array: Array, what: str = "") -> list[Array]:
        import torch

        mine = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        with self._watching(what):
            self._group.allgather([parts], [mine]).wait()
        return [part.numpy() for part in parts]

    def all_to_all(
        self, out: Any, rows: Any, receive: Sequence[int], send: Sequence[int], what: str = ""
    ) -> Callable[[], None]:
        """Sends the first send[0] elements of `rows` to rank 0, and so on; receives into `out` likewise.
        Both are flat tensors on the CPU. Returns the function that waits."""
        return self._exchanged(lambda: exchange(self._group, self.rank, out, rows, receive, send), what)

    def exchange_blocks(
        self, received: Sequence[Sequence[Any]], sent: Sequence[Sequence[Any]], what: str = ""
    ) -> Callable[[], None]:
        """Sends the blocks sent[r] to rank r and fills received[r], as `messages.exchange_blocks` says.
        Returns the function that waits."""
        return self._exchanged(lambda: exchange_blocks(self._group, self.rank, received, sent), what)

    def _exchanged(self, begin: Callable[[], Callable[[], None]], what: str) -> Callable[[], None]:
        with self._watching(what):
            arrived = begin()

        def wait() -> None:
            with self._watching(what):
                arrived()

        return wait

    def background(self, purpose: str = "background") -> Ranks:
        return TorchRanks(self._base, purpose, self.call)

    # ---- ranks that do not come

    def report(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._notes().set(str(self.rank), pickle.dumps(("failed", describe(error))))

    @contextlib.contextmanager
    def _watching(self, what: str, name: str | None = None) -> Iterator[None]:
        """For a collective and nothing else: when it breaks, the error names the ranks that are missing."""
        try:
            yield
        except RuntimeError as error:
            self._explain(error, what or self.call, name)

    def _notes(self, name: str | None = None) -> Any:
        """What ranks tell when a collective of this group is broken: it goes through the rendezvous store."""
        if name is None:
            name = self._base.group_name if self._own is None else self._own.name
        return group_store(f"notes/{name}")

    def _told(self, what: str, name: str | None) -> dict[int, tuple[str, Any]]:
        """What the ranks whose collective broke say, by rank; those that are gone say nothing."""
        told: dict[int, tuple[str, Any]] = {self.rank: ("waited", what)}
        notes = self._notes(name)
        notes.set(str(self.rank), pickle.dumps(told[self.rank]))
        deadline = time.monotonic() + self.GRACE_SECONDS
        while len(told) < self.world and time.monotonic() < deadline:
            for rank in range(self.world):
                if rank not in told and notes.check([str(rank)]):
                    told[rank] = pickle.loads(notes.get(str(rank)))
            time.sleep(0.02)
        return told

    def _explain(self, error: RuntimeError, what: str, name: str | None) -> NoReturn:
        try:
            told = within(self.GRACE_SECONDS + STORE_SECONDS, lambda: self._told(what, name))
        except Exception as broken:
            raise RankError(f"{what} failed ({error}) and the rendezvous store is gone: {broken}") from error
        for rank, (kind, text) in told.items():
            if kind == "failed":
                raise reconstruct(text, rank) from error
        missing = [rank for rank in range(self.world) if rank not in told]
        if missing:
            seconds = timeout_of(self._base).total_seconds()
            absent = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            raise RankError(
                f"{what} should be called by every rank but {absent} ended or did not take part "
                f"within {seconds:g} s: {error}"
            ) from error
        calls = ", ".join(f"rank {rank} in {text}" for rank, (_, text) in sorted(told.items()))
        raise RankError(f"{what} failed on all ranks ({calls}): {error}") from error


def ranks_of(group: Any = None, call: str = "", *, purpose: str | None = "calls") -> Ranks:
    """The ranks of a process group; without one those of the default group, if there is any.

    call     what the user called, for errors
    purpose  of the connections, see `TorchRanks`
    """
    if isinstance(group, Ranks):
        return group
    if group is None:
        dist: Any = sys.modules.get("torch.distributed")
        # The name is missing without torch.distributed, and while another thread imports it.
        is_initialized = getattr(dist, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return Ranks()
        group = dist.group.WORLD
    return TorchRanks(group, purpose, call) if group.size() > 1 else Ranks()
