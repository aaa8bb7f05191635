"""Every Python block of docs/ runs: a page is copied top to bottom into a file in a new folder.

A page finds what it says that it needs: the ranks of torchrun, a Redis server, what its ```sh blocks build.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import forked_programs
import pytest
import redis_server

ROOT = Path(__file__).parents[1]
README = "README.md"  # tests/test_readme.py runs its blocks
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text() for page in [ROOT / README, *ROOT.glob("docs/*.md")]
}
REDIS = "127.0.0.1:6379"  # what pages call their server; the test has one on a free port
RANKS = {"docs/dynamicemb.md": 2, "docs/torchrec_dynamic_embedding.md": 2}
BUILDS = {"docs/parameter_server.md"}
NEEDS = {  # what takes seconds to import, by a word of the page
    "import torch": ["torch.distributed"],
    "torchrec": ["dynamicemb.shard", "torchrec_dynamic_embedding"],
    "sparse_operation_kit": ["sparse_operation_kit", "tf_keras"],
}
# What a page has done when it ends, beside its own asserts.
CHECKS = {
    "docs/dumps.md": """
import numpy as np
for part in ("keys", "values", "states", "scores"):
    np.testing.assert_array_equal(getattr(table.rows(), part), getattr(server.rows(), part))
assert sorted(table.rows().keys.tolist()) == [-1, 7, 99]
""",
    "docs/dynamicemb.md": """
import os
from dynamicemb.discovery import find_collections
assert vectors["user"].shape == vectors["item"].shape == (1, 16)
assert since["model.sparse"].keys() == {"t_user", "t_item"}
user = find_collections(model)["model.sparse"].tables["t_user"].table
assert 0 < len(user) <= 2 and set(user.rows().keys.tolist()) <= {-7, 1 << 62}
assert tables.get_score() == {"t_item": 20261115}
assert os.stat("monday/model.sparse/t_user_keys").st_size == 16
""",
    "docs/sparse_operation_kit.md": """
assert int(users.size[0]) == 3 and table.states["Adam-m"].shape == (3, 16)
assert sorted(table.keys.tolist()) == [-1, 7, 2**40]
""",
    "docs/torchrec_dynamic_embedding.md": """
from redis import Redis
dist.barrier()
assert len(Redis(port=6379).keys("model_*_osid_0")) == 640 * dist.get_world_size()
""",
}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page", sorted(page for page in PAGES if page != README and blocks(PAGES[page], "python"))
)
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    program = "\n".join([*blocks(PAGES[page], "python"), CHECKS.get(page, "")])
    folder = tmp_path / "new"
    folder.mkdir()
    with contextlib.ExitStack() as servers:
        if REDIS in program:
            if redis_server.MISSING is not None:
                pytest.skip(redis_server.MISSING)
            server = redis_server.RedisServer(tmp_path / "redis").start()
            servers.callback(server.stop)
            program = program.replace(REDIS, server.where).replace("port=6379", f"port={server.port}")
        (folder / "page.py").write_text(program)
        if page in BUILDS:
            (folder / "examples").symlink_to(ROOT / "examples")
            bin_folder = os.path.dirname(sys.executable)
            for script in blocks(PAGES[page], "sh"):
                run(["env", f"PATH={bin_folder}:{os.environ['PATH']}", "bash", "-euc", script], folder)
        needs = [module for word in NEEDS if word in program for module in NEEDS[word]]
        forked_programs.run(["page.py"], ranks=RANKS.get(page, 0), needs=needs, cwd=folder, seconds=150)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_python_is_marked_as_python_so_that_it_runs(page):
    """Fences that name no language, and indented lines, hold shell commands, files and figures."""
    outside = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for block in [*blocks(PAGES[page], "(?:text)?"), *re.findall(r"\n\n((?: {4}.*\n)+)", outside)]:
        assert not re.search(r"^ *(import \w|from \w+ import |\w+ = \w+[.(])", block, re.MULTILINE), block


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_of_a_page_lead_to_files_of_the_repository(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page]):
        if not target.startswith("http"):
            file = ((ROOT / page).parent / target).resolve()
            assert file.is_relative_to(ROOT) and file.exists(), target
