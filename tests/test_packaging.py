"""What the package says of itself: extras that are tested, types that find a misspelt option."""

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import embstore
from embstore.options import AllTableKeywords

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "embstore",
    "dynamicemb",
    "one_embedding",
    "sparse_operation_kit",
    "torchrec_dynamic_embedding",
)


def extras():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        name: {r.name: r for r in map(Requirement, lines)}
        for name, lines in project["optional-dependencies"].items()
    }


def installed():
    """What `make setup` installs, which is what is tested: {package: version}."""
    pins = re.findall(r"(\S+)==([0-9.]+)", (ROOT / "Makefile").read_text())
    return {name.lower(): version for name, version in pins}


def test_extras_allow_what_is_tested_and_bound_it_on_both_sides():
    pinned = installed()
    assert {"torch", "torchrec", "fbgemm-gpu-cpu", "tensorflow-cpu", "torchmetrics"} <= pinned.keys()
    for name in ("torch", "torchrec", "tensorflow"):
        for package, requirement in extras()[name].items():
            if package in pinned:
                assert pinned[package] in requirement.specifier, (name, requirement)
                kinds = {spec.operator for spec in requirement.specifier}
                assert kinds in ({">=", "<"}, {"=="}), (name, requirement)


def test_the_extra_for_torchrec_brings_one_fbgemm_and_names_the_tested_torchrec():
    wanted = extras()["torchrec"]
    assert "torchrec" not in wanted and "fbgemm-gpu" not in wanted and "fbgemm-gpu-cpu" in wanted
    line = f"pip install --no-deps torchrec=={installed()['torchrec']}"
    assert line in (ROOT / "docs" / "dynamicemb.md").read_text()
    assert line in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torchrec'] = None; import dynamicemb"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert line in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_is_typed(package):
    assert (ROOT / "src" / package / "py.typed").is_file()


def test_the_keywords_of_modules_are_the_options_of_a_table():
    fields = {field.name for field in dataclasses.fields(embstore.TableOptions)}
    assert set(typing.get_type_hints(AllTableKeywords)) == fields


RIGHT = """
import embstore
from dynamicemb import DynamicEmbTableOptions

embstore.Table("user", dim=2, optimizer=embstore.SGD(lr=0.1), dtype="float16", score_strategy="step")
options = embstore.TableOptions(name="t", dim=3, dtype="bfloat16", check_mode="error")
embstore.Embedding(4, max_capacity=1024, sharded=False)
embstore.EmbeddingBag(4, mode="mean", max_norm=1.0, name="b")
embstore.EmbeddingCollection([options], {"u": "t"}, update_in_backward=False)
embstore.EmbeddingBagCollection([options], mode="mean")
DynamicEmbTableOptions(max_capacity=1024)
"""
WRONG = """
import embstore
from dynamicemb import DynamicEmbTableOptions

embstore.Table("user", dim=2, max_capasity=5)
options = embstore.TableOptions(name="t", dim=3, score_stratgy="step")
embstore.Embedding(4, shardet=True)
embstore.EmbeddingBag(4, max_capasity=1024)
embstore.EmbeddingCollection([options], update_in_bakward=False)
embstore.EmbeddingBagCollection([options], mod="mean")
DynamicEmbTableOptions(max_capasity=1024)
"""


@pytest.mark.slow
def test_mypy_finds_a_misspelt_option_and_takes_right_ones(tmp_path):
    for name, text in {"right.py": RIGHT, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += [str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert all("wrong.py:" in line for line in done.stdout.splitlines()), done.stdout
    found = re.findall(r"wrong.py:(\d+): error: Unexpected keyword argument \"(\w+)\"", done.stdout)
    expected = [
        (str(number), re.search(r"\w*(?:capasity|stratgy|shardet|bakward|mod)(?==)", line)[0])
        for number, line in enumerate(WRONG.splitlines(), 1)
        if number > 4
    ]
    assert found == expected, done.stdout
