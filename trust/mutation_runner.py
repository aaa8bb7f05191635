"""Runs Python tests under one mutant after the other, each in a fork that has collected them already.

    python -m trust.mutation_runner 3 build/mutation tests/checkpoint tests/native

Reads a line of JSON from stdin for each request, and answers with a line on the given file descriptor:

    {"reach": "reach.json", "but": ["tests/native/test_bags.py"]}            {"end": "passed", "test": ""}
    {"mutant": 17, "tests": ["tests/native/test_table.py::..."], "seconds": 30, "fresh": false}
                                       {"end": "failed", "test": "tests/native/test_table.py::..."}

Ends are "passed", "failed", "hung" and "died". A mutant that importing asks about needs a fresh process: a
fork of one that has imported what embstore needs, but not embstore.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import mmap
import os
import resource
import signal
import sys
import time
from collections import deque
from typing import Any

import pytest

PR_SET_PDEATHSIG = 1
MOST_BYTES = 12 << 30  # of addresses: a mutant may ask for all memory
QUICK = "not slow and not multirank"
IDLE_LOOKS = 30  # seconds in which a process group uses 1 % of a processor at most: it hangs


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

    def __init__(self, answers: int, fresh: Fresh) -> None:
        self._answers, self._fresh = answers, fresh
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import embstore_mutant

        gc.freeze()  # a collection in a fork would copy every page
        items = {item.nodeid: item for item in session.items}
        native = Native()
        at_import = sorted(embstore_mutant.REACHED)
        for line in sys.stdin:
            order = json.loads(line)
            if order.get("fresh"):
                answer = self._fresh.ask(line)
            elif "reach" in order:
                wanted = [i for i in items.values() if i.nodeid.split("::")[0] not in order["but"]]

                def look(_: Any, path: str = order["reach"], wanted: list[pytest.Item] = wanted) -> bool:
                    return self._reach(wanted, native, at_import, path)

                answer = in_fork(look, 1800)
            else:
                chosen = [items[name] for name in order["tests"] if name in items]

                def work(say: Any, number: int = order["mutant"], now: list[pytest.Item] = chosen) -> bool:
                    embstore_mutant.CHOSEN = number
                    os.environ["EMBSTORE_MUTANT"] = str(number)  # for processes that a test starts
                    native.choose(number)
                    return self._run(now, say)

                answer = in_fork(work, order["seconds"])
            os.write(self._answers, json.dumps(answer).encode() + b"\n")
        return True

    def _run(self, items: list[pytest.Item], say: Any) -> bool:
        """Whether all pass; ends at the first that fails."""
        for item, after in zip(items, [*items[1:], None]):
            say(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                return False
        return True

    def _reach(self, items: list[pytest.Item], native: Native, at_import: list[int], path: str) -> bool:
        """Writes the mutants that each test asks about, and its CPU time."""
        import embstore_mutant

        found: dict[str, Any] = {"import": {"seconds": 0.0, "reached": at_import}}
        for item, after in zip(items, [*items[1:], None]):
            embstore_mutant.REACHED.clear()
            native.clear()
            start = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            reached = sorted({*embstore_mutant.REACHED, *native.reached()})
            if not self._failed:  # a test that fails without a mutant tells nothing
                found[item.nodeid] = {"seconds": time.process_time() - start, "reached": reached}
            self._failed = False
        with open(path, "w") as out:
            json.dump(found, out)
        return True


class Fresh:
    """A process that forks before embstore is imported."""

    def __init__(self, work: str) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        if os.fork() == 0:
            os.close(self._orders)
            for module in ("numpy", "torch", "pyarrow.parquet", "safetensors.numpy", "hypothesis"):
                importlib.import_module(module)
            gc.freeze()
            for line in os.fdopen(orders):
                order = json.loads(line)
                answer = in_fork(lambda say, order=order: self._run(order, say, work), order["seconds"] + 30)
                os.write(answers, json.dumps(answer).encode() + b"\n")
            os._exit(0)
        os.close(orders)
        self._lines = os.fdopen(self._answers)

    def ask(self, line: str) -> Any:
        os.write(self._orders, line.encode())
        return json.loads(self._lines.readline())

    def _run(self, order: dict[str, Any], say: Any, work: str) -> bool:
        os.environ["EMBSTORE_MUTANT"] = str(order["mutant"])
        say(order["tests"][0])  # should importing fail
        return pytest.main([*options(work), "-x", *order["tests"]], plugins=[Announcer(say)]) == 0


class Announcer:
    def __init__(self, say: Any) -> None:
        self._say = say

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(nodeid)


class Watch:
    """Whether a process group hangs. The clock does not tell: on a busy machine it may only be waiting for a
    processor, and would count as a mutant that was noticed. CPU time has a limit of its own.

    A thread that only looks at something now and then, without end, does not count as work."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._looked = time.monotonic()
        self._looks: deque[tuple[bool, int]] = deque(maxlen=IDLE_LOOKS)

    def hangs(self) -> bool:
        now = time.monotonic()
        if now > self._looked + 1:
            if now > self._looked + 10:  # this process was stopped, and most likely the others with it
                self._looks.clear()
            self._looked = now
            self._looks.append(self._look())
        if len(self._looks) < IDLE_LOOKS:
            return False
        ticks = self._looks[-1][1] - self._looks[0][1]
        return sum(running for running, _ in self._looks) <= IDLE_LOOKS // 10 and ticks <= IDLE_LOOKS

    def _look(self) -> tuple[bool, int]:
        """Whether a thread wants a processor or a disk or is stopped, and the ticks of CPU time of all."""
        running, used = False, 0
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if os.getpgid(int(process)) != self._group:
                    continue
                for thread in os.listdir(f"/proc/{process}/task"):
                    with open(f"/proc/{process}/task/{thread}/stat") as file:
                        fields = file.read().rpartition(")")[2].split()
                    running |= fields[0] in "RDTt"
                    used += int(fields[11]) + int(fields[12])
        return running, used


def in_fork(work: Any, cpu_seconds: float) -> dict[str, str]:
    """How the work ends in a process group of its own, and the test that it named last."""
    named = mmap.mmap(-1, 4096)

    def say(name: str) -> None:
        named[:] = name.encode()[:4096].ljust(4096, b"\0")

    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives this process
            limit = math.ceil(cpu_seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            code = 0 if work(say) else 1
        finally:
            os._exit(code)
    watch = Watch(child)
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and not watch.hangs():
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if done[0] == 0:
        os.waitpid(child, 0)
        end = "hung"
    else:
        status = os.waitstatus_to_exitcode(done[1])
        end = "hung" if status in (-signal.SIGXCPU, -signal.SIGKILL) else "died"
        end = end if status < 0 or status == 70 else "passed" if status == 0 else "failed"
    return {"end": end, "test": bytes(named).rstrip(b"\0").decode()}


def options(work: str) -> list[str]:
    found = ["-q", "--no-header", "-s", "-o", f"cache_dir={work}/pytest", "-W", "ignore", "-m", QUICK]
    return [*found, "-o", "timeout=0"]  # which goes by the clock


if __name__ == "__main__":
    _, answers, work, *chosen = sys.argv
    server = Server(int(answers), Fresh(work))
    sys.exit(pytest.main([*options(work), *chosen], plugins=[server]))
