"""Grows a table of dim 8 key by key and measures it on the way; run by the work "growth" in its own process.

python -m benchmarks.growth_child KEYS THREADS   ->   one line of JSON, see `main`
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import embstore

from .ids import scatter
from .tables import BLOCK_ROWS, blocks
from .timing import set_threads

BATCH = 65_536
BATCHES = 32
SMALL_SHARE = 100  # the small table that the large one is compared with has 1/100 of its keys


def peak_bytes() -> int:
    # Not getrusage: its maximum is inherited from the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status should have a line VmHWM but has none")


def nanoseconds_a_key(rows: int, work: Callable[[torch.Tensor], object]) -> float:
    """Median over batches of uniform keys among the first `rows`; each batch has other keys."""
    rng = np.random.default_rng(rows)
    seconds = []
    for _ in range(BATCHES):
        keys = scatter(rng.integers(0, rows, BATCH))
        start = time.perf_counter()
        work(keys)
        seconds.append(time.perf_counter() - start)
    return 1e9 * statistics.median(seconds) / BATCH


def main(count: int, threads: int) -> None:
    set_threads(threads)
    table = embstore.Table(
        "growth",
        dim=8,
        optimizer=embstore.SGD(lr=0.01),
        initializer=embstore.Uniform(-0.05, 0.05),
        max_capacity=2 * count,
    )
    module = embstore.Embedding(table=table).train()
    gradient = torch.ones(BATCH, 8)
    small = max(count // SMALL_SHARE // BLOCK_ROWS, 1) * BLOCK_ROWS
    longest, beside = 0.0, 0.0
    times = {}
    for first, last in blocks(0, count):
        keys = scatter(np.arange(first, last))
        for half in keys.split(BATCH):
            start = time.perf_counter()
            table.find_or_insert(half)
            longest = max(longest, time.perf_counter() - start)
        if last >= small:
            stats = table.stats()
            beside = max(beside, stats.bytes / stats.size - table.row_bytes)
        if last in (small, count):
            finding = nanoseconds_a_key(last, table.contains)
            training = nanoseconds_a_key(last, lambda keys: module(keys).backward(gradient))
            times[last] = {"find": finding, "step": training}
    print(
        json.dumps(
            {
                "size": len(table),
                "peak_bytes": peak_bytes(),
                "longest_batch_seconds": longest,
                "most_bytes_beside_a_row": beside,
                "small": times[small],
                "large": times[count],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
