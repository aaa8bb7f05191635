"""Load and growth: what a key costs in small and in large tables, many tables, and keys chosen to collide.

    python -m trust.load                            up to 100 million keys (9 GB of memory, 10 GB of disk)
    python -m trust.load --keys 3000000
    python -m trust.load --part tables --part crafted

growth    1 million keys, then more, up to --keys, of dim 8: build, look up, first evictions, evict, dump,
          load, serve; a table of nanoseconds a key and a plot. Within 1.5x of 1 million where the work is
          the same; what waits for memory that no cache holds may cost what plain reads of as many rows of
          the same size cost more (numpy.take), and 1.5x of that.
          "first evictions": the first 1.5 million, the median batch. Classes of keys are searched for the
          first time, in a large table most of them for few evictions each.
          "evict": the same after them, for a quarter as many keys as the table has, so that each class
          needs about as many evictions at each size. The mean: searches come in waves.
tables    1,000 tables and 200 features in one step, against one table and one feature of as many ids
crafted   keys whose public hashes are equal in 44 bits, and keys made for the seed of the table, against
          random ones

Times are CPU time in one thread, so that other programs hardly disturb them. For build, dump and load the
kernel's part stands beside, and only the rest is judged: a virtual machine takes new memory from its host,
which makes the kernel's part of the same work up to five times as long from one run to the next.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import embstore
from embstore.serving import Reader

ROOT = Path(__file__).parents[1]
DIM, BATCH, ROUNDS = 8, 65536, 24
SMALLEST = 1_000_000
ENOUGH = 20_000_000  # keys: the kernel samples who has the CPU, so it splits less work badly
EVICTED_SHARE = 0.25  # of the keys, for the steady state: more than all queues of victims hold
MOST = 1.5
WAITS_FOR_MEMORY = ("look up", "first evictions", "evict", "dump", "serve")
OPERATIONS = ("build", "look up", "first evictions", "evict", "dump", "load", "serve")
TAKES_MEMORY = ("build", "dump", "load")
KERNEL = "kernel: {}".format


def keys_of(numbers: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection that scatters numbers."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def blocks(first: int, end: int) -> Iterator[np.ndarray]:
    for start in range(first, end, BATCH):
        yield keys_of(np.arange(start, min(start + BATCH, end)))


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def per_key(work: Callable[[np.ndarray], Any], batches: list[np.ndarray]) -> float:
    """Nanoseconds of the median batch."""
    seconds = [cpu_seconds(lambda b=batch: work(b)) for batch in batches]
    return 1e9 * statistics.median(s / len(b) for s, b in zip(seconds, batches, strict=True))


# ---- growth


class Split:
    """CPU time of some work: the program's own, and the kernel's."""

    def __init__(self) -> None:
        self.own = self.kernel = 0.0
        self.keys = 0

    def add(self, work: Callable[[], Any], keys: int) -> None:
        self.keys += keys
        before = resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.own += after.ru_utime - before.ru_utime
        self.kernel += after.ru_stime - before.ru_stime

    def store(self, found: dict[str, float], name: str) -> None:
        """As nanoseconds a key."""
        found[name], found[KERNEL(name)] = (1e9 * part / self.keys for part in (self.own, self.kernel))


def an_empty_table(keys: int) -> embstore.Table:
    return embstore.Table("t", dim=DIM, init_capacity=1 << 14, max_capacity=keys, score_strategy="step")


def costs(keys: int, folder: Path) -> dict[str, float]:
    """Nanoseconds of CPU a key."""
    found: dict[str, float] = {}
    rng = np.random.default_rng(keys)
    rounds, build = -(-ENOUGH // keys), Split()
    for _ in range(rounds):
        table = an_empty_table(keys)
        for block in blocks(0, keys):
            build.add(lambda b=block, t=table: t.find_or_insert(b), len(block))
    build.store(found, "build")
    found["look up"], found["plain reads"] = beside_plain_reads(table.find, keys, rng)
    stats = table.stats()
    found["bytes"] = stats.bytes / max(stats.size, 1)
    new = list(blocks(keys, keys + BATCH * ROUNDS))
    found["first evictions"] = per_key(table.find_or_insert, new)
    end = keys + BATCH * ROUNDS + int(EVICTED_SHARE * keys)
    seconds = sum(
        cpu_seconds(lambda b=b: table.find_or_insert(b)) for b in blocks(keys + BATCH * ROUNDS, end)
    )
    found["evict"] = 1e9 * seconds / int(EVICTED_SHARE * keys)
    if not table.stats().evictions:
        raise RuntimeError(f"a table of {keys} keys should be full but evicts nothing")
    path, size = folder / "dump", len(table)
    embstore.dump(path, {"model": {"t": table}})  # the next ones find the page cache in memory of the host
    dump = Split()
    for _ in range(rounds):
        shutil.rmtree(path)
        dump.add(lambda: embstore.dump(path, {"model": {"t": table}}), size)
    dump.store(found, "dump")
    sample = keys_of(rng.integers(0, keys, BATCH))  # some of them are evicted
    expected = table.find(sample)
    table.close()
    gc.collect()
    load = Split()
    for _ in range(rounds):
        again = an_empty_table(keys)
        load.add(lambda t=again: embstore.load(path, {"model": {"t": t}}), size)
    load.store(found, "load")
    same(again.find(sample), expected)
    again.close()
    gc.collect()
    with Reader(path, cache=folder / "cache") as reader:
        same(reader.find("t", sample), expected)
        found["serve"], _ = beside_plain_reads(lambda b: reader.find("t", b), keys, rng)
    shutil.rmtree(path)
    shutil.rmtree(folder / "cache")
    return found


def beside_plain_reads(
    find: Callable[[np.ndarray], Any], keys: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Nanoseconds a key of `find`, and of numpy for as many rows, batch by batch after a round for warmth."""
    rows = np.ones((keys, DIM), np.float32)
    for _ in range(2):
        numbers = [rng.integers(0, keys, BATCH) for _ in range(ROUNDS)]
        batches = [keys_of(n) for n in numbers]
        took: tuple[list[float], list[float]] = [], []
        for batch, number in zip(batches, numbers, strict=True):
            took[0].append(cpu_seconds(lambda b=batch: find(b)))
            took[1].append(cpu_seconds(lambda n=number: rows.take(n, axis=0)))
    found, plain = (1e9 * statistics.median(seconds) / BATCH for seconds in took)
    return found, plain


