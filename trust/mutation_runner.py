"""Runs Python tests under one mutant after the other, each in a fork that has collected them already.

    python -m trust.mutation_runner 3 tests/checkpoint tests/native

Reads a line of JSON from stdin for each request, and answers with a line on the given file descriptor:

    {"reach": "reach.json"}                                                        {"end": "passed"}
    {"mutant": 17, "tests": ["tests/native/test_table.py::..."], "seconds": 30}    {"end": "failed"}

Ends are "passed", "failed", "hung" and "died".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import pytest

PR_SET_PDEATHSIG = 1
QUICK = "not slow and not multirank"


class Native:
    """The mutants of the engine, if it has any."""

    def __init__(self) -> None:
        from embstore import _core

        self._chosen = self._cells = None
        library = ctypes.CDLL(_core.__file__)
        with contextlib.suppress(ValueError):  # an engine without mutants
            size = ctypes.c_int.in_dll(library, "embstore_mutants").value
            self._cells = (ctypes.c_ubyte * size).in_dll(library, "embstore_reached")
            self._chosen = ctypes.c_int.in_dll(library, "embstore_mutant")

    def choose(self, number: int) -> None:
        if self._chosen is not None:
            self._chosen.value = number

    def clear(self) -> None:
        if self._cells is not None:
            ctypes.memset(self._cells, 0, len(self._cells))

    def reached(self) -> list[int]:
        return [] if self._cells is None else [i for i, cell in enumerate(bytes(self._cells)) if cell]


class Server:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import embstore_mutant

        items = {item.nodeid: item for item in session.items}
        native = Native()
        at_import = sorted(embstore_mutant.REACHED)
        for line in sys.stdin:
            order = json.loads(line)
            if "reach" in order:
                end = in_fork(lambda path=order["reach"]: self._reach(items, native, at_import, path), 1800)
            else:
                chosen = [items[name] for name in order["tests"] if name in items]

                def work(number: int = order["mutant"], now: list[pytest.Item] = chosen) -> bool:
                    embstore_mutant.CHOSEN = number
                    native.choose(number)
                    return self._run(now)

                end = in_fork(work, order["seconds"])
            os.write(self._answers, json.dumps({"end": end}).encode() + b"\n")
        return True

    def _run(self, items: list[pytest.Item]) -> bool:
        """Whether all pass; ends at the first that fails."""
        for item, after in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                return False
        return True

    def _reach(self, items: dict[str, pytest.Item], native: Native, at_import: list[int], path: str) -> bool:
        """Writes the mutants that each test asks about, and how long it takes."""
        import embstore_mutant

        found: dict[str, Any] = {"import": {"seconds": 0.0, "reached": at_import}}
        listed = list(items.values())
        for item, after in zip(listed, [*listed[1:], None]):
            embstore_mutant.REACHED.clear()
            native.clear()
            start = time.perf_counter()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            reached = sorted({*embstore_mutant.REACHED, *native.reached()})
            if not self._failed:  # a test that fails without a mutant tells nothing
                found[item.nodeid] = {"seconds": time.perf_counter() - start, "reached": reached}
            self._failed = False
        with open(path, "w") as out:
            json.dump(found, out)
        return True


def in_fork(work: Any, seconds: float) -> str:
    """How the work ends in a process group of its own."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives this process
            code = 0 if work() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if done[0] == 0:
        os.waitpid(child, 0)
        return "hung"
    status = os.waitstatus_to_exitcode(done[1])
    return "died" if status < 0 or status == 70 else "passed" if status == 0 else "failed"


if __name__ == "__main__":
    options = [
        "-q",
        "--no-header",
        "-s",
        "-o",
        "cache_dir=build/mutation/pytest",
        "-W",
        "ignore",
        "-m",
        QUICK,
    ]
    sys.exit(pytest.main([*options, *sys.argv[2:]], plugins=[Server(int(sys.argv[1]))]))
