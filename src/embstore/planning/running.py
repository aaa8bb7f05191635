"""Real runs: trains tables on ranks of this host and says what it took.

    [observed] = run(2, [Run(tables=[planned_table("user", rows=10**6, dim=16)], batch=65536)])

The ranks are processes of this module. Rows are all there before the first step, the ids of a batch are
spread evenly over them, and each distinct one comes equally often.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import embstore
from embstore.ownership import owner
from embstore.planning.workload import PlannedTable, planned_table

SECONDS = 600.0  # for a run
FILE_ROUNDS = 3
DISK_BYTES, DISK_FILES = 256 << 20, 8
FILL = 1 << 14  # at once: the pool of the engine keeps memory for results of this size


@dataclass(frozen=True, kw_only=True)
class Run:
    """
    threads       of a rank in steps
    folder        where to write a log and load it again; "": not at all
    file_threads  of a rank meanwhile
    file_rounds   how often
    """

    tables: Sequence[PlannedTable]
    batch: int
    distinct: float = 1.0
    threads: int = 1
    steps: int = 20
    folder: str = ""
    file_threads: int = 1
    file_rounds: int = FILE_ROUNDS


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What rank 0 saw. Of the steps it is the quickest quarter: others may have been disturbed. Of what is
    done with files it is the median of the rounds."""

    step_seconds: float
    best_step_seconds: float = 0.0
    step_cpu_seconds: float = 0.0  # of a rank
    sent_bytes: float = 0.0
    process_bytes: int = 0  # of a rank without tables
    memory_bytes: int = 0  # of a rank, by its tables and batches
    dump_seconds: float = 0.0
    dump_cpu_seconds: float = 0.0
    dump_bytes: int = 0
    load_seconds: float = 0.0
    load_cpu_seconds: float = 0.0
    load_reading_cpu_seconds: float = 0.0  # of the thread that reads
    append_seconds: float = 0.0
    append_cpu_seconds: float = 0.0
    changed_rows: int = 0
    follow_seconds: float = 0.0
    write_bytes_per_second: float = 0.0  # of the disk, beside each round
    read_bytes_per_second: float = 0.0
    file_seconds: float = 0.0
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of what is done with files


def run(ranks: int, runs: Sequence[Run]) -> list[Observed]:
    """Starts the ranks, waits for them, and returns what they found. Raises RuntimeError when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "runs").write_bytes(pickle.dumps(list(runs)))
        started = []
        for rank in range(ranks):
            with (place / f"{rank}.log").open("wb") as log:
                command = [sys.executable, "-m", "embstore.planning.running", folder, str(rank), str(ranks)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            deadline = time.monotonic() + SECONDS
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code:
                text = (place / f"{rank}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {rank} failed with code {code}:\n{text[-4000:]}")
        found: list[Observed] = pickle.loads((place / "observed").read_bytes())
        return found


# ---- on a rank


def _keys(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A bijection: distinct numbers give distinct keys, in no order."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (x ^ (x >> np.uint64(29))).view(np.int64)


def _resident_bytes() -> tuple[int, int]:
    """In all, and without pages of files: those of torch's libraries come and go as the kernel likes.

    What malloc keeps of freed memory depends on what ran before, so it is given back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    page = os.sysconf("SC_PAGE_SIZE")
    return resident * page, (resident - shared) * page


class _Took(NamedTuple):
    seconds: float
    cpu_seconds: float  # of this rank
    thread_seconds: float  # of that, the main thread's


