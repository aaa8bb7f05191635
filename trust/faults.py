"""Faults of disks, processes and memory: every call that changes a file fails once, in every way, and so does
every request of the engine for memory. In every workload.

    python -m trust.faults                       all calls, all faults
    python -m trust.faults --every 7             every seventh call
    python -m trust.faults --workload dump --fault power

The library of trust/faults.c and trust/fault_memory.c sits between the program and libc. A workload writes
states 1, 2, 3, ... and says so after each; where it only reads, calls that read fail as well. Whether it
fails, is killed or loses its power: what is on the disk must be the last state that it said, or the one after
it, whole. An error that is raised leaves the last state, unless it says that the new one is published, and
the same call made again succeeds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEMORY = 6  # the others are those of trust/faults.c
FAULTS = {"eio": 1, "enospc": 2, "short": 3, "kill": 4, "power": 5, "memory": MEMORY}
RUN_SECONDS = 300  # by the clock, which goes on while the process is stopped


def build() -> Path:
    """Compiles the library."""
    target = ROOT / "build" / "libfaults.so"
    target.parent.mkdir(exist_ok=True)
    sources = [Path(__file__).with_name(name) for name in ("faults.c", "fault_memory.c")]
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        command = ["gcc", "-O1", "-shared", "-fPIC", "-o", target, *sources, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return target


def in_child(work: Callable[[Callable[[Any], None]], None]) -> tuple[list[Any], str]:
    """Runs it in a fork. Returns what it said, and how it ended: "ok", "killed" or a traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(RUN_SECONDS)  # a hang ends with SIGALRM

        def say(what: Any) -> None:
            data = pickle.dumps(what)
            os.write(writer, len(data).to_bytes(4, "little") + data)

        try:
            work(say)
            say(("end", "ok"))
        except BaseException:
            say(("end", traceback.format_exc()))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    said = []
    while data:
        size = int.from_bytes(data[:4], "little")
        said.append(pickle.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return said, "killed" if number == signal.SIGKILL else f"ended by {signal.Signals(number).name}"
    return said[:-1], said[-1][1]


class Run:
    """One workload with one fault."""

    def __init__(self, library: Any, workload: Any, place: Path) -> None:
        self._library, self._workload, self._place = library, workload, place

    def calls(self, kind: int) -> int:
        """How many calls the workload makes that may fail in this way."""
        said, end = self._train(0, kind)
        if end != "ok":
            raise RuntimeError(f"{self._workload.name} fails without a fault: {end}")
        return int(said[-1])

    def _train(self, at: int, kind: int) -> tuple[list[Any], str]:
        shutil.rmtree(self._place, ignore_errors=True)
        data, undo = self._place / "data", self._place / "undo"
        data.mkdir(parents=True)
        undo.mkdir()

        def work(say: Callable[[Any], None]) -> None:
            self._workload.prepare(data)
            reads = getattr(self._workload, "only_reads", False)
            if kind == MEMORY:
                self._library.memory_arm(at)
            else:
                self._library.fault_arm(str(data).encode(), str(undo).encode(), at, kind, reads)
            for state in self._workload.states:
                try:
                    self._workload.write(data, state)
                except Exception as error:
                    # A fault strikes once: what is read now is what others would read.
                    say(("error", state, self._workload.read(data), "published" in str(error), str(error)))
                    self._workload.write(data, state)
                say(("state", state))
            say(self._library.memory_disarm() if kind == MEMORY else self._library.fault_disarm())

        return in_child(work)

    def check(self, at: int, kind: int) -> str:
        """Raises AssertionError where a promise was broken. Returns how the workload ended."""
        said, end = self._train(at, kind)
        assert end in ("ok", "killed"), end
        last = 0
        for what in said[:-1] if end == "ok" else said:
            if what[0] == "error":
                _, state, found, published, message = what
                may_be_new = published or getattr(self._workload, "only_reads", False)
                allowed = (state, last) if may_be_new else (last,)
                assert found in allowed, f"after {message!r} the state is {found}, not {allowed}"
            else:
                last = what[1]
        following = [s for s in self._workload.states if s > last][:1]

        def after(say: Callable[[Any], None]) -> None:
            found = self._workload.read(self._place / "data")
            assert found in (last, *following), f"the state is {found}, not {last} or {following}"
            self._workload.go_on(self._place / "data", 9)

        _, well = in_child(after)
        assert well == "ok", well
        return "an error" if end == "ok" and any(w[0] == "error" for w in said[:-1]) else end


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", action="append", help="its name; may be repeated (default: all)")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="default: all")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth call fails")
    options = parser.parse_args(arguments)
    library = build()
    if str(library) not in os.environ.get("LD_PRELOAD", ""):
        again = [sys.executable, "-m", "trust.faults", *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(again, cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(library)}).returncode
    from trust.fault_workloads import WORKLOADS

    failed = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        for name in options.workload or list(WORKLOADS):
            run = Run(ctypes.CDLL(str(library)), WORKLOADS[name], Path(folder) / name)
            for fault in options.fault or list(FAULTS):
                calls = run.calls(FAULTS[fault])
                ends: Counter[str] = Counter()
                for at in range(1, calls + 1, options.every):
                    try:
                        ends[run.check(at, FAULTS[fault])] += 1
                    except AssertionError as error:
                        failed += 1
                        print(f"{name}, {fault} at call {at}: {error}", file=sys.stderr, flush=True)
                counted = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
                print(f"{name:<12}{fault:<8}{calls} calls: {counted}", flush=True)
    print(f"{failed} broken promises")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
