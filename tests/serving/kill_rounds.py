"""Rounds in which the trainer or a reader of one log is killed at a random moment and started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked_trainers
from serving.kill_targets import advance, generation_of, tables

import embstore


class Target:
    """A process that is started again each time it was killed."""

    def __init__(self, folder: Path) -> None:
        script = str(Path(__file__).with_name("kill_targets.py"))
        self._launcher = subprocess.Popen(
            [sys.executable, forked_trainers.__file__, script, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._process = 0

    def _read(self) -> str:
        assert self._launcher.stdout
        return self._launcher.stdout.readline().strip()

    def start(self) -> None:
        assert self._launcher.stdin
        self._launcher.stdin.write("\n")
        self._launcher.stdin.flush()
        self._process = int(self._read())
        assert self._read() == "ready"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        assert self._read() == "gone"

    def end(self) -> None:
        self._launcher.kill()
        if self._process:  # it would go on, and hold the pipes open
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
        self._launcher.communicate()


def run(folder: Path, rounds: int, seed: int, report: Callable[[int], None] = lambda done: None) -> int:
    """Raises AssertionError when a reader showed anything but a whole state, or does not catch up. Returns
    how many increments there were."""
    of = tables()
    advance(of, 0)
    embstore.IncrementLog.create(folder / "log", of)
    names = ("trainer", "reader-0", "reader-1")
    for name in names:
        (folder / name).mkdir()
    moment = random.Random(seed)
    trainer, *readers = targets = [Target(folder / name) for name in names]
    try:
        for target in targets:
            target.start()
        for done in range(rounds):
            time.sleep(moment.uniform(0, 0.25))
            victim = moment.choice(targets)
            victim.kill()
            failures = [path.read_text() for path in folder.glob("failure-*")]
            assert failures == [], f"round {done}, seed {seed}: {failures}"
            victim.start()
            report(done + 1)
        last = embstore.serving.Reader(folder / "log", cache=folder / "cache")
        deadline = time.monotonic() + 120
        while generation_of(last) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            last.follow()
        trainer.kill()
        last.follow()
        assert generation_of(last) >= 3
        assert last.state.number == embstore.IncrementLog(folder / "log").last()
        for reader in readers:
            reader.kill()
    finally:
        for target in targets:
            target.end()
    assert [path.read_text() for path in folder.glob("failure-*")] == []
    return last.state.number
