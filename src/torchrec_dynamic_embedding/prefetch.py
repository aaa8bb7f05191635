"""Batches prepared ahead, in a thread that ends with its iterator.

    loader ──► thread: ids → slots, push, pull ──► up to num_prefetch batches ──► next()

The thread knows the pipeline, not the iterator, so an iterator that is dropped in mid-epoch is collected and
stops its thread. Ranks end together: a rank that stops tells the others in the exchange of the next batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .windows import Stopped

STOP_SECONDS = 10.0  # for other ranks and for a loader that is being asked; the thread is a daemon


@dataclass(frozen=True)
class Ready:
    """A batch with its number, or what came instead of one."""

    time: int = -1
    batch: Any = None
    values: Sequence[torch.Tensor] = ()  # its slots
    sizes: Mapping[str, int] = field(default_factory=dict)  # path of a collection to how many it has
    error: BaseException | None = None  # StopIteration at the end


class Pipeline:
    """Runs `prepare` up to `depth` batches ahead. `prepare(stopped, waiting)` returns a Ready.

    `forget` gets the numbers of batches that nobody will take, and is called once more to wake up a `prepare`
    that waits for training.
    """

    def __init__(
        self,
        prepare: Callable[[Callable[[], bool], Callable[[], int | None]], Ready],
        depth: int,
        forget: Callable[[Iterable[int]], None],
    ) -> None:
        self._prepare = prepare
        self._depth = depth
        self._forget = forget
        self._ready: deque[Ready] = deque()
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._stopping = False
        self._ended = False  # an exchange has ended the epoch on all ranks
        self._thread = threading.Thread(target=self._run, name="tde-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Ready:
        """The next batch, waiting for it."""
        with self._changed:
            self._waiting = threading.get_ident()
            try:
                self._changed.wait_for(lambda: self._ready or self._ended)
            finally:
                self._waiting = None
            if not self._ready:
                return Ready(error=StopIteration())
            ready = self._ready.popleft()
            self._changed.notify_all()
            return ready

    def waiting(self) -> int | None:
        """The thread that waits for a batch while none is ready."""
        with self._changed:
            return None if self._ready else self._waiting

    def stopped(self) -> bool:
        return self._stopping

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, wait_seconds: float = STOP_SECONDS) -> None:
        """Ends the thread, and drops the batches that nobody took."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._drop()
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_seconds)
        self._drop()

    def _drop(self) -> None:
        with self._changed:
            left, self._ready = self._ready, deque()
        self._forget([ready.time for ready in left])

    def _run(self) -> None:
        while not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or len(self._ready) < self._depth)
            try:
                ready = self._prepare(self.stopped, self.waiting)
            except Stopped as stopped:
                error = stopped if self._stopping else RuntimeError("another rank closed its iterator")
                ready = Ready(error=error)
            except BaseException as error:
                ready = Ready(error=error)
            with self._changed:
                self._ended = ready.error is not None
                self._ready.append(ready)
                self._changed.notify_all()
            del ready  # a batch that is held looks as if it would still be trained
        if self._stopping:
            self._drop()
