"""Moving from NVIDIA DynamicEmb: take a dump that it wrote, train on, and write one that it reads.

    python examples/from_dynamicemb.py --dump /data/monday --table t_item --dim 16
    python examples/from_dynamicemb.py                        # makes a small dump of that format first

`import dynamicemb` stays, and so does the rest of the script; examples/dlrm_torchrun.py is a whole one for
several ranks. Vectors, optimizer states and scores are in the dump, so training goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables


def make_dump(path: Path, table: str, dim: int) -> None:
    """What DynamicEmb writes for a table that was trained with Adam: plain arrays, a file each."""
    rng, folder, n = np.random.default_rng(0), path / "model", 1000
    folder.mkdir(parents=True)
    keys = rng.choice(2**40, n, replace=False).astype(np.int64)
    scores = np.arange(1, n + 1, dtype=np.uint64)
    arrays = {"values": rng.normal(0, 0.1, (n, dim)), "m": np.zeros((n, dim)), "v": np.full((n, dim), 1e-3)}
    for name, values in arrays.items():
        stem = table if name == "values" else f"{table}_opt_state_{name}"
        keys.tofile(folder / f"{stem}_keys")
        values.astype(np.float32).tofile(folder / f"{stem}_values")
        scores.tofile(folder / f"{stem}_scores")
    arguments = {"opt_type": "adam", "lr": 0.01, "iters": 250, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    (folder / f"{table}_opt_args.json").write_text(json.dumps(arguments | {"weight_decay": 0.0}, indent=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dump", type=Path, help="a folder that DynamicEmbDump wrote")
    parser.add_argument("--table", default="t_item")
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        if options.dump is None:
            options.dump = Path(temporary) / "monday"
            make_dump(options.dump, options.table, options.dim)
        table_options = DynamicEmbTableOptions(
            dim=options.dim, max_capacity=1 << 16, score_strategy=DynamicEmbScoreStrategy.STEP
        )
        tables = BatchedDynamicEmbeddingTables(
            [table_options], [options.table], optimizer=EmbOptimType.ADAM, learning_rate=0.01
        )
        DynamicEmbLoad(str(options.dump), tables, optim=True)
        table = tables.dynamic_tables[options.table].table
        ids = torch.from_numpy(table.rows().keys[:64].copy())
        print(f"{len(table):,} rows from {options.dump.name}, Adam at step {table.optimizer_step}")

        offsets = torch.arange(len(ids) + 1)  # bags of one id
        for step in range(20):
            loss = (tables(ids, offsets) - 1).square().sum(1).mean()
            loss.backward()  # the rows move in here
            if step in (0, 19):
                print(f"step {table.optimizer_step}: loss {loss.item():.4f}")
        DynamicEmbDump(
            str(Path(temporary) / "tuesday"), tables, optim=True
        )  # counter=True: their newest layout
        files = sorted(p.name for p in (Path(temporary) / "tuesday" / "model").iterdir())
        print("written:", ", ".join(files))


if __name__ == "__main__":
    main()
