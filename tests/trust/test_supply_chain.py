"""The lock file, the bill of materials, and the tests that SECURITY.md names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"([a-z0-9-]+)==([^ +]+) --hash=sha256:[0-9a-f]{64}")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line[0] != "#"]
    found = {}
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, f"not a version and a hash: {line}"
        found[match[1]] = match[2]
    assert len(found) == len(lines)
    return found


def wanted() -> list[Requirement]:
    """What the Makefile installs for `make setup`."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    lists = dict(re.findall(r"^PIP_([\w-]+) := (.*)$", text, re.M))
    del lists["docs"], lists["peers"]
    return [Requirement(word) for words in lists.values() for word in words.split() if word != "--no-deps"]


def test_the_lock_has_a_version_and_a_hash_for_all_that_setup_installs():
    have, names = locked(), wanted()
    assert len(names) > 30
    for requirement in names:
        assert plain(requirement.name) in have, requirement
        assert requirement.specifier.contains(have[plain(requirement.name)]), requirement


def test_the_bill_of_materials_has_every_package_that_the_wheel_needs(tmp_path):
    pytest.importorskip("packaging")
    command = [sys.executable, str(ROOT / ".ci" / "sbom"), str(tmp_path / "sbom.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    document = json.loads((tmp_path / "sbom.json").read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    scopes = {component["name"]: component["scope"] for component in document["components"]}
    assert scopes["numpy"] == scopes["nanobind"] == "required"
    assert scopes["torch"] == scopes["redis"] == scopes["fastapi"] == scopes["starlette"] == "optional"
    assert not {"pytest", "ruff", "pip"} & set(scopes)
    refs = {component["bom-ref"] for component in document["components"]}
    refs.add(document["metadata"]["component"]["bom-ref"])
    assert {one["ref"] for one in document["dependencies"]} == refs
    assert all(set(one["dependsOn"]) <= refs for one in document["dependencies"])


def test_every_promise_of_the_threat_model_names_tests_that_are_there():
    text = (ROOT / "SECURITY.md").read_text()
    promises = text.split("## Promises")[1].split("## What")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| **")]
    assert len(rows) > 9
    here = (Path(__file__).parent / "test_security.py").read_text()
    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert named, row
        for name in named:
            if name.startswith("test_"):
                assert f"def {name}(" in here, name
            elif name.startswith("python -m "):
                assert (ROOT / (name.split()[-1].replace(".", "/") + ".py")).exists(), name
            else:
                assert (ROOT / name).is_file(), name
