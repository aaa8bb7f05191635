"""Batches between their preparation and their training. Their rows stay where they are.

    prepared ──next()──► handed out ──forward──► in use ──backward──► trained ──next()──► released

A batch is recognized by the storage of its values, which views and `to` on the same device share. What
becomes of a batch that never gets to the end of this line:

    evaluated              its forward pass trains it: in eval mode, or without gradients
    no backward            it is trained when the autograd graph is freed
    dropped by the caller  it is spared: its rows go last, since a copy (on a GPU, say) may still come
    passed over            it is spared once a later batch was trained

Using a batch whose rows were replaced raises; it never reads or trains other rows.
"""

from __future__ import annotations

import threading
import time as clock
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

NO_PROGRESS_SECONDS = 60.0  # how long a thread that only loads waits for one that trains


@dataclass(eq=False)
class Feed:
    """One iterator, as far as its batches are concerned."""

    ended: bool = False  # it hands out no more


@dataclass(eq=False)
class Batch:
    """A prepared batch; `time` is its number. `unseen` are its collections that no forward pass has seen."""

    time: int
    feed: Feed
    handed_out: bool = False
    storages: list[StorageWeakRef] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # path of a collection to its number of ids
    unseen: set[str] = field(default_factory=set)
    uses: int = 0  # forward passes whose backward is still to come

    @property
    def seen(self) -> bool:
        return len(self.unseen) < len(self.sizes)

    @property
    def trained(self) -> bool:
        return self.handed_out and not self.uses and not self.unseen

    def is_dropped(self) -> bool:
        return self.handed_out and not self.uses and all(s.expired() for s in self.storages)


class Use:
    """One forward pass of a collection. The autograd graph keeps it, so it ends with the graph at last."""

    def __init__(self, flight: InFlight, batch: Batch) -> None:
        self._flight = flight
        self.batch = batch
        self._open = True

    def check(self) -> None:
        """Raises when the rows of the batch were replaced since."""
        self._flight.check(self.batch)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._flight.end_use(self.batch)

    def __del__(self) -> None:
        if self._open:  # may run inside any allocation, so it only leaves a note
            self._flight.freed.append(self.batch)


