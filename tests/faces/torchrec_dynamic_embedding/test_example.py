"""The example program, as the guide says to run it."""

import re
from pathlib import Path

import forked_programs
import pytest
import redis_server

ROOT = Path(__file__).parents[3]


@pytest.mark.multirank
@pytest.mark.timeout(200)
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
def test_two_ranks_train_over_a_redis_server(redis):
    program = [ROOT / "examples/parameter_server.py", "--url", f"redis://{redis.where}/?prefix=example"]
    needs = ["torchrec_dynamic_embedding"]
    output = forked_programs.run(
        [*program, "--epochs", 2, "--batches", 30], ranks=2, needs=needs, seconds=180
    )
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) to", output)]
    assert len(losses) == 2 and losses[1] < losses[0], output
