"""embstore against figures that it should reach; a ratio of 1 or more means that it does.

insert      10M new keys of dim 32 in batches, into a table that doubles four times meanwhile:
            keys a second against 8 M, and the longest batch against 50 ms (median of 3 tables)
find        where 10M resident keys are, in random order, without reading rows (contains): keys a second
            and thread against 50 M
ids-from    ids of 5M short strings in an Arrow column and in a fixed-width numpy array: strings a second
            against 50 M on two threads
growth      a table of dim 8 that grows to 100M keys: peak resident memory of its process, Python itself
            included, against 8 GiB; the longest batch; the most bytes beside a row at any moment; and the
            time of finding and of training a key against the same table with 1M keys
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

INSERT_KEYS_PER_SECOND = 8e6
STALL_SECONDS = 0.05
FIND_KEYS_PER_SECOND = 50e6
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
        work, "8 M keys/s", threads, speed / INSERT_KEYS_PER_SECOND, 1.0, 1.5, f"{speed / 1e6:.2f} M keys/s"
    )
    yield Row(
        f"{work}: longest batch", "50 ms", threads, STALL_SECONDS / stall, 1.0, 2.5, f"{stall * 1e3:.0f} ms"
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
            work, "50 M keys/s a thread", threads, speed / FIND_KEYS_PER_SECOND, 1.0, 1.4, detail, share
        )
    if not all(bool(table.contains(keys).all()) for keys in batches):
        raise RuntimeError("all keys should be found but some were not")
    table.close()


@register("growth")
def growth(run: Run) -> Iterator[Row]:
    count, threads = run.sizes.memory_keys, max(run.threads)
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth_child", str(count), str(threads)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(child.stdout)
    if found["size"] != count:
        raise RuntimeError(f"the table should hold {count} keys but holds {found['size']}")
    work = f"growing to {count:,} keys, dim 8"

    def row(what: str, limit: float, goal: float, value: float, unit: str) -> Row:
        return Row(
            f"{work}: {what}",
            f"{limit:g} {unit}",
            threads,
            limit / value,
            1.0,
            limit / goal,
            f"{value:.3g} {unit}",
        )

    most_gib = round(MEMORY_BYTES_PER_KEY * count / 2**30, 2)
    yield row("peak memory", most_gib, most_gib, found["peak_bytes"] / 2**30, "GiB")
    yield row("longest batch", 100, 20, 1e3 * found["longest_batch_seconds"], "ms")
    yield row("bytes beside a row", 32, 26, found["most_bytes_beside_a_row"], "bytes")
    for what in ("find", "step"):
        small, large = found["small"][what], found["large"][what]
        detail = f"{small:.1f} -> {large:.1f} ns a key"
        title = f"{what}, uniform keys: {count:,} keys"
        yield Row(title, "itself with 1/100 of the keys", threads, small / large, 1 / 1.6, 1 / 1.3, detail)


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