class InFlight:
    """Thread-safe. Numbers of batches grow in the order of their preparation."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.batches: dict[int, Batch] = {}
        self.freed: deque[Batch] = deque()  # of graphs that were freed without a backward pass
        self._of_storage: dict[int, tuple[StorageWeakRef, Batch]] = {}
        self._offered = 0  # an exchange that has not ended may replace rows of batches before this one
        self._replaced = 0  # rows of batches before this one may have been replaced
        self._lossy: set[Feed] = set()  # rows of a batch that was dropped untrained were replaced
        self._last_trained = -1
        self._used_again: int | None = None
        self._trainer: int | None = None  # the thread of the last forward pass
        self._progress = clock.monotonic()

    # ---- the life of a batch

    def add(self, time: int, feed: Feed) -> None:
        with self.changed:
            self.batches[time] = Batch(time, feed)
            self._progress = clock.monotonic()

    def hand_out(self, time: int, values: Iterable[torch.Tensor], sizes: Mapping[str, int]) -> None:
        """`values` hold the slots of the batch, `sizes` how many of them each collection has."""
        with self.changed:
            for key in [k for k, (storage, _) in self._of_storage.items() if storage.expired()]:
                del self._of_storage[key]
            batch = self.batches[time]
            batch.handed_out = True
            batch.sizes = dict(sizes)
            batch.unseen = set(sizes)
            for tensor in values:
                storage = StorageWeakRef(tensor.untyped_storage())
                batch.storages.append(storage)
                self._of_storage[storage.cdata] = (storage, batch)

    def asked_for_next(self, feed: Feed) -> None:
        """What was trained by now is released."""
        with self.changed:
            self._release(lambda batch: batch.feed is feed and batch.trained)

    def end(self, feed: Feed) -> None:
        """The iterator is at its end; its last batches may still be trained."""
        with self.changed:
            feed.ended = True
            self._release(lambda batch: batch.feed is feed and batch.trained)

    def forget_dropped(self, feed: Feed) -> None:
        """Another iterator took over from this one."""
        with self.changed:
            self._lossy.discard(feed)
            self._release(lambda batch: batch.feed is feed and batch.is_dropped())

    def remove(self, times: Iterable[int]) -> None:
        with self.changed:
            for time in times:
                if self.batches.pop(time, None) is not None:
                    self._progress = clock.monotonic()
            self.changed.notify_all()

    def forget(self, feed: Feed) -> None:
        """Releases all that the iterator handed out, trained or not."""
        with self.changed:
            self._lossy.discard(feed)
            self._release(lambda batch: batch.feed is feed and batch.handed_out)

    def _release(self, condition: Callable[[Batch], bool]) -> None:
        self._settle_freed()
        self.remove([time for time, batch in list(self.batches.items()) if condition(batch)])

    # ---- forward and backward

    def of(self, values: torch.Tensor) -> Batch | None:
        """The batch whose slots these are, released or not."""
        try:
            storage = values.untyped_storage()
        except NotImplementedError:  # a tensor of a tracer has none
            return None
        with self.changed:
            found = self._of_storage.get(storage._cdata)
            return found[1] if found and not found[0].expired() else None

    def guess(self, path: str, size: int) -> Batch | None:
        """The batch that a copy of unknown origin is of: copies come in the order of their batches."""
        with self.changed:
            self._settle_freed()
            waiting = [b for _, b in sorted(self.batches.items()) if b.handed_out and path in b.unseen]
            waiting = [b for b in waiting if b.is_dropped()] or waiting  # the others may be kept for later
            if self._lossy:
                raise RuntimeError(
                    "a wrapped model was given a copy of a batch, but the rows of a batch that was dropped "
                    "before it was trained were replaced, perhaps those of this one; keep the batch "
                    "until its copy is trained, or raise num_embeddings"
                )
            if len(waiting) > 1 and waiting[0].sizes[path] != size:
                waiting = [batch for batch in waiting if batch.sizes[path] == size]
                if len(waiting) != 1:
                    raise RuntimeError(
                        f"a wrapped model was given {size} slots that its loader did not hand out, and it is "
                        "unclear which batch they are a copy of; pass the batch itself to the model, or a "
                        "copy made by `to`"
                    )
            return waiting[0] if waiting else None

    def begin_use(self, batch: Batch, path: str) -> Use:
        """A forward pass of the collection at `path` reads the rows of the batch."""
        with self.changed:
            self._trainer = threading.get_ident()
            self._settle_freed()
            if batch.time not in self.batches:
                self._check(batch)
                self.batches[batch.time] = batch
                self._used_again = self.take_used_again(batch.time)
            batch.unseen.discard(path)
            batch.uses += 1
            self._lossy.discard(batch.feed)
            return Use(self, batch)

    def end_use(self, batch: Batch) -> None:
        with self.changed:
            batch.uses -= 1
            if not batch.unseen:
                self._last_trained = max(self._last_trained, batch.time)
            if batch.trained and batch.feed.ended:
                self.remove([batch.time])
            self._progress = clock.monotonic()
            self.changed.notify_all()

    def seen_by_model(self, batch: Batch) -> None:
        """The model is through with the batch; collections that it did not ask need it no more."""
        with self.changed:
            if batch.seen:
                batch.unseen.clear()

    def check(self, batch: Batch) -> None:
        with self.changed:
            if batch.time not in self.batches:
                self._check(batch)

    def _check(self, batch: Batch) -> None:
        if batch.time < max(self._offered, self._replaced):
            raise RuntimeError(
                f"the rows of batch {batch.time} may have been replaced: it was trained, or a later one was "
                "trained before it, and then another batch was asked for; use a batch before the next "
                "one, in their order, or raise num_embeddings"
            )

    def _settle_freed(self) -> None:
        while self.freed:
            self.end_use(self.freed.popleft())

    # ---- what may be replaced

    def offer(self, default: int) -> tuple[int, int]:
        """The oldest batch whose rows are pinned or spared, and the oldest whose rows are pinned.

        Until the `exchange` is over, no batch before the first comes back into use.
        """
        with self.changed:
            spared, pinned = self.oldest(default)
            self._offered = spared
            return spared, pinned

    @contextmanager
    def exchange(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self.changed:
                self._offered = 0

    def _is_spared(self, batch: Batch) -> bool:
        """Whether its rows may be replaced when there is no other room."""
        return batch.handed_out and (batch.is_dropped() or batch.time < self._last_trained)

    def replacing(self, frontier: int) -> None:
        """Rows last used by batches before `frontier` are about to be replaced."""
        with self.changed:
            old = [batch for time, batch in self.batches.items() if time < frontier]
            if any(not self._is_spared(batch) for batch in old):
                raise RuntimeError("a batch that was dropped came back into use as its rows were replaced")
            self._replaced = max(self._replaced, frontier)
            self._lossy.update(batch.feed for batch in old if batch.is_dropped())
            self.remove([batch.time for batch in old])

    def oldest(self, default: int) -> tuple[int, int]:
        """As `offer`, without a promise."""
        with self.changed:
            self._release(lambda batch: batch.is_dropped() and batch.seen)
            pinned = min(
                (t for t, batch in self.batches.items() if not self._is_spared(batch)), default=default
            )
            return min(self.batches, default=default), pinned

    def take_used_again(self, default: int) -> int:
        """The oldest batch that came back into use since the last call."""
        with self.changed:
            found, self._used_again = self._used_again, None
            return default if found is None else min(default, found)

    def is_stuck(self, waiting: int | None) -> bool:
        """Whether nothing will be trained while the thread `waiting` waits for a batch: it is the one that
        trains, or the one that does has stopped."""
        with self.changed:
            trainer = self._trainer or threading.main_thread().ident
            if waiting is None:
                return False
            return waiting == trainer or clock.monotonic() - self._progress > NO_PROGRESS_SECONDS
