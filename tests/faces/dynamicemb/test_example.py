"""The example runs as its docstring says, under torchrun with real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 200


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(LIMIT_SECONDS + 20)
def test_the_dlrm_example_learns_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    process = subprocess.Popen(
        [*command, str(ROOT / "examples/dlrm_torchrun.py"), "--steps", "48", "--samples", "128"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, output
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", output)]
    rows = [int(x.replace(",", "")) for x in re.findall(r"([0-9,]+) rows stored", output)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert rows == sorted(rows) and rows[-1] > rows[0]
    assert (
        "nothing was stored" in output
        and len(re.search("rows on each rank: (.*)", output)[1].split(", ")) == 2
    )
