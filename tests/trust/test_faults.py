"""Short version of trust.faults: some of the calls of each workload fail, in every way."""

import shutil
import sys
from pathlib import Path

import process_groups
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_failing_disk_a_kill_or_a_power_cut_at_any_call_loses_no_acknowledged_state():
    command = ["env", "-C", str(ROOT), sys.executable, "-m", "trust.faults", "--every", "29"]
    output = process_groups.run(command, 220)
    assert output.rstrip().endswith("0 broken promises")
    assert " power " in output and " killed" in output and " an error" in output
