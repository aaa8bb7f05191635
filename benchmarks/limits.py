"""embstore against figures that it should reach; a ratio of 1 or more means that it does.

insert      10M new keys of dim 32 in batches, into a table that doubles four times meanwhile:
            keys a second against 5 M, and the longest batch against 1 s (median of 3 tables)
find        where 10M resident keys are, in random order, without reading rows (contains): keys a second
            and thread against 40 M
ids-from    ids of 5M short strings in an Arrow column and in a fixed-width numpy array: strings a second
            against 50 M on two threads
memory      peak resident memory of a process with 100M keys of dim 8, Python itself included, against 8 GiB
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pyarrow

import embstore

from .ids import scatter
from .registry import Row, Run, register
from .tables import blocks, roomy_capacity
from .timing import set_threads

INSERT_KEYS_PER_SECOND = 5e6
STALL_SECONDS = 1.0
FIND_KEYS_PER_SECOND = 40e6
STRINGS_PER_SECOND = 50e6
MEMORY_BYTES_PER_KEY = 8 * 2**30 / 100_000_000
TABLES = 3
FIND_PASSES = 5
ALMOST_ALL = 0.9999  # a bucket may overflow among millions


@register("insert")
def insert(run: Run) -> Iterator[Row]:
    sizes = run.sizes
    threads = max(run.threads)
    set_threads(threads)
    count = sizes.limit_keys // sizes.batch * sizes.batch
    batches = [scatter(np.arange(at, at + sizes.batch)) for at in range(0, count, sizes.batch)]
    rates, stalls = [], []
    for _ in range(TABLES):
        table = embstore.Table(
            "insert",
            dim=32,
            optimizer=embstore.SGD(lr=0.01),
            initializer=embstore.Uniform(-0.05, 0.05),
            init_capacity=roomy_capacity(count) // 16,
            max_capacity=roomy_capacity(count),
        )
        seconds = []
        for keys in batches:
            start = time.perf_counter()
            table.find_or_insert(keys)
            seconds.append(time.perf_counter() - start)
        if len(table) < count * ALMOST_ALL:
            raise RuntimeError(f"the table should hold {count} keys but holds {len(table)}")
        rates.append(count / sum(seconds))
        stalls.append(max(seconds))
        table.close()
    speed, stall = statistics.median(rates), statistics.median(stalls)
    work = f"insert {count:,} new keys, dim 32, growing"
    yield Row(
        work, "5 M keys/s", threads, speed / INSERT_KEYS_PER_SECOND, 1.0, 1.0, f"{speed / 1e6:.2f} M keys/s"
    )
    yield Row(
        f"{work}: longest batch", "1 s", threads, STALL_SECONDS / stall, 1.0, 1.0, f"{stall * 1e3:.0f} ms"
    )


@register("find")
def find(run: Run) -> Iterator[Row]:
    sizes = run.sizes
    count = sizes.limit_keys
    capacity = roomy_capacity(count)
    table = embstore.Table(
        "find",
        dim=8,
        optimizer=embstore.SGD(lr=0.01),
        initializer=embstore.Constant(0.0),
        init_capacity=capacity,
        max_capacity=capacity,
    )
    for first, last in blocks(0, count):
        table.find_or_insert(scatter(np.arange(first, last)))
    order = scatter(np.random.default_rng(0).permutation(count))
    batches = [order[at : at + sizes.batch] for at in range(0, count - sizes.batch + 1, sizes.batch)]
    for threads in run.threads:
        set_threads(threads)
        seconds = []
        for _ in range(FIND_PASSES):
            for keys in batches:
                start = time.perf_counter()
                table.contains(keys)
                seconds.append(time.perf_counter() - start)
        speed = sizes.batch / statistics.median(seconds) / threads
        detail = f"{speed / 1e6:.1f} M keys/s a thread"
        work = f"find alone, {count:,} resident keys, uniform"
        share = run.share(threads, statistics.median(seconds), lines=sizes.batch)
        yield Row(
            work, "40 M keys/s a thread", threads, speed / FIND_KEYS_PER_SECOND, 1.0, 1.0, detail, share
        )
    if not all(bool(table.contains(keys).all()) for keys in batches):
        raise RuntimeError("all keys should be found but some were not")
    table.close()


@register("memory")
def memory(run: Run) -> Iterator[Row]:
    count = run.sizes.memory_keys
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory_child", str(count), str(max(run.threads))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result = json.loads(child.stdout)
    if result["size"] < count * ALMOST_ALL:
        raise RuntimeError(f"the table should hold {count} keys but holds {result['size']}")
    wanted = MEMORY_BYTES_PER_KEY * count
    detail = f"{result['peak_bytes'] / 2**30:.2f} GiB for {result['size']:,} keys ({result['seconds']:.0f} s)"
    ratio = wanted / result["peak_bytes"]
    against = f"{wanted / 2**30:.2f} GiB"
    yield Row(f"memory of {count:,} keys, dim 8", against, max(run.threads), ratio, 1.0, 1.0, detail)


@register("ids-from")
def ids_from(run: Run) -> Iterator[Row]:
    count = run.sizes.limit_keys // 2
    strings = np.char.add(b"user_", np.arange(count).astype("S10"))
    columns = {"Arrow": pyarrow.array(strings, pyarrow.binary()).cast(pyarrow.string()), "numpy S15": strings}
    for threads in run.threads:
        set_threads(threads)
        for kind, column in columns.items():
            seconds = []
            for _ in range(FIND_PASSES):
                start = time.perf_counter()
                embstore.ids_from(column, field="user")
                seconds.append(time.perf_counter() - start)
            speed = count / statistics.median(seconds)
            wanted = 1.0 if threads >= 2 else None
            yield Row(
                f"ids of {count:,} strings, {kind}",
                "50 M strings/s",
                threads,
                speed / STRINGS_PER_SECOND,
                wanted,
                wanted,
                f"{speed / 1e6:.0f} M strings/s",
            )
