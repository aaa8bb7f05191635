"""Moving from OneFlow's OneEmbedding: open its persistent table, train on, and save a snapshot beside it.

    python examples/from_one_embedding.py --path /data/embedding --snapshot epoch-1 --dim 16
    python examples/from_one_embedding.py                  # makes a small table of that format first

`flow.one_embedding` becomes `import one_embedding`, and `flow` becomes `torch`. The files are the same: a row
is a vector and its optimizer state, which for Adam makes three times the dimension. Work on a copy of /data
until you trust it: a snapshot of a new name is added to the same directory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

import one_embedding


def make_table(path: Path, snapshot: str, dim: int) -> None:
    """Ids, vectors and Adam's averages as OneEmbedding keeps them, for one rank."""
    rng, n = np.random.default_rng(0), 1000
    rows = np.zeros((n, 3 * dim), np.float32)
    rows[:, :dim] = rng.normal(0, 0.1, (n, dim))
    with one_embedding.make_persistent_table_writer(
        [str(path / "0-1")], snapshot, np.int64, np.float32, 3 * dim
    ) as writer:
        writer.write(rng.choice(2**40, n, replace=False).astype(np.int64), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", type=Path, help="persistent_path of the embedding")
    parser.add_argument("--snapshot", default="epoch-1")
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        if options.path is None:
            options.path = Path(temporary) / "embedding"
            make_table(options.path, options.snapshot, options.dim)
        embedding = one_embedding.MultiTableEmbedding(
            name="my_embedding",
            embedding_dim=options.dim,
            dtype=torch.float,
            key_type=torch.int64,
            tables=[one_embedding.make_table_options(one_embedding.make_normal_initializer(0.0, 0.1))],
            store_options=one_embedding.make_cached_ssd_store_options(
                cache_budget_mb=64, persistent_path=str(options.path), size_factor=3
            ),
        )
        embedding.load_snapshot(options.snapshot)
        parts = [str(part) for part in sorted(options.path.glob("*-*"))]
        with one_embedding.make_persistent_table_reader(
            parts, options.snapshot, np.int64, np.float32, 3 * options.dim
        ) as reader:  # rows without a model
            ids = torch.from_numpy(np.concatenate([keys for keys, _ in reader]))
        print(f"{len(ids):,} rows from snapshot {options.snapshot}")

        optimizer = torch.optim.Adam(embedding.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            loss = (embedding(ids[:64]) - 1).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            if step in (0, 19):
                print(f"step {step + 1}: loss {loss.item():.4f}")
        embedding.save_snapshot("epoch-2")
        print("snapshots:", ", ".join(sorted(p.name for p in options.path.glob("*/snapshots/[!.]*"))))


if __name__ == "__main__":
    main()
