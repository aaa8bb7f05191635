"""Fills a table of dim 8 and prints its peak resident memory; run by the work "memory" in its own process.

python -m benchmarks.memory_child KEYS THREADS   ->   {"peak_bytes": ..., "size": ..., "seconds": ...}
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import embstore

from .ids import scatter
from .tables import blocks, roomy_capacity


def peak_bytes() -> int:
    # Not getrusage: its maximum is inherited from the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status should have a line VmHWM but has none")


def main(count: int, threads: int) -> None:
    embstore.set_num_threads(threads)
    capacity = roomy_capacity(count)
    table = embstore.Table(
        "memory",
        dim=8,
        optimizer=embstore.SGD(lr=0.01),
        initializer=embstore.Uniform(-0.05, 0.05),
        init_capacity=capacity,
        max_capacity=capacity,
    )
    start = time.perf_counter()
    for first, last in blocks(0, count):
        table.find_or_insert(scatter(np.arange(first, last)))
    seconds = time.perf_counter() - start
    print(json.dumps({"peak_bytes": peak_bytes(), "size": len(table), "seconds": seconds}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
