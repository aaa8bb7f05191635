"""Short version of trust.kills; tests/serving/test_kill.py is that of serving."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import kills


@pytest.mark.multirank
@pytest.mark.parametrize("kind", kills.WORKLOADS)
@pytest.mark.filterwarnings("ignore")
def test_a_process_that_is_killed_at_any_moment_leaves_what_it_acknowledged(kind):
    done = []
    kills.rounds_of(kills.WORKLOADS[kind], 6, random.Random(3), done.append)
    assert len(done) == 6
