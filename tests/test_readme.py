"""The Python blocks of README.md run as they stand, each in a process of its own."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = (
    re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    if README.exists()
    else []
)


def test_the_readme_shows_python():
    assert BLOCKS, f"{README} should have at least one ```python block"


@pytest.mark.parametrize("i", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(i, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", BLOCKS[i]], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, f"{BLOCKS[i]}\n{run.stderr}"
