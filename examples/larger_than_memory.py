"""Train more rows than memory may hold: the hot ones in memory, all others in files on an SSD.

    python examples/larger_than_memory.py --path /mnt/ssd/rows

A table over a store is a write-back cache: a row that leaves memory goes to the store with its optimizer
state and comes back when its id does. So training gives the same bits as with room for all rows, which the
end of this program checks. A thread reads the rows of the next batches while the current one trains.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import embstore
from embstore.lookahead import LookAhead
from embstore.stores import SsdStore, row_bytes

DIM, BATCH = 16, 2048


def batches(ids: int, steps: int) -> list[torch.Tensor]:
    """Some ids come often, most of them rarely."""
    rng = np.random.default_rng(0)
    return [torch.from_numpy((rng.random(BATCH) ** 3 * ids).astype(np.int64) * 7919) for _ in range(steps)]


def train(table: embstore.Table, loader) -> float:
    """A step of Adam on every batch: each vector learns a number that belongs to its id."""
    loss = 0.0
    for ids in loader:
        keys = ids.numpy()
        error = table.find_or_insert(keys) - np.sin(keys)[:, None]
        table.apply_gradients(keys, 2 * error.astype(np.float32))
        loss = float(np.square(error).mean())
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", type=Path, help="a new folder on the SSD (default: a temporary one)")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=65_536, help="rows in memory")
    options = parser.parse_args()
    data, adam = batches(options.ids, options.steps), embstore.Adam(lr=0.05)

    with tempfile.TemporaryDirectory() as temporary:
        path = options.path or Path(temporary) / "rows"
        store = SsdStore(path, row_bytes(dim=DIM, optimizer=adam))
        table = embstore.Table("user", dim=DIM, optimizer=adam, store=store, max_capacity=options.rows)
        start = time.perf_counter()
        loss = train(table, LookAhead(data, table.prefetch))
        rate = BATCH * options.steps / (time.perf_counter() - start)
        table.flush()  # changed rows go down, so that the store has them all
        stats = table.stats()
        files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{rate:,.0f} ids/s; loss of the last batch {loss:.4f}")
        print(f"in memory  {stats.size:>9,} rows, {stats.bytes / 1e6:7.1f} MB")
        print(f"on disk    {len(store):>9,} rows, {files / 1e6:7.1f} MB")
        print(f"came back from disk {stats.fetches:,} times, went down {stats.write_backs:,} times")

        room = embstore.Table("user", dim=DIM, optimizer=adam)
        train(room, data)
        seen = np.unique(torch.cat(data).numpy())
        same = np.array_equal(table.find(seen)[0], room.find(seen)[0])
        print(f"the same bits as with all {len(seen):,} rows in memory: {'yes' if same else 'NO'}")
        table.close()
        store.close()
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
