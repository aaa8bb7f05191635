"""Programs that use dynamicemb as its known clients do, on one rank and on two."""

from pathlib import Path

import forked_programs
import pytest

PROGRAMS = ("dynamicemb_torcheasyrec.py", "dynamicemb_hstu.py")


@pytest.mark.multirank
@pytest.mark.timeout(250)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_dynamicemb_trains_dumps_and_restores(program, world, tmp_path):
    command = [Path(__file__).with_name(program), tmp_path]
    output = forked_programs.run(
        command, ranks=world, needs=["dynamicemb.shard", "dynamicemb.planner"], seconds=200
    )
    assert output.count(f"of {world}: all well") == world, output[-6000:]
