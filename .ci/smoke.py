"""What an installed wheel has to do, without torch and without a compiler."""

import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

import embstore

assert shutil.which("cc") is None and shutil.which("g++") is None, "PATH should have no compiler"
assert "site-packages" in embstore.__file__, embstore.__file__
assert embstore.__version__ == metadata.version("embstore")
assert (Path(embstore.__file__).parent / "_core.pyi").exists()

table = embstore.Table("user", dim=4, optimizer=embstore.Adam(lr=0.1))
keys = embstore.ids_from(["alice", "bob", "alice"], field="user")
assert keys.tolist() == [4591311096377449260, -8379787684626074, 4591311096377449260]
before = table.find_or_insert(keys)
table.apply_gradients(keys, np.ones((3, 4), np.float32))
assert len(table) == 2 and not np.allclose(table.find(keys)[0], before)

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/dump"
    embstore.dump(path, {"model": {"user": table}}, optim=True)
    again = embstore.Table("user", dim=4, optimizer=embstore.Adam(lr=0.1))
    embstore.load(path, {"model": {"user": again}}, optim=True)
    np.testing.assert_array_equal(again.rows().values, table.rows().values)
    command = Path(sys.executable).with_name("embstore")
    said = subprocess.run([command, "verify", path], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ok: "), said
version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
assert version == f"embstore {embstore.__version__}\n", version
print(f"smoke test: Python {sys.version.split()[0]}, numpy {np.__version__}, {embstore.isa()}: ok")
