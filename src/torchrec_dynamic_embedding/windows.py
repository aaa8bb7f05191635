"""The tables of a model as windows on their stores: how a batch gets its slots.

    find     which ids have a slot                          all ranks, the ids of all ranks
    push     rows that have to go                           each rank its own; all wait for all
    drop     their slots become free
    admit    missing ids get slots
    pull     their rows                                     each rank its own; all wait for all

A batch is in flight from `find` until it was trained. Its slots are not given away meanwhile: times are the
numbers of batches, batches are trained in order, so an id may go when it was last used before the oldest
batch in flight. A row leaves only after it was pushed, and an id whose row could not be pulled is forgotten,
so a failure leaves the windows as they were, and training can go on with a new iterator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import SlotMap

from .distributed import Peers
from .ps import PS, Initial, Pairs

Ids = npt.NDArray[np.int64]
BATCH, END, FAILED, STOPPED = range(4)  # what a rank brings to an exchange


@dataclass
class Window:
    """One table: its slots, and where rows come from and go to (None: they stay)."""

    name: str
    map: SlotMap
    ps: PS | None = None
    initial: Initial | None = None
    saved_until: int = 0  # rows that were last used before are in the store as they are here


@dataclass
class InFlight:
    """Batches that were prepared and not yet trained: their numbers, and whose they are."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    times: dict[int, object] = field(default_factory=dict)

    def add(self, time: int, owner: object) -> None:
        with self.changed:
            self.times[time] = owner

    def remove(self, times: Iterable[int]) -> None:
        with self.changed:
            for time in times:
                self.times.pop(time, None)
            self.changed.notify_all()

    def oldest(self, default: int) -> int:
        with self.changed:
            return min(self.times, default=default)


class Stopped(Exception):
    """The iterator that wanted the batch was closed."""


