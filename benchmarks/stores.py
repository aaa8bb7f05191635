"""The SSD store against RocksDB (rocksdict), against the device, and a cached table against one in memory.

ssd-warm-B      random batch get and put of 10M rows of B bytes, files in the page cache, against RocksDB
ssd-cold-B      random batch get past the page cache, against the device's own random reads of the same size
                and queue depth (device_reads.cpp), and against RocksDB with direct reads
ssd-written-B   bytes written for a byte put, overwriting every row once at random, against RocksDB
ssd-train-warm  a training step (dim 32, Adam) with 10 % of the rows in memory and look-ahead, against all in
ssd-train-cold  memory; warm through the page cache, cold past it, where the bound is the longer of the step
                in memory and the time that the device takes for the rows that were missing

RocksDB is set up as its documentation advises for point lookups: bloom filters of 10 bits, a block cache with
a hash index in data blocks, as many background jobs as cores, no write-ahead log, batched writes, MultiGet.
It is fully compacted before it is read, and its keys are made into bytes before the clock runs.

Filling both takes longer than measuring them. `python -m benchmarks.stores DIRECTORY` does only that, and
with EMBSTORE_BENCH_DATA=DIRECTORY in the environment the works use what is there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import embstore
from embstore.lookahead import LookAhead
from embstore.stores import SsdStore, row_bytes

from .ids import scatter, zipf_batches
from .registry import Row, Run, Sizes, register
from .timing import set_threads

BATCH = 65_536
SECTOR, QUEUE_DEPTH = 512, 128  # of the store's direct reads
GET_WANTED, WRITTEN_WANTED, COLD_WANTED = 5.0, 2.0, 0.85


class Scratch:
    """A directory on the disk under test (TMPDIR), removed afterwards."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="embstore-bench-"))
        return self.path

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class RocksDb:
    """RocksDB with the operations of a store."""

    def __init__(self, path: Path, direct: bool) -> None:
        from rocksdict import BlockBasedOptions, Cache, DataBlockIndexType, Options, Rdict, WriteOptions

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(os.cpu_count() or 2)
        options.set_max_background_jobs(os.cpu_count() or 2)
        options.set_write_buffer_size(128 << 20)
        blocks = BlockBasedOptions()
        blocks.set_block_cache(Cache(256 << 20))
        blocks.set_bloom_filter(10.0, False)
        blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
        blocks.set_cache_index_and_filter_blocks(False)
        options.set_block_based_table_factory(blocks)
        options.set_use_direct_reads(direct)
        options.set_use_direct_io_for_flush_and_compaction(direct)
        self.options, self.path = options, path
        self.db = Rdict(str(path), options)
        write = WriteOptions()
        write.disable_wal = True
        self.db.set_write_options(write)
        self.write_options = write

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, row in zip(self.as_bytes(keys), rows):
            batch.put(key, row.tobytes())
        self.db.write(batch, self.write_options)

    def get(self, keys: list[bytes]) -> list[bytes]:
        return self.db[keys]

    @staticmethod
    def as_bytes(keys: np.ndarray) -> list[bytes]:
        return [key.ljust(8, b"\0") for key in keys.astype(">u8").view("S8").tolist()]

    def settle(self) -> None:
        self.db.flush()
        self.db.compact_range(None, None)

    def close(self) -> None:
        self.db.close()


