"""The tables of a model as windows on their stores: how a batch gets its slots.

    find     which ids have a slot                          all ranks, the ids of all ranks
    push     rows that have to go                           each rank its own; all wait for all
    drop     their slots become free
    admit    missing ids get slots
    pull     their rows                                     each rank its own; all wait for all

A batch is in flight from `find` until it was trained (in_flight.py). Its slots are not given away meanwhile:
times are the numbers of batches, and an id may go when it was last used before the oldest batch in flight. A
row leaves only after it was pushed, and an id whose row could not be pulled is forgotten, so a failure leaves
the windows as they were, and training can go on with a new iterator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import SlotMap

from .distributed import Peers
from .in_flight import Feed, InFlight
from .ps import PS, Initial, Pairs

Ids = npt.NDArray[np.int64]
NO_PAIRS: Pairs = np.empty((0, 2), np.int64)
POLL_SECONDS = 0.05
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
class Shortage:
    """A table that lacks `need` slots for a batch, of which `available` could be made free."""

    window: Window
    need: int
    available: int

    def error(self, time: int) -> RuntimeError:
        """What is wrong with the batch number `time`."""
        map_, available = self.window.map, self.available
        without_others = len(map_.victims(self.need, time))
        in_flight = without_others >= self.need
        if not in_flight and self.window.ps is not None:
            available = without_others
        rows = len(map_) - available + map_.missing
        if self.window.ps is None:
            whose, remedy = "all ids so far, since there is no store to move them to", ""
        elif in_flight:
            whose = "the different ids of the batches in flight, of all ranks"
            remedy = "train the batches that were taken before taking another, take fewer ahead, or "
        else:
            whose, remedy = "the different ids of this batch, of all ranks", ""
        return RuntimeError(
            f"num_embeddings of table {self.window.name} is {map_.slots}, "
            f"but {rows} rows are needed for {whose} "
            f"({self.need} are missing, {available} can be made free); {remedy}raise num_embeddings"
        )


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
        feed: Feed | None = None,
        stopped: Callable[[], bool] = lambda: False,
        waiting: Callable[[], int | None] = threading.get_ident,
    ) -> tuple[int, list[Ids]] | None:
        """Gives the ids of a batch (one array for each table) their slots, with all rows in place.

        Returns the number of the batch, which is in flight from then on, and the slots. A rank without a
        batch says why with `kind`; None is returned when all ranks are at their end. `feed` stands for the
        iterator; `stopped` tells whether it was closed, `waiting` which thread waits for this batch.
        """
        arrays = [np.empty(0, np.int64)] * len(self.tables) if ids is None else ids
        feed = feed or Feed()
        while True:
            with self._turn, self.in_flight.exchange():
                # In this order: who waits has released what was trained before.
                stuck = self.in_flight.is_stuck(waiting())
                spared, pinned = self.in_flight.offer(self.time)
                headers = self.peers.headers([kind, spared, pinned, stuck, *(len(a) for a in arrays)])
                self._check_kinds(headers[:, 0], error)
                if (headers[:, 0] == END).all():
                    return None
                time = self.time
                self.time += 1
                everybody = self._gather(arrays, headers[:, 4:])
                with self._lock:
                    slots = [window.map.find(keys, time) for window, keys in zip(self.tables, everybody)]
                # What follows depends on the maps and on the headers alone, so all ranks do the same.
                frontiers, is_stuck, spare = headers[:, 1], headers[:, 3] != 0, True
                oldest = int(frontiers.min())
                short = self._make_room(oldest, oldest)
                if short is not None and (is_stuck & (frontiers == oldest)).any():
                    frontiers, spare = headers[:, 2], False
                    short = self._make_room(oldest, int(frontiers.min()))
                frontier = int(frontiers.min())
                if short is None:
                    self._admit()
                    self.in_flight.add(time, feed)
                    begins = headers[: self.peers.rank, 4:].sum(axis=0)
                    return time, [s[b : b + len(a)] for s, b, a in zip(slots, begins, arrays)]
                if frontier == time or (is_stuck & (frontiers == frontier)).any():
                    raise short.error(time)
            self._wait_for_training(frontier, spare, waiting, stopped)
            kind = STOPPED if stopped() else kind

    def save(self, peers: Peers) -> None:
        """Pushes every row that was used since the last save. `peers` is a group for saves alone: the batches
        of the other one may be prepared meanwhile, in another order on every rank."""
        error: BaseException | None = None
        with self._lock:
            frontier = self.in_flight.oldest(self.time)[0]
            again = self.in_flight.take_used_again(self.time)
            since = [min(window.saved_until, again) for window in self.tables]
            try:
                pairs = [window.map.used_since(time) for window, time in zip(self.tables, since)]
                self._each(lambda window, rows: window.ps and window.ps.push(rows), pairs)
                self._each(lambda window, _: window.ps and window.ps.flush(), pairs)
            except BaseException as failure:
                error = failure
        # Not under the lock: a rank that holds it here would wait for another one whose batch waits for us.
        try:
            peers.share(error)
        except BaseException:
            for window, time in zip(self.tables, since):
                window.saved_until = time
            raise
        for window in self.tables:
            window.saved_until = frontier

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

    def _make_room(self, oldest: int, most: int) -> Shortage | None:
        """Pushes and drops what is needed for the missing ids, or returns which table lacks room for now.

        Rows go that were last used before batch `oldest`. If these were too few before, `most` is later, and
        those of the next batches go as well, of as few as it takes.
        """
        needs = [window.map.missing - window.map.free_slots for window in self.tables]
        if max(needs, default=0) <= 0:
            return None

        def victims(frontier: int) -> list[Pairs]:
            return [
                window.map.victims(need, frontier if window.ps else 0) if need > 0 else NO_PAIRS
                for window, need in zip(self.tables, needs)
            ]

        def fits(pairs: Sequence[Pairs]) -> bool:
            return all(len(p) >= need for p, need in zip(pairs, needs))

        too_few, frontier = min(oldest, most - 1), most
        while frontier - too_few > 1:
            middle = (too_few + frontier) // 2
            if fits(victims(middle)):
                frontier = middle
            else:
                too_few = middle
        chosen = victims(frontier)
        if not fits(chosen):
            return next(
                Shortage(window, need, len(pairs))
                for window, need, pairs in zip(self.tables, needs, chosen)
                if len(pairs) < need
            )
        error: BaseException | None = None
        try:
            self.in_flight.replacing(frontier)
            with self._lock:
                self._each(lambda window, pairs: window.ps and window.ps.push(pairs), chosen)
        except BaseException as failure:
            error = failure
        self.peers.share(error)
        with self._lock:
            for window, pairs in zip(self.tables, chosen):
                if len(pairs):
                    window.map.drop()
        return None

    def _wait_for_training(
        self, frontier: int, spare: bool, waiting: Callable[[], int | None], stopped: Callable[[], bool]
    ) -> None:
        """Waits until this rank has no batch in flight as old as `frontier`, or waiting is no use. `spare`:
        those count that are only spared."""
        flight = self.in_flight

        def over() -> bool:
            if stopped() or flight.is_stuck(waiting()):
                return True
            spared, pinned = flight.oldest(self.time)
            return (spared if spare else pinned) > frontier

        with flight.changed:
            while not flight.changed.wait_for(over, POLL_SECONDS):
                pass  # an iterator that was closed, or a graph that was freed, wakes nobody up

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
