"""Real runs: trains tables on ranks of this host and says what it took.

    [observed] = run(2, [Run(tables=[planned_table("user", rows=10**6, dim=16)], batch=65536)])

The ranks are processes of this module. Rows are all there before the first step, the ids of a batch are
spread evenly over them, and each distinct one comes equally often.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import embstore
from embstore.ownership import owner
from embstore.planning.workload import PlannedTable, planned_table

SECONDS = 600.0  # for a run
FILE_ROUNDS = 3
FILL = 1 << 14  # at once: the pool of the engine keeps memory for results of this size


@dataclass(frozen=True, kw_only=True)
class Run:
    """
    folder  where to write a log and load it again; "": not at all
    """

    tables: Sequence[PlannedTable]
    batch: int
    distinct: float = 1.0
    threads: int = 1
    steps: int = 20
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What rank 0 saw. Of the steps it is the quickest quarter: others may have been disturbed."""

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
    append_seconds: float = 0.0
    changed_rows: int = 0
    follow_seconds: float = 0.0


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

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """From the first rank that begins to the last one that ends."""
        self.together()
        start = time.perf_counter()
        answer = work()
        self.together()
        return time.perf_counter() - start, answer

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
        """The quickest of some rounds: memory that a virtual machine has never used, also that of the page
        cache, costs several times as much as the work itself."""
        rounds = [self._files_once(order, model, step) for _ in range(FILE_ROUNDS)]
        return {name: min(found[name] for found in rounds) for name in rounds[0]}

    def _files_once(
        self, order: Run, model: embstore.EmbeddingCollection, step: Callable[[], None]
    ) -> dict[str, Any]:
        """Writes a log and an increment, which a reader follows; then a new module loads the base."""
        path, tables = Path(order.folder) / "log", {"model": dict(model.tables)}
        used = time.process_time()
        dump_seconds, log = self.timed(lambda: embstore.IncrementLog.create(path, tables))
        dump_cpu_seconds = time.process_time() - used
        [base] = path.glob("base-*")
        reader = None
        if self.rank == 0:
            reader = embstore.serving.Reader(path, cache=Path(order.folder) / "cache")
        step()
        append_seconds, _ = self.timed(lambda: log.append(tables))
        follow_seconds, _ = self.timed(lambda: reader.follow() if reader else None)
        increment = max(path.glob("increment-*"))
        keys = [file for file in increment.rglob("*_keys") if "_opt_state_" not in file.name]
        written = [file for file in base.rglob("*") if file.is_file()]
        sizes = sum(file.stat().st_size for file in written)
        changed = sum(file.stat().st_size for file in keys) // 8
        fresh = self.module(order)
        for file in written:  # from the disk, not from the page cache
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        again = {"model": dict(fresh.tables)}
        used = time.process_time()
        load_seconds, _ = self.timed(lambda: embstore.load(base, again, optim=True))
        load_cpu_seconds = time.process_time() - used
        for table in fresh.tables.values():
            table.close()
        self.together()
        if reader:
            reader.close()
            shutil.rmtree(path)
            shutil.rmtree(Path(order.folder) / "cache")
        self.together()
        return {
            "dump_seconds": dump_seconds,
            "dump_cpu_seconds": dump_cpu_seconds,
            "dump_bytes": sizes,
            "load_seconds": load_seconds,
            "load_cpu_seconds": load_cpu_seconds,
            "append_seconds": append_seconds,
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
