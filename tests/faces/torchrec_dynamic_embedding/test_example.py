"""The example program, as the guide says to run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis_server

ROOT = Path(__file__).parents[3]


@pytest.mark.multirank
@pytest.mark.timeout(200)
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
def test_two_ranks_train_over_a_redis_server(redis):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "examples/parameter_server.py"), "--url", f"redis://{redis.where}/?prefix=example"]
    done = subprocess.run(
        [*command, "--epochs", "2", "--batches", "30"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) to", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0], done.stdout
