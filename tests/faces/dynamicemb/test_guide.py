"""The examples of docs/dynamicemb.md run, one after the other, as a program of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "dynamicemb.md"
CHECKS = """
assert vectors["user"].shape == vectors["item"].shape == (1, 16)
assert since["model.sparse"].keys() == {"t_user", "t_item"}
from dynamicemb.discovery import find_collections
user = find_collections(model)["model.sparse"].tables["t_user"].table
assert sorted(user.rows().keys.tolist()) == [-7, 1 << 62]
assert tables.get_score() == {"t_item": 20261115}
"""


@pytest.mark.timeout(240)
def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "guide.py"
    program.write_text("\n".join([*blocks, CHECKS]))
    # The process group is that of a program that torchrun has started with one rank.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **alone, "MASTER_PORT": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "monday" / "model.sparse" / "t_user_keys").stat().st_size == 16
