"""Faces are thin: they import neither the binding of the engine nor each other."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FACES = ("dynamicemb", "one_embedding", "sparse_operation_kit", "torchrec_dynamic_embedding")


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("face", FACES)
def test_a_face_imports_neither_the_binding_nor_another_face(face):
    others = [f for f in FACES if f != face]
    files = list((SOURCE / face).rglob("*.py"))
    assert files
    for path in files:
        for name in _imports(path):
            assert name.split(".")[0] not in others, f"{path}: {name}"
            assert not name.startswith("embstore._core"), f"{path}: {name}"
