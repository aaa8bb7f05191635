"""README.md: each Python block runs as it stands, in a process of its own; what it names exists."""

import fnmatch
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_readme_shows_python():
    assert BLOCKS, f"{README} should have at least one ```python block"


@pytest.mark.parametrize("i", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(i, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", BLOCKS[i]], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, f"{BLOCKS[i]}\n{run.stderr}"


def test_the_picture_is_one_file_that_a_browser_can_read():
    picture = README.parent / re.search(r"!\[[^\]]+\]\(([^)]+\.svg)\)", TEXT)[1]
    root = xml.etree.ElementTree.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox")
    assert not re.search(r"(href|src|url\(['\"]?http|@import)", picture.read_text().replace("url(#tip)", ""))


def test_commands_of_the_readme_exist():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    command = [sys.executable, "-m", "benchmarks", "--list"]
    names = subprocess.run(command, cwd=README.parent, capture_output=True, text=True, timeout=100).stdout
    for pattern in re.findall(r"--only '?([\w*-]+)", TEXT):
        assert fnmatch.filter(names.split(), pattern), pattern
