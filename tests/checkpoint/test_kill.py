"""kill -9 at any moment leaves the old state or the new one.

EMBSTORE_KILL_ROUNDS=200 for the long run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_trainers
import pytest
from checkpoint.kill_target import advance, generation_of, table

import embstore

ROUNDS = int(os.environ.get("EMBSTORE_KILL_ROUNDS", "25"))


def stored(folder: Path) -> tuple[int, int]:
    """The generations of the dump and of the log, both read in full."""
    current, followed = table(), table()
    embstore.open_dump(folder / "current").verify()
    embstore.load(folder / "current", {"model": {"user": current}}, optim=True)
    log = embstore.IncrementLog(folder / "log")
    log.verify()
    log.load({"model": {"user": followed}})
    return generation_of(current), generation_of(followed)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(30 + 30 * ROUNDS)
def test_killed_at_random_moments_the_old_or_the_new_state_verifies(tmp_path: Path) -> None:
    user = table()
    advance(user, 0)
    start = time.monotonic()
    embstore.dump(tmp_path / "current", {"model": {"user": user}}, optim=True)
    embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": user}})
    generation_seconds = time.monotonic() - start
    user.close()
    random_moment = random.Random(7)
    before = (0, 0)
    advanced = 0
    script = str(Path(__file__).with_name("kill_target.py"))
    with subprocess.Popen(
        [sys.executable, forked_trainers.__file__, script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as target:
        assert target.stdin and target.stdout
        try:
            # A slow machine takes more rounds, and longer ones, until a generation is complete.
            for round_ in range(3 * ROUNDS):
                if round_ >= ROUNDS and advanced:
                    break
                target.stdin.write("\n")
                target.stdin.flush()
                process = int(target.stdout.readline())
                assert target.stdout.readline() == "ready\n"
                time.sleep(random_moment.uniform(0, (4 + round_) * generation_seconds))
                os.kill(process, signal.SIGKILL)
                assert target.stdout.readline() == "gone\n"
                dumped, followed = stored(tmp_path)
                # The trainer resumes from the log and writes the dump first.
                assert dumped >= before[0] and followed >= before[1]
                assert dumped in (followed, followed + 1)
                advanced += followed > before[1]
                before = (dumped, followed)
        finally:
            target.kill()
    assert advanced, "the trainer should get somewhere between kills"
    left = [p.name for p in tmp_path.iterdir() if p.name not in ("current", "log")]
    assert len(left) <= 1, f"what killed writers left is removed by the next: {left}"
