"""Programs that use SparseOperationKit as its known clients do, on one rank and on two."""

import sys
from pathlib import Path

import pytest
from process_groups import run

PROGRAMS = ("sok_easyrec.py", "sok_merlin.py", "sok_hugectr.py")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_sok_trains_dumps_and_restores_on_one_rank(program, tmp_path):
    output = run([sys.executable, str(Path(__file__).with_name(program)), str(tmp_path)], 110)
    assert output.count("rank 0 of 1: all well") == 1, output[-6000:]


@pytest.mark.multirank
@pytest.mark.timeout(250)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_sok_trains_dumps_and_restores_on_two_ranks(program, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run([*start, str(Path(__file__).with_name(program)), str(tmp_path)], 240)
    assert output.count("of 2: all well") == 2, output[-6000:]
