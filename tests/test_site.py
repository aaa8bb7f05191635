"""The documentation as a site: complete, and readable without a network."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_page_has_a_place_in_the_navigation():
    places = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    places += (ROOT / "docs" / "hooks.py").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in places, f"{page.name}: name it under nav in mkdocs.yml"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs mkdocs")
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?([^\s\">]+)", page.read_text())
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page