def _touch(size: int) -> None:
    """A virtual machine gives memory that is free for a second back to its host. Who uses it next waits for
    it several times as long as its own work takes: here, and not in what is timed."""
    np.empty(size, np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 1


def _disk(folder: Path) -> dict[str, float]:
    """What the disk does now: bytes a second that it takes from the page cache and that it brings there, and
    seconds for a small file that is made and synced."""
    _touch(DISK_BYTES)
    block, path = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), folder / "bytes"
    with path.open("wb", buffering=0) as out:
        for _ in range(DISK_BYTES // block.nbytes):
            out.write(block.data)
        start = time.perf_counter()
        os.fsync(out.fileno())
        write = time.perf_counter() - start
    with path.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while source.readinto(block.data):
            pass
        read = time.perf_counter() - start
    path.unlink()
    paths = [folder / f"file{number}" for number in range(DISK_FILES)]
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:  # as a dump does it: all are written, then each is synced
        files = [stack.enter_context(path.open("wb", buffering=0)) for path in paths]
        for file in files:
            file.write(block.data[:4096])
        for file in files:
            os.fsync(file.fileno())
    synced = (time.perf_counter() - start) / DISK_FILES
    for path in paths:
        path.unlink()
    return {
        "write_bytes_per_second": DISK_BYTES / write,
        "read_bytes_per_second": DISK_BYTES / read,
        "file_seconds": synced,
    }


class _Rank:
    """One of the processes."""

    def __init__(self, rank: int, world: int) -> None:
        import torch

        from embstore.distributed.ranks import TorchRanks

        self.rank, self.world, self.sent_bytes, self.own_bytes = rank, world, 0, 0
        send = TorchRanks.all_to_all

        def counted(ranks: Any, out: Any, rows: Any, receive: Any, sizes: Any, what: str = "") -> Any:
            self.sent_bytes += rows.element_size() * (sum(sizes) - sizes[rank])
            return send(ranks, out, rows, receive, sizes, what)

        setattr(TorchRanks, "all_to_all", counted)  # noqa: B010
        self._torch = torch
        # Afterwards all modules are imported, and the pools have what a batch needs.
        self.observe(Run(tables=[planned_table("t", rows=100, dim=32)], batch=65536))
        self.process_bytes, self.own_bytes = _resident_bytes()

    def together(self) -> None:
        if self.world > 1:
            self._torch.distributed.barrier()

    def timed(self, work: Callable[[], Any]) -> tuple[_Took, Any]:
        """From the first rank that begins to the last one that ends."""
        self.together()
        start, used, own = time.perf_counter(), time.process_time(), time.thread_time()
        answer = work()
        cpu_seconds, thread_seconds = time.process_time() - used, time.thread_time() - own
        self.together()
        return _Took(time.perf_counter() - start, cpu_seconds, thread_seconds), answer

    def module(self, order: Run) -> embstore.EmbeddingCollection:
        tables = [replace(t.options, max_capacity=t.rows // self.world * 5 // 4 + 1024) for t in order.tables]
        return embstore.EmbeddingCollection(tables, sharded=self.world > 1)

    def fill(self, order: Run, model: embstore.EmbeddingCollection) -> None:
        for table in order.tables:
            for start in range(0, table.rows, FILL):
                keys = _keys(np.arange(start, min(start + FILL, table.rows)))
                model.tables[table.options.name].find_or_insert(keys[owner(keys, self.world) == self.rank])

    def batches(self, order: Run, count: int = 4) -> list[dict[str, Any]]:
        """The ids of this rank, a feature for each table."""
        shares = sum(table.ids for table in order.tables)
        made = []
        for number in range(count):
            rng = np.random.default_rng(number)  # the same on all ranks
            batch = {}
            for table in order.tables:
                own = round(order.batch * table.ids / shares)
                every = own * self.world
                rows = rng.integers(0, table.rows, max(1, round(every * order.distinct)))
                ids = rng.permutation(np.resize(rows, every))[self.rank * own : (self.rank + 1) * own]
                batch[table.options.name] = self._torch.from_numpy(_keys(ids))
            made.append(batch)
        return made

    def observe(self, order: Run) -> Observed:
        torch = self._torch
        embstore.set_num_threads(order.threads)
        model = self.module(order)
        self.fill(order, model)
        dims = {table.options.name: table.options.dim for table in order.tables}
        batches = self.batches(order)
        shapes = {torch.Size((len(ids), dims[name])) for name, ids in batches[0].items()}
        gradients = {shape: torch.full(shape, 1e-3) for shape in shapes}

        def step(number: int) -> None:
            vectors = list(model(batches[number % len(batches)]).values())
            torch.autograd.backward(vectors, [gradients[v.shape] for v in vectors])

        for number in range(len(batches)):
            step(number)
        self.sent_bytes = 0
        seconds, cpu_seconds = [], []
        self.together()
        for number in range(order.steps):
            start, used = time.perf_counter(), time.process_time()
            step(number)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - used)
        observed = Observed(
            step_seconds=float(np.quantile(seconds, 0.25)),
            best_step_seconds=min(seconds),
            step_cpu_seconds=float(np.quantile(cpu_seconds, 0.25)),
            sent_bytes=self.sent_bytes / order.steps,
            memory_bytes=_resident_bytes()[1] - self.own_bytes,
        )
        if order.folder:
            observed = replace(observed, **self._files(order, model, lambda: step(0)))
        for table in model.tables.values():
            table.close()
        return observed

    def _files(
        self, order: Run, model: embstore.EmbeddingCollection, step: Callable[[], None]
    ) -> dict[str, Any]:
        """Medians of some rounds."""
        embstore.set_num_threads(order.file_threads)
        found = [self._files_once(order, model, step) for _ in range(order.file_rounds)]
        rounds = {name: [one[name] for one in found] for name in found[0]}
        whole = ("dump_bytes", "changed_rows")
        medians = {name: float(np.median(values)) for name, values in rounds.items() if name not in whole}
        return {**medians, **{name: int(rounds[name][0]) for name in whole}, "rounds": rounds}

    def _files_once(
        self, order: Run, model: embstore.EmbeddingCollection, step: Callable[[], None]
    ) -> dict[str, float]:
        """Writes a log and an increment, which a reader follows; then a new module loads the base."""
        place = Path(order.folder)
        path, tables = place / "log", {"model": dict(model.tables)}
        disk = _disk(place) if self.rank == 0 else {}
        size = sum(table.rows * table.dumped_bytes for table in order.tables) // self.world
        self.together()
        _touch(2 * size)  # the page cache
        dump, log = self.timed(lambda: embstore.IncrementLog.create(path, tables))
        [base] = path.glob("base-*")
        reader = None
        if self.rank == 0:
            reader = embstore.serving.Reader(path, cache=place / "cache")
        step()
        _touch(size)
        append, _ = self.timed(lambda: log.append(tables))
        start = time.perf_counter()
        if reader:  # which waits for no rank
            reader.follow()
        follow_seconds = time.perf_counter() - start
        self.together()
        increment = max(path.glob("increment-*"))
        keys = [file for file in increment.rglob("*_keys") if "_opt_state_" not in file.name]
        written = [file for file in base.rglob("*") if file.is_file()]
        sizes = sum(file.stat().st_size for file in written)
        changed = sum(file.stat().st_size for file in keys) // 8
        fresh = self.module(order)
        again = {"model": dict(fresh.tables)}
        self.together()
        for file in written:  # from the disk, not from the page cache
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        _touch(3 * size)  # the page cache, the tables with their index
        load, _ = self.timed(lambda: embstore.load(base, again, optim=True))
        for table in fresh.tables.values():
            table.close()
        self.together()
        if reader:
            reader.close()
            shutil.rmtree(path)
            shutil.rmtree(place / "cache")
        self.together()
        return {
            **disk,
            "dump_seconds": dump.seconds,
            "dump_cpu_seconds": dump.cpu_seconds,
            "dump_bytes": sizes,
            "load_seconds": load.seconds,
            "load_cpu_seconds": load.cpu_seconds,
            "load_reading_cpu_seconds": load.cpu_seconds - load.thread_seconds,
            "append_seconds": append.seconds,
            "append_cpu_seconds": append.cpu_seconds,
            "changed_rows": changed,
            "follow_seconds": follow_seconds,
        }


def _main(place: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(place / "store"), world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    here = _Rank(rank, world)
    runs: list[Run] = pickle.loads((place / "runs").read_bytes())
    found = [replace(here.observe(order), process_bytes=here.process_bytes) for order in runs]
    if rank == 0:
        (place / "observed").write_bytes(pickle.dumps(found))
    here.together()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    from embstore.planning.running import _main  # the classes that are pickled are those of the package

    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
