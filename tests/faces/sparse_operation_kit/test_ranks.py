"""Several real processes: torchrun and gloo, and horovod where it is installed."""

import importlib.util
import re
import sys
from pathlib import Path

import forked_programs
import pytest
from faces.sparse_operation_kit import ranks
from process_groups import run

from sparse_operation_kit import communication

PROGRAM = Path(__file__).with_name("ranks.py")
NEEDS = ["sparse_operation_kit", "tf_keras", "torch.distributed"]
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="horovod is not installed"
)


def launch(count, *arguments):
    output = forked_programs.run(
        [PROGRAM, *arguments],
        ranks=count,
        needs=NEEDS,
        seconds=400,
    )
    assert output.count("all well") == count, output[-6000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two ranks have trained every optimizer, checked the rows and left a dump of each."""
    directory = tmp_path_factory.mktemp("trained")
    launch(2, "train", directory)
    return directory


@pytest.mark.parametrize("scenario", [ranks.increments, ranks.capacity], ids=lambda s: s.__name__)
def test_one_rank_does_what_several_do(scenario):
    scenario(0, 1)


@pytest.mark.multirank
@pytest.mark.timeout(450)
def test_two_ranks_look_up_train_and_dump_as_one_table_would(trained):
    saved = sorted(trained.glob("*.npz"))
    assert len(saved) == 2 * 8 + 1
    for path in saved:  # into one rank: this process
        ranks.load_one(*path.stem.split(" ", 1), trained)


@pytest.mark.multirank
@pytest.mark.timeout(450)
def test_a_dump_of_two_ranks_loads_into_three_that_evict_and_report_changes_too(trained):
    launch(3, "load", trained)


@pytest.mark.multirank
@pytest.mark.timeout(450)
def test_the_example_trains_on_two_ranks_and_finds_its_rows_again_after_a_reload():
    output = forked_programs.run(["examples/sok_dlrm.py", "--steps=60"], ranks=2, needs=NEEDS, seconds=400)
    lines = re.findall(r"held-out loss ([0-9.]+), after a reload ([0-9.]+)", output)
    assert len(lines) == 2 and len({loss for line in lines for loss in line}) == 1, output
    assert float(lines[0][0]) < 0.63  # a model that learned nothing has ln 2


@needs_horovod
def test_horovod_should_be_initialised_first():
    with pytest.raises(RuntimeError, match="hvd.init()"):
        communication.Horovod()


@pytest.mark.multirank
@pytest.mark.timeout(450)
@needs_horovod
def test_horovod_gives_the_same(tmp_path):
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    program = [sys.executable, str(PROGRAM), "train", str(tmp_path), "horovod"]
    assert run([horovodrun, "-np", "2", "--gloo", *program], 400).count("all well") == 2
