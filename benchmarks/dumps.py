"""Dumps against plain files, and what they cost a training step.

dump            embstore.dump against writing the same bytes from memory to as many files; fsync in both
load            embstore.load into an empty table against reading the same files; from disk in both, not from
                the page cache, as far as the kernel lets go of it, and into memory that both have used
                before: new pages cost a virtual machine several times what the reading costs
increment       an increment of 1 % of the rows against a full dump of all of them; fsync in both
dump-async      the training step beside a dump against the step alone, and how long the call holds it

A table of 10 million rows of dim 32, row-wise Adagrad, states dumped too.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import embstore

from .ids import scatter, zipf_batches
from .registry import Row, Run, register
from .static_tables import EPS, GRADIENT_SCALE, LEARNING_RATE
from .tables import blocks, embedding
from .timing import set_threads

DIM = 32
ROUNDS = 3
CHUNK = 8 << 20
STEPS_ALONE = 60
MOST_HOLD_SECONDS = 0.100


def filled(rows: int) -> embstore.Embedding:
    module = embedding(
        DIM, embstore.RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS), rows * 3 // 2, score_strategy="step"
    )
    for start, end in blocks(0, rows):
        module.table.find_or_insert(scatter(np.arange(start, end)))
    return module


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_plainly(sizes: list[int], folder: Path) -> None:
    """As many bytes in as many files, from one buffer that is in the cache."""
    buffer = memoryview(np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8))
    folder.mkdir()
    for number, size in enumerate(sizes):
        with open(folder / str(number), "wb", buffering=0) as file:
            while size > 0:
                size -= file.write(buffer[: min(size, CHUNK)])
            os.fsync(file.fileno())


def read_plainly(files: list[Path], buffers: list[np.ndarray]) -> None:
    for path, buffer in zip(files, buffers, strict=True):
        with open(path, "rb", buffering=0) as file:
            done = 0
            while done < buffer.nbytes:
                done += file.readinto(buffer.data[done : done + CHUNK])


def forget(files: list[Path]) -> None:
    """Asks the kernel to drop the files from its cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def speed(size: int, ours: float, theirs: float) -> str:
    return f"ours {size / ours / 1e9:.2f}, theirs {size / theirs / 1e9:.2f} GB/s of {size / 1e9:.2f} GB"


def tables_of(module: embstore.Embedding) -> dict[str, dict[str, embstore.Table]]:
    return {"model": {module.table.name: module.table}}


@register("dump")
def dump(run: Run) -> Iterator[Row]:
    rows = run.sizes.limit_keys
    module = filled(rows)
    work = f"dump with states, {rows:,} rows, dim {DIM}"
    for threads in run.threads:
        set_threads(threads)
        ours, theirs, sizes = [], [], []
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            mine, plain = Path(scratch, "ours"), Path(scratch, "theirs")
            for _ in range(ROUNDS):
                ours.append(seconds(lambda path=mine: embstore.dump(path, tables_of(module), optim=True)))
                sizes = [path.stat().st_size for path in files_of(mine)]
                theirs.append(seconds(lambda path=plain, each=sizes: write_plainly(each, path)))
                shutil.rmtree(mine)
                shutil.rmtree(plain)
        our_time, their_time = statistics.median(ours), statistics.median(theirs)
        detail = speed(sum(sizes), our_time, their_time)
        yield Row(work, "plain writes", threads, their_time / our_time, 0.7, 0.9, detail)
    module.table.close()


