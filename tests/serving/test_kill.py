"""kill -9 of the trainer and of readers at any moment: no reader ever shows anything but a whole state.

EMBSTORE_KILL_ROUNDS=1000 for the long run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_trainers
import pytest
from serving.kill_targets import advance, generation_of, tables

import embstore

ROUNDS = int(os.environ.get("EMBSTORE_KILL_ROUNDS", "12"))


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
        self._launcher.communicate()


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(60 + 10 * ROUNDS)
def test_readers_show_whole_states_though_everybody_is_killed(tmp_path: Path) -> None:
    of = tables()
    advance(of, 0)
    embstore.IncrementLog.create(tmp_path / "log", of)
    for name in ("trainer", "reader-0", "reader-1"):
        (tmp_path / name).mkdir()
    random_moment = random.Random(5)
    trainer, *readers = targets = [Target(tmp_path / n) for n in ("trainer", "reader-0", "reader-1")]
    try:
        for target in targets:
            target.start()
        for _ in range(ROUNDS):
            time.sleep(random_moment.uniform(0, 0.25))
            victim = random_moment.choice(targets)
            victim.kill()
            victim.start()
        last = embstore.serving.Reader(tmp_path / "log", cache=tmp_path / "cache")
        deadline = time.monotonic() + 30
        while generation_of(last) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            last.follow()
        trainer.kill()
        last.follow()
        assert generation_of(last) == embstore.IncrementLog(tmp_path / "log").last() >= 3
        for reader in readers:
            reader.kill()
    finally:
        for target in targets:
            target.end()
    assert [path.read_text() for path in tmp_path.glob("failure-*")] == []