def same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if not np.array_equal(ours, theirs):
            raise RuntimeError("rows should be the same after a dump but differ")


def growth(keys: int, folder: Path, plot: Path | None) -> int:
    sizes = [SMALLEST]
    while sizes[-1] * 10 < keys:
        sizes.append(sizes[-1] * 10)
    if keys > sizes[-1]:
        sizes.append(keys)
    names = (*OPERATIONS, "plain reads", *map(KERNEL, TAKES_MEMORY))
    print(f"{'ns a key':<14}" + "".join(f"{name:>17}" for name in (*names, "bytes")))
    measured = []
    for size in sizes:
        measured.append(costs(size, folder))
        line = "".join(f"{measured[-1][name]:>17.1f}" for name in (*names, "bytes"))
        print(f"{size:<14,}{line}", flush=True)
    ratios = {name: measured[-1][name] / measured[0][name] for name in names}
    print(f"{'ratio':<14}" + "".join(f"{ratios[name]:>17.2f}" for name in names))
    if plot is not None:
        draw(sizes, measured, plot)
    # What waits for memory may cost what plain reads cost more, and no more than 1.5 times that.
    allowed = {name: MOST * max(1.0, ratios["plain reads"]) for name in WAITS_FOR_MEMORY}
    wrong = [name for name in OPERATIONS if ratios[name] > allowed.get(name, MOST)]
    for name in wrong:
        print(f"{name} costs {ratios[name]:.2f} times as much a key, more than {allowed.get(name, MOST):.2f}")
    return len(wrong)


