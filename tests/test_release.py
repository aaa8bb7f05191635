"""What a release consists of: one version, and files that tools and people look for."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import embstore

ROOT = Path(__file__).parents[1]


def stated_version():
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_the_version_is_stated_once_and_everything_else_follows():
    assert embstore.__version__ == importlib.metadata.version("embstore") == stated_version()
    assert f"version: {stated_version()}\n" in (ROOT / "CITATION.cff").read_text()
    for file in ROOT.glob("src/embstore/**/*.py"):  # a face may have the version of what it replaces
        assert not re.search(r"__version__ *= *['\"]", file.read_text()), file


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version():
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0].startswith(stated_version())


@pytest.mark.parametrize("script", [".ci/run", ".ci/wheels"])
def test_scripts_of_ci_are_sound_for_the_shell(script):
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_the_workflow_runs_what_contributors_run():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in workflow and "run: make wheel" in workflow
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert version in workflow and version in (ROOT / ".ci" / "wheels").read_text()


def test_the_smoke_test_of_wheels_refuses_a_path_with_a_compiler():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "smoke.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "PATH should have no compiler" in done.stderr
