"""kill -9 at random moments, again and again: what was acknowledged is there, whole.

    python -m trust.kills --rounds 1000                 of each kind
    python -m trust.kills --kind dump --rounds 100

A process writes states and says so after each, until it is killed. The disk must hold the last state that it
said or the one after it, whole, and another process goes on from there. For serving, a trainer and two
readers of its log are killed in turn, and a reader must never show anything but a whole state.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trust.fault_workloads import Dump, Log, Sok, Ssd, Tier
from trust.faults import in_child

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving import kill_rounds


class Increments(Log):
    """A log that only grows."""

    compact_every = 10**9


class Compactions(Log):
    """A log that is compacted before each increment."""

    compact_every = 1


WORKLOADS: dict[str, Any] = {
    "dump": Dump(),
    "increment": Increments(),
    "compaction": Compactions(),
    "snapshot": Ssd(),
    "ssd tier": Tier(),
    "sok": Sok(),
}
KINDS = (*WORKLOADS, "serving")
MOST_STATES = 200
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a kill does not depend on the disk


def killed(workload: Any, folder: Path, seconds: float) -> tuple[int, float]:
    """Kills it so long after the first state. Returns the last one that it said, and how long each took."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            workload.prepare(folder)
            os.write(writer, b"0\n")
            for state in range(1, MOST_STATES):
                workload.write(folder, state)
                os.write(writer, b"%d\n" % state)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        first = pipe.readline()
        begin = time.monotonic()
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        said = first + pipe.read()
    took = time.monotonic() - begin
    _, status = os.waitpid(child, 0)
    last = int(said.split()[-1]) if said else -1
    assert last >= 0, "nothing was written"
    assert os.WIFSIGNALED(status) or last == MOST_STATES - 1, f"it ended by itself after state {last}"
    return last, took / max(last, 1)


def rounds_of(workload: Any, rounds: int, rng: random.Random, report: Callable[[int], None]) -> int:
    """Returns how many states were written. Raises AssertionError where a promise was broken."""
    written, usual = 0, 0.02  # seconds of a state
    for done in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="embstore-kill-", dir=MEMORY))
        last, took = killed(workload, folder, rng.uniform(0, 4 * usual))
        usual = 0.9 * usual + 0.1 * min(took, 1.0)

        def check(say: Callable[[Any], None], folder: Path = folder, last: int = last) -> None:
            found = workload.read(folder)
            assert found in (last, last + 1), f"the state is {found}, but {last} was said"
            workload.go_on(folder, found + 1)

        _, end = in_child(check)
        assert end == "ok", f"{folder}: {end}"
        shutil.rmtree(folder)
        written += last
        report(done + 1)
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--rounds", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, help="of the moments; chosen and told by default")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    broken = 0
    for kind in options.kind or KINDS:
        begin, done = time.monotonic(), itertools.count(0)

        def report(_: int, done: Any = done) -> None:
            next(done)

        try:
            if kind == "serving":
                folder = Path(tempfile.mkdtemp(prefix="embstore-kill-"))
                written = kill_rounds.run(folder, options.rounds, seed, report)
                shutil.rmtree(folder)
            else:
                written = rounds_of(WORKLOADS[kind], options.rounds, random.Random(seed), report)
            told = f"{written:,} states"
        except AssertionError as error:
            broken, told = broken + 1, f"BROKEN: {error}"
        seconds = time.monotonic() - begin
        print(f"{kind:<12}{next(done):>6} rounds, {told}, {seconds:.0f} s, seed {seed}", flush=True)
    print(f"{broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