def draw(sizes: list[int], measured: list[dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "embstore"  # the same numbers, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name in (*OPERATIONS, "plain reads"):
        style = "--" if name == "plain reads" else "-"
        axes.plot(sizes, [found[name] for found in measured], style, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="ns of CPU a key")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


# ---- many tables


def many_tables(tables: int = 1000, features: int = 200, ids: int = 64, rounds: int = ROUNDS) -> int:
    import torch

    rng = np.random.default_rng(0)

    def step(module: embstore.EmbeddingCollection, batch: dict[str, Any]) -> None:
        vectors = list(module(batch).values())
        torch.autograd.backward(vectors, [torch.full_like(v, 0.01) for v in vectors])

    def nanoseconds(module: embstore.EmbeddingCollection, names: list[str], each: int) -> float:
        batches = [{n: torch.from_numpy(rng.integers(0, 10**6, each)) for n in names} for _ in range(rounds)]
        for batch in batches:
            step(module, batch)
        seconds = [cpu_seconds(lambda b=batch: step(module, b)) for batch in batches]
        return 1e9 * statistics.median(seconds) / (len(names) * each)

    rule = embstore.Adagrad(lr=0.1)
    options = [
        embstore.TableOptions(name=f"t{i}", dim=DIM, optimizer=rule, init_capacity=1024)
        for i in range(tables)
    ]
    spread = {f"f{i}": f"t{i * (tables // features)}" for i in range(features)}
    many = embstore.EmbeddingCollection(options, features=spread)
    one = embstore.EmbeddingCollection([embstore.TableOptions(name="t", dim=DIM, optimizer=rule)])
    ours, theirs = nanoseconds(many, list(spread), ids), nanoseconds(one, ["t"], ids * features)
    held = sum(len(table) for table in many.tables.values())
    print(
        f"{tables:,} tables, {features} features of {ids} ids in one step: {ours:.0f} ns an id, "
        f"{ours * features * ids / 1e6:.1f} ms a step, {held:,} rows; "
        f"one table and one feature of as many ids: {theirs:.0f} ns"
    )
    return 0


# ---- crafted keys


def unhashed(hashes: np.ndarray) -> np.ndarray:
    """The keys of these public hashes: the inverse of the murmur3 finalizer."""
    x = hashes.astype(np.uint64)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        x ^= x >> np.uint64(33)
        x *= np.uint64(pow(factor, -1, 1 << 64))
    return (x ^ (x >> np.uint64(33))).view(np.int64)


def unkeyed(hashes: np.ndarray, seed: int) -> np.ndarray:
    """The keys that the index of a table with this seed hashes so: for somebody who knows the seed."""
    state, drawn = seed, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        drawn.append(z ^ z >> 31)
    mask, first, second = drawn[0], drawn[1] | 1, drawn[2] | 1
    x = hashes.astype(np.uint64)
    x ^= x >> np.uint64(32)
    x *= np.uint64(pow(second, -1, 1 << 64))
    x ^= x >> np.uint64(29) ^ x >> np.uint64(58)
    x *= np.uint64(pow(first, -1, 1 << 64))
    x ^= x >> np.uint64(32)
    return (x ^ np.uint64(mask)).view(np.int64)


def crafted(keys: int) -> int:
    rng = np.random.default_rng(1)
    numbers = np.arange(keys, dtype=np.uint64)
    with np.errstate(over="ignore"):
        kinds = {
            "random": rng.integers(-(2**63), 2**63 - 1, keys),
            "equal low bits of the hash": unhashed(numbers << np.uint64(44)),
            "equal high bits of the hash": unhashed(numbers),
            "equal low bits, seed known": unkeyed(numbers << np.uint64(44), 0),
            "equal high bits, seed known": unkeyed(numbers, 0),
        }
    tables = {kind: embstore.Table("t", dim=DIM, seed=0) for kind in kinds}
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for start in range(0, keys, BATCH):  # in turn, so that other programs disturb all of them alike
        for kind, chosen in kinds.items():
            batch = chosen[start : start + BATCH]
            took[kind].append(cpu_seconds(lambda t=tables[kind], b=batch: (t.find_or_insert(b), t.find(b))))
    base, wrong = sum(took["random"]), 0
    for kind, seconds in took.items():
        table = tables[kind]
        if len(table) != keys or not table.find(kinds[kind][:1000])[1].all():
            raise RuntimeError(f"a table should hold {keys} {kind} keys but holds {len(table)}")
        ratio, size = sum(seconds) / base, table.stats().bytes / tables["random"].stats().bytes
        known = "seed known" in kind
        bad = (ratio > 1.25 or size > 1.1) and not known
        wrong += bad
        line = (
            f"{kind:<30}{1e9 * sum(seconds) / keys:>8.1f} ns a key, {ratio:.2f} of the time and {size:.2f} "
        )
        print(f"{line}of the memory of random keys{'  TOO MUCH' if bad else ''}", flush=True)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000_000, help="of the largest table")
    parser.add_argument(
        "--part", action="append", choices=("growth", "tables", "crafted"), help="default: all"
    )
    parser.add_argument("--plot", type=Path, help="an SVG, such as docs/assets/growth.svg")
    options = parser.parse_args(arguments)
    embstore.set_num_threads(1)
    parts, wrong = options.part or ["growth", "tables", "crafted"], 0
    if "growth" in parts:
        (ROOT / "build").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
            wrong += growth(options.keys, Path(folder), options.plot)
    if "tables" in parts:
        wrong += many_tables()
    if "crafted" in parts:
        wrong += crafted(min(options.keys, 500_000))
    print(f"{wrong} costs are too high")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