def written_bytes() -> int:
    """What this process has sent to block devices or the page cache on their behalf."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


@contextmanager
def filled(rows: int, width: int, direct: bool) -> Iterator[tuple[SsdStore, RocksDb, np.ndarray]]:
    """Both stores with the same rows, from EMBSTORE_BENCH_DATA or made for this run."""
    keys = scatter(np.arange(rows)).numpy()
    with Scratch() as scratch:
        path = Path(os.environ.get("EMBSTORE_BENCH_DATA", scratch)) / f"{rows}-{width}"
        if not (path / "filled").exists():
            fill(path, keys, width)
        ours = SsdStore(path / "ours", width, direct=direct)
        ours.load_snapshot("filled")
        ours.delete_snapshot("filled")
        theirs = RocksDb(path / "theirs", direct)
        if not direct:
            for file in path.rglob("*"):
                if file.is_file():
                    with file.open("rb", buffering=0) as source:
                        while source.read(1 << 22):
                            pass
        yield ours, theirs, keys
        ours.snapshot("filled")  # for the next run: it has all keys, whatever was put meanwhile
        theirs.close()
        ours.close()


def fill(path: Path, keys: np.ndarray, width: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    ours, theirs = SsdStore(path / "ours", width), RocksDb(path / "theirs", False)
    rng = np.random.default_rng(0)
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        values = rng.integers(0, 256, (len(part), width), dtype=np.uint8)
        ours.put(part, values)
        theirs.put(part, values)
    ours.snapshot("filled")
    theirs.settle()
    ours.close()
    theirs.close()
    (path / "filled").touch()


def interleaved(sides, rounds: int) -> list[float]:
    """Median seconds of each side; every round runs all of them."""
    spent: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for seconds, side in zip(spent, sides):
            start = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - start)
    return [float(np.median(seconds[1:])) for seconds in spent]


def device_reads(files: list[Path], block: int, seconds: float = 2.0) -> float:
    """Random reads of `block` bytes a second of the device, past the page cache, as deep as ours."""
    source = Path(__file__).with_name("device_reads.cpp")
    with Scratch() as path:
        program = path / "device_reads"
        subprocess.run(["c++", "-O2", "-std=c++20", "-o", program, source], check=True)
        command = [program, str(block), str(QUEUE_DEPTH), str(seconds), *files]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def warm(run: Run, width: int) -> Iterator[Row]:
    rows = run.sizes.limit_keys
    name = f"{rows:,} rows of {width} bytes"
    threads = max(run.threads)
    set_threads(threads)
    with filled(rows, width, direct=False) as (ours, theirs, keys):
        rng = np.random.default_rng(1)
        batches = [rng.choice(keys, min(BATCH, rows)) for _ in range(8)]
        as_bytes = [theirs.as_bytes(batch) for batch in batches]
        values = rng.integers(0, 256, (len(batches[0]), width), dtype=np.uint8)
        order = iter(np.arange(10_000) % 8)
        now = [0]

        def advance():
            now[0] = int(next(order))

        def same():
            rows_, _, found = ours.get(batches[0][:1000])
            assert found.all() and [r.tobytes() for r in rows_] == list(theirs.get(as_bytes[0][:1000]))

        same()
        get = interleaved(
            [
                advance,
                lambda: ours.get(batches[now[0]], with_scores=False),
                lambda: theirs.get(as_bytes[now[0]]),
            ],
            9,
        )
        put = interleaved(
            [advance, lambda: ours.put(batches[now[0]], values), lambda: theirs.put(batches[now[0]], values)],
            9,
        )
        for what, (_, mine, other) in (("get", get), ("put", put)):
            detail = f"{len(batches[0]) / mine / 1e6:.2f} M/s against {len(batches[0]) / other / 1e6:.2f} M/s"
            yield Row(
                f"warm batch {what}, {name}", "RocksDB", threads, other / mine, GET_WANTED, None, detail
            )


def cold(run: Run, width: int) -> Iterator[Row]:
    rows = run.sizes.limit_keys
    threads = max(run.threads)
    set_threads(threads)
    with filled(rows, width, direct=True) as (ours, theirs, keys):
        rng = np.random.default_rng(2)
        # So few of so many that rows seldom share a block: each is a read of the device.
        batches = [rng.choice(keys, 8192) for _ in range(6)]
        as_bytes = [theirs.as_bytes(batch) for batch in batches]
        position = [0]

        def mine():
            position[0] += 1
            ours.get(batches[position[0] % 6], with_scores=False)

        files = sorted(Path(ours.path).glob("values/*"))
        device = device_reads(files, SECTOR)
        mine_s, other_s = interleaved([mine, lambda: theirs.get(as_bytes[position[0] % 6])], 6)
        device = (device + device_reads(files, SECTOR)) / 2
        blocks = 8192
        name = f"cold batch get, {rows:,} rows of {width} bytes"
        detail = f"{blocks / mine_s / 1e3:.0f} k/s, device {device / 1e3:.0f} k/s"
        ratio = blocks / mine_s / device
        yield Row(
            name, f"the device, {SECTOR} bytes, depth {QUEUE_DEPTH}", threads, ratio, COLD_WANTED, 1.0, detail
        )
        detail = f"{blocks / other_s / 1e3:.0f} k/s"
        yield Row(name, "RocksDB, direct", threads, other_s / mine_s, 1.0, None, detail)


def written(run: Run, width: int) -> Iterator[Row]:
    rows = run.sizes.limit_keys // 4
    rng = np.random.default_rng(3)
    amounts = []
    keys = scatter(np.arange(rows)).numpy()
    for side in ("ours", "theirs"):
        with Scratch() as path:
            store = SsdStore(path / side, width) if side == "ours" else RocksDb(path / side, True)
            before = written_bytes()
            for order in (np.arange(rows), rng.permutation(rows)):
                for start in range(0, rows, BATCH):
                    part = keys[order[start : start + BATCH]]
                    store.put(part, rng.integers(0, 256, (len(part), width), dtype=np.uint8))
            store.flush() if side == "ours" else store.settle()
            amounts.append((written_bytes() - before) / (2 * rows * width))
            store.close()
    detail = f"{amounts[0]:.2f} against {amounts[1]:.2f} bytes"
    name = f"bytes written a byte put, {rows:,} rows of {width} bytes twice"
    yield Row(name, "RocksDB", 1, amounts[1] / amounts[0], WRITTEN_WANTED, None, detail)


def train(run: Run, direct: bool) -> Iterator[Row]:
    rows, dim, batch = run.sizes.limit_keys // 5, 32, run.sizes.batch
    threads = max(run.threads)
    set_threads(threads)
    optimizer = embstore.Adam(lr=0.01)
    # No batch comes twice: rows that a batch brought up would be there when it comes again.
    batches = zipf_batches(rows, batch, 64).keys
    whole = embstore.Table("t", dim=dim, optimizer=optimizer, init_capacity=int(rows / 0.74))
    with Scratch() as path, SsdStore(path, row_bytes(dim, optimizer), direct=direct) as store:
        cached = embstore.Table("t", dim=dim, optimizer=optimizer, store=store, max_capacity=rows // 10)
        keys = scatter(np.arange(rows))

        def train_both(part: torch.Tensor) -> None:
            for table in (whole, cached):
                vectors = table.find_or_insert(part)
                table.apply_gradients(part, vectors)

        for start in range(0, rows, BATCH):
            train_both(keys[start : start + BATCH])
        # Until places are used again, as in any long training: compaction is part of what is timed, and files
        # that still grow take fresh pages, which a virtual machine may get at a thirtieth of the speed.
        rng = np.random.default_rng(4)
        while store.stats().moved_rows == 0:
            train_both(keys[torch.from_numpy(rng.integers(0, rows, BATCH))])
        gradient = torch.randn(batch, dim) * 0.1
        # Modules hand the rows of the forward pass to the backward pass: keys are looked up once a step.
        modules = {table: embstore.Embedding(table=table).train() for table in (whole, cached)}

        def steps(table, source) -> list[float]:
            seconds, start = [], time.perf_counter()
            for part in source:
                modules[table](part).backward(gradient)
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
            return seconds

        ours, theirs = [], []
        for first in range(0, 64, 16):
            part = batches[first : first + 16]
            before = cached.stats().fetches
            ours += steps(cached, LookAhead(part, cached.prefetch, depth=2))[2:]
            misses = (cached.stats().fetches - before) / len(part)
            theirs += steps(whole, part)[2:]
        step, bound = float(np.median(ours)), float(np.median(theirs))
        detail = f"{1e3 * step:.0f} ms against {1e3 * bound:.0f} ms, {misses:.0f} rows fetched a step"
        work = f"Adam step, 10 % of {rows:,} rows in memory, {'cold' if direct else 'warm'}, dim {dim}"
        marks = (None, None) if direct else (0.4, 0.7)
        yield Row(work, "all rows in memory", threads, bound / step, *marks, detail)
        if direct:
            device = device_reads(sorted(path.glob("values/*")), SECTOR)
            bound = max(bound, misses / device)
            detail = f"bound {1e3 * bound:.0f} ms, device {device / 1e3:.0f} k/s"
            yield Row(work, "all in memory, or the device", threads, bound / step, 0.8, None, detail)
        probe = keys[:: max(1, rows // 50_000)]
        if not np.array_equal(cached.find(probe)[0], whole.find(probe)[0]):
            raise RuntimeError("both tables should hold the same rows but do not")
        cached.close()
    whole.close()


for _width in (128, 512):
    register(f"ssd-warm-{_width}")(lambda run, width=_width: warm(run, width))
    register(f"ssd-cold-{_width}")(lambda run, width=_width: cold(run, width))
    register(f"ssd-written-{_width}")(lambda run, width=_width: written(run, width))
register("ssd-train-warm")(lambda run: train(run, direct=False))
register("ssd-train-cold")(lambda run: train(run, direct=True))


if __name__ == "__main__":
    for _width in (128, 512):
        _rows = Sizes().limit_keys
        fill(Path(sys.argv[1]) / f"{_rows}-{_width}", scatter(np.arange(_rows)).numpy(), _width)
