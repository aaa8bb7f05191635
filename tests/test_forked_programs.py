"""Programs that tests fork: ranks that talk, one that fails, one that hangs, children that stay behind."""

import os
import time

import forked_programs
import pytest

pytestmark = pytest.mark.multirank

RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
os.write(1, f"{__name__} {sys.argv[1:]} sum {total.item()}\\n".encode())
if "fail" in sys.argv and dist.get_rank() == 1:
    raise LookupError("the disk of this rank is gone")
dist.barrier()
"""
SLEEPER = """
import subprocess, sys, time
print(subprocess.Popen(["sleep", "100"]).pid, flush=True)
time.sleep(100 * (len(sys.argv) > 1))
"""


@pytest.fixture
def program(tmp_path):
    def write(text):
        (tmp_path / "program.py").write_text(text)
        return tmp_path / "program.py"

    return write


def is_gone(pid):
    """Whether no process has this number, but for one that nobody has waited for."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_are_the_main_program_with_its_arguments_and_find_each_other(program, ranks):
    output = forked_programs.run([program(RANK), "x", 7], ranks=ranks, needs=["torch"], seconds=60)
    total = ranks * (ranks + 1) // 2
    assert output.count(f"__main__ ['x', '7'] sum {total}\n") == ranks


def test_a_rank_that_fails_fails_the_test_with_its_trace_and_ends_the_others(program):
    with pytest.raises(AssertionError, match="LookupError: the disk of this rank is gone") as failure:
        forked_programs.run([program(RANK), "fail"], ranks=3, needs=["torch"], seconds=100)
    assert "exit codes [" in str(failure.value)


def test_a_program_that_hangs_is_killed_at_its_time_limit_with_its_children(program):
    with pytest.raises(AssertionError, match=r"exit codes \[-9\]") as failure:
        forked_programs.run([program(SLEEPER), "hang"], seconds=2)
    assert is_gone(int(str(failure.value).split("\n")[1]))


def test_what_a_program_leaves_behind_is_killed(program):
    assert is_gone(int(forked_programs.run([program(SLEEPER)], seconds=60)))


def test_a_test_that_is_over_ends_the_program_that_it_waits_for(program, tmp_path, monkeypatch):
    text = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"

    def limit(*_):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        raise TimeoutError("of the test")

    forked_programs.run([program("")], seconds=60)  # there is a server
    monkeypatch.setattr(forked_programs.select, "select", limit)
    with pytest.raises(TimeoutError, match="of the test"):
        forked_programs.run([program(text)], seconds=60)
    assert is_gone(int((tmp_path / "pid").read_text()))
    monkeypatch.undo()
    assert forked_programs.run([program("print(8)")], seconds=60) == "8\n"


def test_exit_codes_folder_and_environment_are_those_asked_for(program, tmp_path):
    text = "import os, sys; print(os.getcwd(), os.environ['COLOUR']); sys.exit('no more')"
    with pytest.raises(
        AssertionError, match=rf"exit codes \[1\]:\n{os.path.realpath(tmp_path)} red\nno more"
    ):
        forked_programs.run([program(text)], cwd=tmp_path, environment={"COLOUR": "red"}, seconds=60)
