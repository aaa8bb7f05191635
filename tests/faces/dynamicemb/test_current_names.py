"""Every module path and name that clients of the current original package import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from faces.dynamicemb.current_names import HSTU, NAMES, NOT_YET, TORCH_EASY_REC

import dynamicemb


def _pairs(names: dict[str, str]) -> list[tuple[str, str]]:
    return [(module, name) for module, found in names.items() for name in found.split()]


def test_the_top_level_exports_the_current_names() -> None:
    assert set(NAMES["dynamicemb"].split()) <= set(dynamicemb.__all__)


@pytest.mark.parametrize(("module", "name"), _pairs(NOT_YET))
def test_a_name_without_an_implementation_says_what_to_use(module: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name} is not available here; \w+"):
        getattr(importlib.import_module(module), name)(1, key=2)


def test_the_import_blocks_of_clients_pass_in_a_new_process() -> None:
    for block in (TORCH_EASY_REC, HSTU):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", block], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr


def test_storage_classes_serve_isinstance() -> None:
    tables = importlib.import_module("dynamicemb.key_value_table")
    assert issubclass(tables.HybridStorage, tables.Storage) and issubclass(
        tables.DynamicEmbCache, tables.Cache
    )
    assert not isinstance(3, tables.DynamicEmbStorage)
