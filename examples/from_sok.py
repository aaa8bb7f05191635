"""Moving from NVIDIA SOK to torch: convert a dump of TensorFlow variables, load it, and train on.

    python examples/from_sok.py --dump ./weights --table user --dim 16
    python examples/from_sok.py                             # makes a small dump of that format first

No TensorFlow is needed for it. To stay with TensorFlow there is nothing to convert: `import
sparse_operation_kit as sok` stays, and `sok.load("./weights", variables, optimizer)` reads the same files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import embstore
from embstore.formats.sok import DumpReader, DumpWriter


def make_dump(path: Path, table: str, dim: int) -> None:
    """What sok.dump writes for a dynamic variable and Adam: headers and plain arrays, a file each."""
    rng, n = np.random.default_rng(0), 1000
    keys = rng.choice(2**40, n, replace=False).astype(np.int64)
    values = rng.normal(0, 0.1, (n, dim)).astype(np.float32)
    with DumpWriter(path) as writer:
        states = [np.zeros_like(values), np.full_like(values, 1e-3)]
        writer.table(table, np.int64, optimizer="Adam", slots=("m", "v")).append(keys, values, states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dump", type=Path, help="a folder that sok.dump wrote")
    parser.add_argument("--table", default="user", help="name of the variable")
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        if options.dump is None:
            options.dump = Path(temporary) / "weights"
            make_dump(options.dump, options.table, options.dim)
        stored = DumpReader(options.dump).table(options.table)  # mapped arrays
        print(f"{len(stored):,} rows of {stored.dim}, states {', '.join(stored.states)}")

        converted = Path(temporary) / "converted"
        command = [sys.executable, "-m", "embstore.cli", "convert", options.dump, converted, "--to", "v2"]
        subprocess.run(
            command, check=True, timeout=600, stdout=subprocess.DEVNULL
        )  # embstore convert ./weights ./converted --to v2
        ((collection, tables),) = embstore.open_dump(converted).items()
        assert options.table in tables

        users = embstore.Embedding(options.dim, name=options.table, optimizer=embstore.Adam(lr=0.01))
        embstore.load(converted, {collection: {options.table: users.table}}, optim=True)
        ids = torch.from_numpy(np.array(stored.keys[:64], np.int64))
        assert np.array_equal(users.table.find(ids.numpy())[0], stored.values[:64])
        for step in range(20):
            loss = (users(ids) - 1).square().sum(1).mean()
            loss.backward()  # the rows move in here
            if step in (0, 19):
                print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