@register("load")
def load(run: Run) -> Iterator[Row]:
    rows = run.sizes.limit_keys
    module = filled(rows)
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        path = Path(scratch, "dump")
        embstore.dump(path, tables_of(module), optim=True)
        files = files_of(path)
        size = sum(file.stat().st_size for file in files)
        table = module.table
        buffers = [np.ones(file.stat().st_size, np.uint8) for file in files]
        work = f"load with states, {rows:,} rows, dim {DIM}"
        for threads in run.threads:
            set_threads(threads)
            ours, theirs = [], []
            for _ in range(ROUNDS):
                for start, end in blocks(0, rows):
                    table.erase(scatter(np.arange(start, end)))  # the memory of the rows stays
                forget(files)
                ours.append(seconds(lambda: embstore.load(path, tables_of(module), optim=True)))
                if len(table) != rows:
                    raise RuntimeError(f"the table should hold {rows} rows but holds {len(table)}")
                forget(files)
                theirs.append(seconds(lambda: read_plainly(files, buffers)))
            our_time, their_time = statistics.median(ours), statistics.median(theirs)
            detail = speed(size, our_time, their_time)
            yield Row(work, "plain reads", threads, their_time / our_time, 0.9, 0.95, detail)
    module.table.close()


@register("increment")
def increment(run: Run) -> Iterator[Row]:
    rows = run.sizes.limit_keys
    module = filled(rows)
    table = module.table
    few = scatter(np.random.default_rng(0).choice(rows, rows // 100, replace=False))
    work = f"increment of 1 % of {rows:,} rows, dim {DIM}"
    for threads in run.threads:
        set_threads(threads)
        increments, fulls = [], []
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            log = embstore.IncrementLog.create(Path(scratch, "log"), tables_of(module))
            for _ in range(ROUNDS):
                table.find_or_insert(few)
                increments.append(seconds(lambda log=log: log.append(tables_of(module))))
                full = Path(scratch, "full")
                fulls.append(seconds(lambda path=full: embstore.dump(path, tables_of(module), optim=True)))
                shutil.rmtree(full)
        our_time, their_time = statistics.median(increments), statistics.median(fulls)
        detail = f"increment {our_time:.3f} s, full dump {their_time:.2f} s"
        yield Row(work, "itself, full dump", threads, their_time / our_time, 10.0, 30.0, detail)
    table.close()


@register("dump-async")
def dump_async(run: Run) -> Iterator[Row]:
    sizes = run.sizes
    rows = sizes.limit_keys
    module = filled(rows)
    batches = zipf_batches(rows, sizes.batch, sizes.batches)
    grad = torch.randn(sizes.batch, DIM) * GRADIENT_SCALE
    count = 0

    def step() -> None:
        nonlocal count
        module(batches.keys[count % len(batches.keys)]).backward(grad)
        count += 1

    work = f"row-wise Adagrad step, {rows:,} rows, dim {DIM}"
    for threads in run.threads:
        set_threads(threads)
        alone, beside, holds, dumps = [], [], [], []
        for _ in range(sizes.warmup_rounds):
            step()
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            for round_ in range(ROUNDS):
                alone += [seconds(step) for _ in range(STEPS_ALONE)]
                start = time.perf_counter()
                handle = embstore.dump(Path(scratch, str(round_)), tables_of(module), optim=True, async_=True)
                holds.append(time.perf_counter() - start)
                assert handle is not None
                while not handle.done():
                    beside.append(seconds(step))
                handle.wait()
                dumps.append(time.perf_counter() - start)
                shutil.rmtree(Path(scratch, str(round_)))
        our_time, their_time = statistics.fmean(beside), statistics.fmean(alone)
        detail = (
            f"step {1e3 * our_time:.1f} ms beside, {1e3 * their_time:.1f} ms alone (means); "
            f"the dump takes {statistics.median(dumps):.1f} s"
        )
        yield Row(
            work + ", beside a dump", "itself, alone", threads, their_time / our_time, 0.9, 0.97, detail
        )
        hold = max(holds)
        detail = f"{1e3 * hold:.1f} ms, the longest of {ROUNDS}"
        ratio = MOST_HOLD_SECONDS / hold
        yield Row("call of an async dump", "100 ms", threads, ratio, 1.0, 10.0, detail)
    module.table.close()
