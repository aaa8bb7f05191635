"""A table that does not fit its memory: `python -m benchmarks.larger_than_memory --directory D`.

A `cached_ssd` embedding of dim 32 with Adam (384 bytes a row; 20M rows are 7.7 GB) and a cache of 512 MB
trains on every id once and then on zipf(1.05) batches. Printed are its largest resident size and the time of
a step. Then four all-memory tables train the same steps, each on a quarter of the ids, which fits any
machine; keys, vectors and optimizer state have to be the same bits.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import torch

import embstore

DIM, BATCH, QUARTERS = 32, 65_536, 4
LEARNING_RATE = 0.01


def batches(rows: int, random_steps: int):
    """Every id once, then zipf batches. Ids are spread over the whole range of int64."""
    for start in range(0, rows, BATCH):
        yield spread(np.arange(start, min(start + BATCH, rows)))
    rng = np.random.default_rng(0)
    for _ in range(random_steps):
        yield spread(zipf(rng, rows))


def zipf(rng: np.random.Generator, rows: int, exponent: float = 1.05) -> np.ndarray:
    """Ranks of a zipf distribution over `rows`, by inversion of its continuous form."""
    u, power = rng.random(BATCH), 1.0 - exponent
    ranks = ((u * (rows**power - 1.0)) + 1.0) ** (1.0 / power)
    return np.minimum(ranks.astype(np.int64), rows) - 1


def spread(numbers: np.ndarray) -> np.ndarray:
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def targets(ids: torch.Tensor) -> torch.Tensor:
    return ((ids % 1000).float() / 1000.0).unsqueeze(1)


def digest(rows: embstore.Rows) -> np.ndarray:
    """(count, sum of row hashes) for each quarter; the order of rows does not matter."""
    words = np.concatenate([rows.values, rows.states], axis=1).view(np.uint32).astype(np.uint64)
    factors = np.random.default_rng(7).integers(1, 2**63, words.shape[1], dtype=np.uint64) | np.uint64(1)
    hashes = (words * factors).sum(axis=1, dtype=np.uint64) ^ rows.keys.view(np.uint64)
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    result = np.zeros((QUARTERS, 2), np.uint64)
    for quarter in range(QUARTERS):
        mine = rows.keys % QUARTERS == quarter
        result[quarter] = mine.sum(), hashes[mine].sum(dtype=np.uint64)
    return result


def total(blocks) -> np.ndarray:
    result = np.zeros((QUARTERS, 2), np.uint64)
    for block in blocks:
        result += digest(block)
    return result


def train_on_ssd(rows: int, steps: int, directory: str) -> None:
    import one_embedding as oe

    embedding = oe.MultiTableEmbedding(
        "large",
        DIM,
        torch.float,
        torch.int64,
        [oe.make_table(oe.make_uniform_initializer(-0.05, 0.05))],
        oe.make_cached_ssd_store_options(512, directory, size_factor=3),
    )
    optimizer = torch.optim.Adam(embedding.parameters(), lr=LEARNING_RATE)
    seconds = []
    for keys in batches(rows, steps):
        start = time.perf_counter()
        ids = torch.from_numpy(keys)
        optimizer.zero_grad()
        ((embedding(ids) - targets(ids)) ** 2).sum().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    trained_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    embedding.save_snapshot("end")
    saved = time.perf_counter() - start
    stats = embedding.store.stats()
    result = {
        "rows": stats.rows,
        "steps": len(seconds),
        "median_fill_step_ms": 1e3 * float(np.median(seconds[: -steps or None])),
        "median_zipf_step_ms": 1e3 * float(np.median(seconds[-steps:])),
        "snapshot_seconds": saved,
        "index_bytes_a_key": stats.index_bytes / stats.rows,
        "file_gb": stats.file_bytes / 1e9,
        "written_over_put": stats.bytes_written / stats.bytes_put,
        "fetches": embedding.table.stats().fetches,
        "write_backs": embedding.table.stats().write_backs,
        "max_resident_gb_training": trained_kib * 1024 / 1e9,
        "digest": total(embedding.table.export()).tolist(),
        "max_resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }
    print(json.dumps(result))


def train_quarter(rows: int, steps: int, quarter: int) -> list[int]:
    table = embstore.Table(
        "one_embedding",
        dim=DIM,
        optimizer=embstore.Adam(lr=LEARNING_RATE),
        initializer=embstore.Uniform(-0.05, 0.05),
        init_capacity=rows // 3,
    )
    for keys in batches(rows, steps):
        keys = keys[keys % QUARTERS == quarter]
        ids = torch.from_numpy(keys)
        vectors = torch.from_numpy(table.find_or_insert(keys))
        table.apply_gradients(keys, 2 * (vectors - targets(ids)))
    result = total(table.export())[quarter].tolist()
    table.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=200, help="zipf steps after every id was trained once")
    parser.add_argument("--directory", required=True, help="on the disk to use; removed afterwards")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train_on_ssd(options.rows, options.steps, options.directory)
        return
    command = [sys.executable, "-m", "benchmarks.larger_than_memory", *sys.argv[1:], "--child"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    result = json.loads(done.stdout)
    digests = result.pop("digest")
    print(json.dumps(result, indent=2), flush=True)
    for quarter in range(QUARTERS):
        twin = train_quarter(options.rows, options.steps, quarter)
        same = twin == digests[quarter]
        print(f"quarter {quarter}: {twin[0]:,} rows, {'the same bits' if same else 'DIFFERENT'}", flush=True)
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
