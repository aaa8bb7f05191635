"""Short version of trust.same_bits: real ranks, a real Redis."""

import sys
from pathlib import Path

import process_groups
import pytest
from redis_server import MISSING

ROOT = Path(__file__).parents[2]


@pytest.mark.multirank
@pytest.mark.timeout(400)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_ranks_threads_kernels_restarts_tiers_and_packages_train_the_same_bits():
    command = ["env", "-C", str(ROOT), sys.executable, "-m", "trust.same_bits", "--short"]
    output = process_groups.run(command, 380)
    assert output.rstrip().endswith("the same bits")
    assert len({line.split()[-1] for line in output.splitlines() if " sgd " in line}) == 1
