"""Increments that are written while training goes on.

    step          7        8        9       10       11       12
    main thread   |        |        | swap  |        |        |        at the agreed step: which rows changed
    publisher       agree: 9          ├── write the rows of step 9 ──► increment

A thread on every rank meets those of the others every few milliseconds, over connections of their own. When
an append is due they agree on a step that no rank has reached; a rank that passes it before it hears of it
says so, and all try again. So the rows are those of one step on all ranks, and no training step waits.

A failure is raised at an agreed step too; there a rank waits until it knows that all others raise with it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embstore.arrays import as_integer
from embstore.checkpoint.attempts import Attempt
from embstore.checkpoint.dumping import Pace, Tables
from embstore.checkpoint.errors import CheckpointError
from embstore.distributed.ranks import describe, ranks_of, reconstruct
from embstore.durations import record

if TYPE_CHECKING:
    from embstore.checkpoint.increments import IncrementLog

logger = logging.getLogger("embstore.publishing")

POLL_SECONDS = 0.02
MOST_STEPS_AHEAD = 1024


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others at a meeting."""

    step: int
    is_due: bool  # counts on rank 0
    is_closing: bool
    armed: str  # "", "waits", "took" or "missed" the agreed step
    raising: str  # "", "waits" for or "missed" the step at which all are to raise, or that is "certain"
    failure: Any  # describe() of what went wrong on this rank alone since the last meeting
    is_leaving: bool  # after an exception of the program: nobody can go on


