"""Short version of trust.state_machines."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import state_machines


@pytest.mark.parametrize("name", state_machines.MACHINES)
@pytest.mark.filterwarnings("ignore")
def test_any_sequence_of_operations_on_tiers_logs_and_readers_does_what_a_dict_does(name):
    state_machines.run(state_machines.MACHINES[name], examples=5, steps=25, same_every_time=True)