class Windows:
    """All tables that are filled together. Every rank makes the same calls of `prepare` in the same order."""

    def __init__(self, tables: Sequence[Window], peers: Peers, parallel: bool = True) -> None:
        self.tables = list(tables)
        self.peers = peers
        self.in_flight = InFlight()
        self.time = 0
        # Held while maps and rows change, never while other ranks are waited for: see save.
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one batch at a time, also of several iterators
        threads = len(self.tables) if parallel else 1
        self._pool = ThreadPoolExecutor(threads, "tde-tables") if threads > 1 else None

    def prepare(
        self,
        ids: Sequence[Ids] | None,
        *,
        kind: int = BATCH,
        error: BaseException | None = None,
        owner: object = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[int, list[Ids]] | None:
        """Gives the ids of a batch (one array for each table) their slots, with all rows in place.

        Returns the number of the batch, to be given to `in_flight.remove` once it was trained, and the slots.
        A rank without a batch says why with `kind`; None is returned when all ranks are at their end.
        `owner` tells the batches of one iterator from those of another; `stopped`, whether it was closed.
        """
        arrays = [np.empty(0, np.int64)] * len(self.tables) if ids is None else ids
        waited_for = -1
        while True:
            with self._turn:
                headers = self.peers.headers([kind, self._frontier(), *(len(array) for array in arrays)])
                self._check_kinds(headers[:, 0], error)
                if (headers[:, 0] == END).all():
                    return None
                time, frontier = self.time, int(headers[:, 1].min())
                self.time += 1
                everybody = self._gather(arrays, headers[:, 2:])
                with self._lock:
                    slots = [window.map.find(keys, time) for window, keys in zip(self.tables, everybody)]
                short = self._make_room(frontier)
                if short is None:
                    self._admit()
                    self.in_flight.add(time, owner)
                    begins = headers[: self.peers.rank, 2:].sum(axis=0)
                    return time, [s[b : b + len(a)] for s, b, a in zip(slots, begins, arrays)]
                # What follows depends on the maps and on `frontier` alone, so all ranks do the same.
                if frontier in (time, waited_for):
                    raise RuntimeError(
                        f"num_embeddings of table {short.name} should hold the different ids of one batch "
                        f"of all ranks{' and of batches in flight' * (frontier < time)} "
                        f"but is: {short.map.slots}"
                    )
            waited_for = frontier
            self._wait_for_training(frontier, owner, stopped)
            kind = STOPPED if stopped() else kind

    def save(self, peers: Peers) -> None:
        """Pushes every row that was used since the last save. `peers` is a group for saves alone: the batches
        of the other one may be prepared meanwhile, in another order on every rank."""
        error: BaseException | None = None
        with self._lock:
            frontier = self._frontier()
            try:
                pairs = [window.map.used_since(window.saved_until) for window in self.tables]
                self._each(lambda window, rows: window.ps and window.ps.push(rows), pairs)
                self._each(lambda window, _: window.ps and window.ps.flush(), pairs)
            except BaseException as failure:
                error = failure
        # Not under the lock: a rank that holds it here would wait for another one whose batch waits for us.
        peers.share(error)
        for window in self.tables:
            window.saved_until = frontier

    def _frontier(self) -> int:
        return self.in_flight.oldest(self.time)

    def _check_kinds(self, kinds: Ids, error: BaseException | None) -> None:
        if (kinds == FAILED).any():
            self.peers.share(error)
        if (kinds == STOPPED).any():
            raise Stopped
        if (kinds == END).any() and not (kinds == END).all():
            ended = np.flatnonzero(kinds == END).tolist()
            raise RuntimeError(
                f"all ranks should have the same number of batches "
                f"but the loaders of ranks {ended} ended first"
            )

    def _gather(self, arrays: Sequence[Ids], sizes: Ids) -> list[Ids]:
        """For each table the ids of all ranks, in the order of the ranks."""
        if self.peers.world == 1:
            return list(arrays)
        parts = self.peers.arrays(np.concatenate([*arrays, np.empty(0, np.int64)]), sizes.sum(axis=1))
        split = [np.split(part, np.cumsum(size)[:-1]) for part, size in zip(parts, sizes)]
        return [np.concatenate([part[t] for part in split]) for t in range(len(self.tables))]

    def _make_room(self, frontier: int) -> Window | None:
        """Pushes and drops what is needed for the missing ids. Returns a table that cannot hold them yet."""
        needs = [window.map.missing - window.map.free_slots for window in self.tables]
        if max(needs, default=0) <= 0:
            return None
        victims = [
            window.map.victims(need, frontier if window.ps else 0) if need > 0 else np.empty((0, 2), np.int64)
            for window, need in zip(self.tables, needs)
        ]
        for window, need, pairs in zip(self.tables, needs, victims):
            if len(pairs) < need:
                return window
        error: BaseException | None = None
        try:
            with self._lock:
                self._each(lambda window, pairs: window.ps and window.ps.push(pairs), victims)
        except BaseException as failure:
            error = failure
        self.peers.share(error)
        with self._lock:
            for window, pairs in zip(self.tables, victims):
                if len(pairs):
                    window.map.drop()
        return None

    def _wait_for_training(self, frontier: int, owner: object, stopped: Callable[[], bool]) -> None:
        """Waits until this rank has no batch in flight as old as `frontier`.

        Only batches of the same iterator are waited for: it is being asked for more, so they will be trained,
        while another iterator may be resting until this one has delivered.
        """
        flight = self.in_flight

        def over() -> bool:
            own = owner is not None and any(other is owner for other in flight.times.values())
            return stopped() or not own or min(flight.times, default=self.time) > frontier

        with flight.changed:
            flight.changed.wait_for(over)

    def _admit(self) -> None:
        error: BaseException | None = None
        with self._lock:
            new = [window.map.admit() for window in self.tables]
            try:
                self._each(lambda window, pairs: window.ps and window.ps.pull(pairs, window.initial), new)
            except BaseException as failure:
                error = failure
        if not any(len(pairs) for pairs in new):
            return
        try:
            self.peers.share(error)
        except BaseException:
            with self._lock:
                for window, pairs in zip(self.tables, new):
                    window.map.forget(np.ascontiguousarray(pairs[:, 0]))
            raise

    def _each(self, call: Callable[[Window, Pairs], Any], pairs: Sequence[Pairs]) -> None:
        """call(window, pairs) for every table that has pairs, side by side; the first error is raised."""
        work = [(window, p) for window, p in zip(self.tables, pairs) if len(p)]
        if self._pool is None or len(work) < 2:
            for window, p in work:
                call(window, p)
            return
        futures = [self._pool.submit(call, window, p) for window, p in work]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