class Publisher:
    """Made by `IncrementLog.append_every`, which says what it does."""

    def __init__(
        self,
        log: IncrementLog,
        tables: Tables,
        steps: int | None,
        seconds: float | None,
        compact_after: int | None,
        group: Any,
    ) -> None:
        if steps is None and seconds is None:
            raise ValueError("steps or seconds should be given but neither is")
        if steps is not None:
            steps = as_integer(steps, 1, (1 << 63) - 1, "steps")
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"seconds should be at least 0 but is: {seconds!r}")
        if compact_after is not None:
            compact_after = as_integer(compact_after, 1, (1 << 63) - 1, "compact_after")
        self._log, self._tables, self._group = log, tables, group
        self._steps, self._seconds = steps, seconds
        self._compaction = None if compact_after is None else _Compaction(log, compact_after)
        ranks = ranks_of(group, "IncrementLog.append_every()")
        ranks.require_same("append_every()", {"steps": repr(steps), "seconds": repr(seconds)})
        log.settle(ranks)
        log.place(ranks)  # raises when the tables are not those of the log
        self._ranks = ranks.background("publisher")

        self._lock = threading.Condition()  # for what `step` and the thread both use, held for a swap at most
        self._step = 0
        self._agreed = -1  # the step to take changes at; -1: none
        self._attempt: Attempt | None = None  # taken at that step
        self._failure: BaseException | None = None  # of this rank alone, to be told at the next meeting
        self._pending: list[BaseException] = []  # failures of all ranks that have no step yet
        self._error: BaseException | None = None  # to be raised at that step, once that is certain
        self._raise_at, self._is_certain = -1, False
        self._is_closing = self._is_leaving = False
        self._wake = threading.Event()
        self._pace: Pace | None = None  # of the last append
        self._proposed = self._has_missed = False  # a step to raise at, of which not all ranks know yet

        self._ahead = 1
        self._last_step, self._last_time = 0, time.monotonic()
        self.is_open = True
        self._thread = threading.Thread(target=self._run, name="embstore-publisher")
        self._thread.start()

    # ---- the program

    def step(self) -> None:
        """To be called after each training step, on all ranks.

        Raises CheckpointError when an append in the background failed, once.
        """
        if not self.is_open:
            raise RuntimeError("step should not be called after close")
        with self._lock:
            self._step += 1
            if self._step == self._agreed:
                self._take()
            while self._error is not None and self._step >= self._raise_at and not self._is_certain:
                self._wake.set()
                self._lock.wait()
            if self._error is None or self._step < self._raise_at:
                return
        self._raise_error()

    def _take(self) -> None:
        attempt = Attempt()
        try:
            attempt.take(self._tables)
        except Exception as error:
            attempt.restore()
            self._failure = error
        else:
            self._attempt = attempt
        self._wake.set()

    def _raise_error(self) -> None:
        with self._lock:
            error, self._error, self._is_certain = self._error, None, False
        assert error is not None
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"appending to {self._log.path} in the background failed: {reason}") from error

    def close(self) -> None:
        """Waits for what is being written, then appends what has changed since. Called on all ranks.

        Raises CheckpointError when an append or a compaction failed and `step` has not said so.
        """
        if not self.is_open:
            return
        self._is_closing = True
        if self._pace is not None:
            self._pace.hurry()
        self._end()
        if self._error is not None:
            self._raise_error()
        self._log.append(self._tables, group=self._group)

    def _end(self) -> None:
        self._wake.set()
        self._thread.join()
        self.is_open = False

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif self.is_open:
            # The others learn of it and raise; what is not written yet stays with the tables.
            self._failure, self._is_leaving = error, True
            self._end()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._meet():
                self._wake.wait(POLL_SECONDS)
                self._wake.clear()
        except BaseException as error:  # ranks that are gone: nothing more can be agreed on
            self._pending.append(error)
        finally:
            with self._lock:
                if self._error is None and self._pending:
                    self._error = self._pending[0]
                self._raise_at, self._is_certain = 0, self._error is not None
                self._lock.notify_all()
                self._agreed = -1
                if self._attempt is not None:
                    self._attempt.restore()
                    self._attempt = None
            if self._compaction is not None:
                self._compaction.stop()

    def _report(self) -> _Report:
        if self._compaction is not None and self._ranks.rank == 0 and self._failure is None:
            self._failure = self._compaction.poll()
        if not threading.main_thread().is_alive() and not self._is_closing:
            self._is_leaving = True
            self._failure = self._failure or RuntimeError("the process ended without close()")
        with self._lock:
            armed = ""
            if self._agreed >= 0:
                armed = "took" if self._attempt is not None else "waits"
                armed = "missed" if armed == "waits" and self._step >= self._agreed else armed
            failure, self._failure = self._failure, None
            told = None if failure is None else describe(failure)
            closing = self._is_closing and not (self._compaction and self._compaction.is_running)
            raising = "" if self._error is None else "certain"
            if self._proposed:
                raising = "missed" if self._has_missed else "waits"
            return _Report(self._step, self._is_due(), closing, armed, raising, told, self._is_leaving)

    def _is_due(self) -> bool:
        if self._steps is not None and self._step + self._ahead >= self._last_step + self._steps:
            return True
        passed = time.monotonic() - self._last_time
        return self._seconds is not None and passed >= self._seconds and self._step > self._last_step

    def _meet(self) -> bool:
        """What all ranks do next, from what all of them reported. False when it is over."""
        reports: list[_Report] = self._ranks.gather(self._report(), "append_every()")
        newest = max(report.step for report in reports)
        for rank, report in enumerate(reports):
            if report.failure is not None:
                self._fail(reconstruct(report.failure, rank))
        if any(report.is_leaving for report in reports):
            return False
        self._schedule(newest, [report.raising for report in reports])
        armed = [report.armed for report in reports]
        if armed[0]:
            if all(of == "took" for of in armed):
                self._write()
            elif "missed" in armed:
                self._ahead = min(2 * self._ahead, MOST_STEPS_AHEAD)
                self._disarm()
            elif any(of == "waits" and report.is_closing for of, report in zip(armed, reports)):
                self._disarm()  # nobody gets as far as that step
        elif all(report.is_closing for report in reports):
            return False
        elif reports[0].is_due and not any(report.is_closing for report in reports):
            with self._lock:
                self._agreed = newest + self._ahead
        return True

    def _disarm(self) -> None:
        with self._lock:
            attempt, self._attempt, self._agreed = self._attempt, None, -1
        if attempt is not None:
            attempt.restore()

    def _schedule(self, newest: int, raising: list[str]) -> None:
        """Finds a step at which all ranks can raise what is pending."""
        with self._lock:
            if self._proposed and "missed" not in raising:
                self._proposed, self._is_certain = False, True
                self._pending.pop(0)
            elif self._proposed or (self._pending and not any(raising)):
                self._ahead = min(2 * self._ahead, MOST_STEPS_AHEAD) if self._proposed else self._ahead
                self._proposed, self._error = True, self._pending[0]
                self._raise_at = newest + self._ahead
                self._has_missed = self._step >= self._raise_at
            self._lock.notify_all()

    def _write(self) -> None:
        with self._lock:
            attempt, self._attempt = self._attempt, None
            self._last_step, self._agreed = self._agreed, -1
        assert attempt is not None
        self._last_time = time.monotonic()
        # At the usual priority: a thread that nobody lets run would keep the table's lock from training.
        self._pace = Pace(share=1.0)
        if self._is_closing:
            self._pace.hurry()
        try:
            self._log.publish(attempt, self._log.place(self._ranks), self._ranks, between_blocks=self._pace)
        except Exception as error:
            self._log.settle(self._ranks)
            self._fail(error)
            return
        if self._compaction is not None and self._ranks.rank == 0:
            self._compaction.consider()

    def _fail(self, error: BaseException) -> None:
        if self._ranks.rank == 0:
            logger.error("appending to %s in the background failed: %s", self._log.path, error)
        if len(self._pending) < 2:  # one that is being scheduled, and what came since
            self._pending.append(error)


class _Compaction:
    """Compacts a log in a process of its own, at the lowest priority, so that training has the interpreter
    and the cores. What the new base replaces is removed by the compaction after it."""

    CODE = (
        "import os, sys\n"
        "os.nice(19)\n"
        "from embstore.checkpoint.increments import IncrementLog\n"
        "IncrementLog(sys.argv[1]).compact()\n"
    )

    def __init__(self, log: IncrementLog, after: int) -> None:
        self._log, self._after = log, after
        self._process: subprocess.Popen[str] | None = None
        self._began = 0.0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def consider(self) -> None:
        """Begins when it is time."""
        if self._process is not None:
            return
        entries = self._log.entries()
        if self._log.applied - max(entries["base"], default=0) < self._after:
            return
        path = os.pathsep.join(filter(None, sys.path))
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, os.fspath(self._log.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def poll(self) -> BaseException | None:
        """What went wrong with the one that has ended, if one has."""
        if self._process is None or self._process.poll() is None:
            return None
        process, self._process = self._process, None
        errors = process.communicate()[1].strip().splitlines()
        record("compact", time.monotonic() - self._began, failed=process.returncode != 0)
        if process.returncode == 0:
            return None
        return CheckpointError(f"compaction ended with {process.returncode}: {' | '.join(errors[-2:])}")

    def stop(self) -> None:
        """Ends one that runs; what it wrote so far is removed by the next."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
