"""Short version of trust.ranks: real ranks, killed once in each phase."""

import sys
from pathlib import Path

import process_groups
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_the_others_raise_when_a_rank_is_killed_and_training_resumes_to_the_same_bits():
    command = ["env", "-C", str(ROOT), sys.executable, "-m", "trust.ranks", "--rounds", "4", "--ranks", "2"]
    output = process_groups.run(command, 220)
    assert output.rstrip().endswith("0 broken promises")
    for phase in ("connection", "construction", "step", "save"):
        assert f"killed in {phase}: " in output
