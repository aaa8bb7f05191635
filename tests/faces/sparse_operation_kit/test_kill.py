"""kill -9 in the middle of sok.dump leaves the old dump or the new one.

EMBSTORE_KILL_ROUNDS=200 for the long run.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_trainers
import numpy as np
import pytest

from embstore.formats.sok import DumpReader

ROUNDS = int(os.environ.get("EMBSTORE_KILL_ROUNDS", "12"))
ROWS, DIM = 20_000, 16


def generation(folder):
    """The step of a dump, the same in every row of every file; sizes and checksums are looked at."""
    reader = DumpReader(folder)
    step = reader.manifest["iterations"]
    assert reader.tables() == ["dynamic_0", "static_0"]
    for name in reader.tables():
        table = reader.table(name)
        np.testing.assert_array_equal(table.keys, np.arange(ROWS))
        assert table.values.shape == (ROWS, DIM) and list(table.states) == ["SGD-momentum"]
        assert (table.values == -step * (step + 1) / 2).all(), f"rows of {name} are not of step {step}"
        assert (table.states["SGD-momentum"] == -step).all(), f"states of {name} are not of step {step}"
    return step


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(120 + 10 * ROUNDS)
def test_killed_at_random_moments_of_a_dump_the_old_or_the_new_one_is_there(tmp_path):
    script = str(Path(__file__).with_name("kill_target.py"))
    target = subprocess.Popen(
        [sys.executable, forked_trainers.__file__, script, str(tmp_path / "weights")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def announced():
        """The number of the dump that begins now."""
        line = next(line for line in target.stdout if line.startswith("dump "))  # sok.init prints too
        return int(line.split()[1])

    rng = random.Random(3)
    before = in_the_middle = 0
    try:
        for _ in range(ROUNDS):
            target.stdin.write("\n")
            target.stdin.flush()
            trainer = int(target.stdout.readline())
            assert announced() == before + 1, "a trainer goes on where the dump is"
            begin = time.monotonic()
            assert announced() == before + 2  # one dump is complete: how long it takes
            time.sleep(rng.uniform(0, 1.2) * (time.monotonic() - begin))
            os.kill(trainer, signal.SIGKILL)
            last = before + 1
            while (line := target.stdout.readline()) != "gone\n":
                last = int(line.split()[1]) - 1  # what was announced after this one was complete
            found = generation(tmp_path / "weights")
            assert last <= found <= last + 1
            in_the_middle += len(list(tmp_path.iterdir())) > 1  # a draft was left
            before = found
    finally:
        os.killpg(target.pid, signal.SIGKILL)
        target.wait()
        target.stdin.close()
        target.stdout.close()
    assert in_the_middle, "no kill met a dump: the test says nothing"
