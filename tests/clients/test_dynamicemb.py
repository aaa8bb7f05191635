"""Programs that use dynamicemb as its known clients do, on one rank and on two."""

import sys
from pathlib import Path

import pytest
from process_groups import run

PROGRAMS = ("dynamicemb_torcheasyrec.py", "dynamicemb_hstu.py")


@pytest.mark.multirank
@pytest.mark.timeout(250)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_dynamicemb_trains_dumps_and_restores(program, world, tmp_path):
    start = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    path = str(Path(__file__).with_name(program))
    output = run([*start, f"--nproc-per-node={world}", path, str(tmp_path)], 240)
    assert output.count(f"of {world}: all well") == world, output[-6000:]
