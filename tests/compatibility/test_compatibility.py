"""docs/compatibility.md tells the truth: every name of the list is there, or fails as the list says."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from compatibility import page
from compatibility.names import ABSENT, ORIGINALS, RAISES, Module, Original

MODULES = [
    pytest.param(
        original,
        module,
        id=module.path,
        marks=[pytest.mark.slow] if "tensorflow" in original.packages else [],
    )
    for original in ORIGINALS
    for module in original.modules
]


def _open(path: str) -> Any:
    if path.startswith("torch."):  # namespaces that a package registers
        importlib.import_module("torchrec_dynamic_embedding")
        found: Any = importlib.import_module("torch")
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        return found
    return importlib.import_module(path)


def _get(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("original, module", MODULES)
def test_every_name_is_there_or_fails_as_the_page_says(original: Original, module: Module) -> None:
    for package in original.packages:
        pytest.importorskip(package)
    for name in module.supported:
        assert _get(_open(module.path), name) is not None
    for name, absence in module.missing.items():
        if absence.shows == ABSENT:
            with pytest.raises((ImportError, AttributeError, RuntimeError)):
                _get(_open(module.path), name) if name else _open(module.path)
        else:
            assert absence.shows == RAISES
            with pytest.raises(NotImplementedError, match=name):
                _get(_open(module.path), name)()


def test_a_name_has_one_status() -> None:
    paths = [module.path for original in ORIGINALS for module in original.modules]
    assert len(paths) == len(set(paths))
    for original in ORIGINALS:
        for module in original.modules:
            names = [*module.supported, *module.missing]
            assert len(names) == len(set(names)), module.path


def test_the_page_is_what_the_list_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: make docs"
