"""Finds out what a machine does: small real runs, and the constants of the model that explain them best.

machine = measure("/data")      # a minute; the disk is that of the folder
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embstore.planning.machine import Machine
from embstore.planning.model import EXCHANGES
from embstore.planning.running import FILE_ROUNDS, Run, run
from embstore.planning.workload import PlannedTable, planned_table

TABLE_BYTES = 192 << 20  # of the rows of a table: more than a cache holds
BATCH, SMALL = 65536, 512
DISK_BYTES = 256 << 20
OWN = ("step", "table", "id", "id_byte", "row", "row_byte")
MEMORY_DISK = Path("/dev/shm")


def measure(folder: str | os.PathLike[str] = ".", *, table_bytes: int = TABLE_BYTES) -> Machine:
    """Runs tables of several shapes on 1, 2 and 4 ranks, and times the disk below `folder`.

    Costs of work are CPU time, which other programs disturb little; the disk and threads are timed by the
    clock, so the machine should do nothing else. Takes a minute, and 1 GB of memory and of the disk.
    """
    cores = len(os.sched_getaffinity(0))
    steps, process_bytes = _steps(cores, table_bytes)
    exchange = _exchange(steps, table_bytes)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        write, read = _disk(Path(place))
        files = _files(Path(place), table_bytes)
    return Machine(
        **{**steps, **exchange, **files},
        process_bytes=process_bytes,
        cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        write_bytes_per_second=write,
        read_bytes_per_second=read,
    )


def fitted(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> npt.NDArray[np.float64]:
    """Costs of at least 0, one for each column, by which the sums come nearest to the seconds, in percent."""
    wanted = np.asarray(seconds, np.float64)
    counts = np.asarray(columns, np.float64) / wanted[:, None]
    best, answer = np.inf, np.zeros(counts.shape[1])
    for size in range(1, counts.shape[1] + 1):
        for used in itertools.combinations(range(counts.shape[1]), size):
            costs = np.linalg.lstsq(counts[:, used], np.ones(len(wanted)), rcond=None)[0]
            error = float(np.square(counts[:, used] @ costs - 1).sum())
            if (costs >= 0).all() and error < best:
                best, answer = error, np.zeros(counts.shape[1])
                answer[list(used)] = costs
    return answer


def _table(dim: int, optimizer: str, table_bytes: int, name: str = "t") -> PlannedTable:
    one = planned_table(name, rows=1, dim=dim, optimizer=optimizer)
    return replace(one, rows=max(1000, table_bytes // (one.row_bytes + 32)))


def _several(count: int, table_bytes: int) -> list[PlannedTable]:
    return [_table(8, "SGD", table_bytes // 16, f"t{i}") for i in range(count)]


def _own(order: Run) -> list[float]:
    """How often a step of one rank has the costs step, table, id, id_byte, row, row_byte."""
    n = order.batch / len(order.tables)
    vectors = sum(n * table.vector_bytes for table in order.tables)
    rows = sum(n * order.distinct * table.row_bytes for table in order.tables)
    return [1, len(order.tables), order.batch, vectors, order.batch * order.distinct, rows]


def _steps(cores: int, table_bytes: int) -> tuple[dict[str, float], int]:
    """One rank: the costs of ids and rows, and the memory of a process without tables."""
    shapes = [
        (8, "SGD", SMALL, 1.0),
        (8, "SGD", BATCH, 1.0),
        (8, "SGD", BATCH, 0.25),
        (8, "Adam", BATCH, 1.0),
        (32, "RowwiseAdagrad", BATCH, 0.5),
        (64, "SGD", BATCH, 1.0),
        (64, "SGD", BATCH, 0.25),
        (64, "Adam", BATCH, 1.0),
    ]
    runs = [
        Run(tables=[_table(dim, rule, table_bytes)], batch=batch, distinct=distinct)
        for dim, rule, batch, distinct in shapes
    ]
    *found, together = run(
        1, [Run(tables=_several(8, table_bytes), batch=8 * SMALL), *runs, replace(runs[-1], threads=cores)]
    )
    counts = [_own(order) for order in [Run(tables=_several(8, table_bytes), batch=8 * SMALL), *runs]]
    costs = fitted(counts, [observed.step_cpu_seconds for observed in found])
    parallel = 0.0
    if cores > 1:
        ratio = together.best_step_seconds / found[-1].best_step_seconds
        parallel = min(1.0, max(0.0, (1 - ratio) / (1 - 1 / cores)))
    constants = {**dict(zip(OWN, costs.tolist(), strict=True)), "parallel": parallel}
    return constants, found[0].process_bytes


def _exchange(steps: dict[str, float], table_bytes: int) -> dict[str, float]:
    """Two ranks, and four for what a message costs: what comes on top of the work of one."""
    narrow, wide = _table(8, "SGD", table_bytes), _table(64, "SGD", table_bytes)
    runs = [
        Run(tables=[narrow], batch=SMALL, steps=40),
        Run(tables=_several(8, table_bytes), batch=8 * SMALL, steps=40),
        Run(tables=[narrow], batch=BATCH),
        Run(tables=[wide], batch=BATCH),
    ]
    two, [four] = run(2, runs), run(4, runs[:1])
    counts, seconds = [], []
    for order, observed, world in zip([*runs, runs[0]], [*two, four], [2, 2, 2, 2, 4], strict=True):
        own = sum(steps[name] * count for name, count in zip(OWN, _own(order), strict=True))
        moved = order.batch * 8 + 2 * _own(order)[OWN.index("id_byte")]
        counts.append([1.0, len(order.tables), EXCHANGES * (world - 1), order.batch, moved])
        seconds.append(max(observed.step_cpu_seconds - own, 1e-9))
    names = ("exchange", "sent_table", "message", "sent_id", "sent_byte")
    return dict(zip(names, fitted(counts, seconds).tolist(), strict=True))


def _files(place: Path, table_bytes: int) -> dict[str, float]:
    """What cores do for dumps: on a file system in memory, where there is one."""
    memory = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else place
    shapes = [_table(dim, rule, table_bytes) for dim, rule in ((8, "SGD"), (64, "SGD"), (64, "Adam"))]
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        orders = [Run(tables=[table], batch=BATCH, steps=3, folder=folder) for table in shapes]
        small = [Run(tables=[shape], batch=SMALL, steps=1, folder=str(place)) for shape in shapes]
        *found, most, _, least = run(1, [*orders, *small])
    few, many = shapes[-1].rows, shapes[0].rows
    whole = [[table.rows, table.rows * table.dumped_bytes] for table in shapes]
    parts = [
        [observed.changed_rows, observed.changed_rows * table.dumped_bytes]
        for table, observed in zip(shapes, found, strict=True)
    ]

    def costs(counts: list[list[int]], seconds: list[float], name: str) -> dict[str, float]:
        row, byte = fitted(counts, seconds).tolist()
        return {f"{name}_row": row, f"{name}_byte": byte}

    return {
        "publish": least.append_seconds,
        "scan_row": max(0.0, most.append_seconds - least.append_seconds) / (many - few),
        **costs(whole, [observed.dump_cpu_seconds for observed in found], "dump"),
        **costs(whole, [observed.load_cpu_seconds for observed in found], "load"),
        **costs(parts, [observed.follow_seconds for observed in found], "follow"),
    }


def _disk(place: Path) -> tuple[float, float]:
    """Bytes a second that are written and synced, and read again without the page cache: the best of some
    rounds, as memory that a virtual machine has never used makes the page cache slow."""
    rounds = [_disk_once(place / "bytes") for _ in range(FILE_ROUNDS)]
    return max(write for write, _ in rounds), max(read for _, read in rounds)


def _disk_once(file: Path) -> tuple[float, float]:
    block = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    start = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(DISK_BYTES // block.nbytes):
            out.write(block.data)
        os.fsync(out.fileno())
    write = DISK_BYTES / (time.perf_counter() - start)
    with file.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while source.readinto(block.data):
            pass
    read = DISK_BYTES / (time.perf_counter() - start)
    return write, read
