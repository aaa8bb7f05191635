"""Programs that use SparseOperationKit as its known clients do, on one rank and on two."""

from pathlib import Path

import forked_programs
import pytest

PROGRAMS = ("sok_easyrec.py", "sok_merlin.py", "sok_hugectr.py")


@pytest.mark.multirank
@pytest.mark.timeout(250)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_sok_trains_dumps_and_restores(program, world, tmp_path):
    output = forked_programs.run(
        [Path(__file__).with_name(program), tmp_path],
        ranks=0 if world == 1 else world,  # one process alone needs no launcher
        needs=["sparse_operation_kit", "tf_keras", "torch.distributed"],
        seconds=200,
    )
    assert output.count(f"of {world}: all well") == world, output[-6000:]
