"""Finds out what a machine does: small real runs, and the constants of the model that explain them best.

machine = measure("/data")      # a minute; the disk is that of the folder
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embstore.planning.machine import Machine
from embstore.planning.model import APPEND_ROUNDS, DUMP_ROUNDS, EXCHANGES, LOAD_ROUNDS
from embstore.planning.running import Observed, Run, run
from embstore.planning.workload import PlannedTable, planned_table

TABLE_BYTES = 192 << 20  # of the rows of a table: more than a cache holds
BATCH, SMALL = 65536, 512
SMALL_ROUNDS = 5  # of file work with hardly any rows
CROWD = 4  # ranks: more than this machine's cores, if it is a small one
OWN = ("step", "table", "id", "id_byte", "row", "row_byte")


def measure(folder: str | os.PathLike[str] = ".", *, table_bytes: int = TABLE_BYTES) -> Machine:
    """Runs tables of several shapes on 1, 2 and 4 ranks, with files below `folder`.

    Costs of work are CPU time, which other programs disturb little; the disk, readers, threads and waiting
    are timed by the clock, so the machine should do nothing else. Takes a minute, and 1 GB of memory and of
    the disk.
    """
    cores = len(os.sched_getaffinity(0))
    steps, process_bytes = _steps(cores, table_bytes)
    exchange = _exchange(steps, table_bytes, cores)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        files = _files(place, table_bytes)
    return Machine(
        **{**steps, **exchange, **files},
        process_bytes=process_bytes,
        cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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


def _exchange(steps: dict[str, float], table_bytes: int, cores: int) -> dict[str, float]:
    """Two ranks, and four for what a message costs: what comes on top of the work of one. Two ranks that have
    a core each also show how long they wait for each other."""
    narrow, wide = _table(8, "SGD", table_bytes), _table(64, "SGD", table_bytes)
    runs = [
        Run(tables=[narrow], batch=SMALL, steps=40),
        Run(tables=_several(8, table_bytes), batch=8 * SMALL, steps=40),
        Run(tables=[narrow], batch=BATCH),
        Run(tables=[wide], batch=BATCH),
    ]
    two, [four] = run(2, runs), run(CROWD, runs[:1])
    counts, seconds, waits = [], [], []
    for order, observed, world in zip([*runs, runs[0]], [*two, four], [2, 2, 2, 2, CROWD], strict=True):
        own = sum(steps[name] * count for name, count in zip(OWN, _own(order), strict=True))
        moved = order.batch * 8 + 2 * _own(order)[OWN.index("id_byte")]
        counts.append([1.0, len(order.tables), EXCHANGES * (world - 1), order.batch, moved])
        seconds.append(max(observed.step_cpu_seconds - own, 1e-9))
        waits.append(max(observed.step_seconds - observed.step_cpu_seconds, 1e-9))
    names = ("exchange", "sent_table", "message", "sent_id", "sent_byte")
    costs = dict(zip(names, fitted(counts, seconds).tolist(), strict=True))
    if cores < 2:
        return costs
    waited = fitted([[count[2], count[4]] for count in counts[: len(two)]], waits[: len(two)])
    return {**costs, **dict(zip(("wait", "wait_byte"), waited.tolist(), strict=True))}


def _files(folder: str, table_bytes: int) -> dict[str, float]:
    """What dumps, increments, loads and readers take, and the disk beside them."""
    shapes = [(8, "SGD", 4 * BATCH), (8, "Adam", BATCH), (64, "SGD", BATCH), (64, "Adam", BATCH)]
    large = [_table(dim, rule, table_bytes) for dim, rule, _ in shapes]
    small = [[_table(8, "SGD", 0)], [_table(8, "Adam", 0)], _several(8, 0)]
    tiny = [
        Run(tables=tables, batch=SMALL, steps=1, folder=folder, file_rounds=SMALL_ROUNDS) for tables in small
    ]
    large_runs = [
        Run(tables=[table], batch=batch, steps=3, folder=folder)
        for table, (_, _, batch) in zip(large, shapes, strict=True)
    ]
    found = run(1, [*large_runs, Run(tables=large[:1], batch=SMALL, steps=1, folder=folder), *tiny])
    whole, scanned, few = found[: len(large)], found[len(large)], found[len(large) + 1 :]
    rows = [[table.rows, table.rows * table.dumped_bytes] for table in large]
    published = [[1, len(tables)] for tables in small]
    followed = [
        [1, len(tables), seen.changed_rows, seen.changed_rows * tables[0].followed_bytes]
        for tables, seen in zip([*([table] for table in large), *small], [*whole, *few], strict=True)
    ]
    seconds = {
        ("dump_row", "dump_byte"): (rows, [seen.dump_cpu_seconds for seen in whole]),
        ("load_row", "load_byte"): (rows, [seen.load_cpu_seconds for seen in whole]),
        ("publish", "publish_table"): (published, [seen.append_cpu_seconds for seen in few]),
        ("follow", "follow_table", "follow_row", "follow_byte"): (
            followed,
            [seen.follow_seconds for seen in [*whole, *few]],
        ),
    }
    costs: dict[str, float] = {}
    for names, (counts, took) in seconds.items():
        costs |= dict(zip(names, fitted(counts, took).tolist(), strict=True))
    one, _, several = tiny
    [two, two_several], [four, *crowd] = run(2, [one, several]), run(CROWD, [one, *large_runs])
    added = [(two, few[0], 1, one), (two_several, few[2], 1, several), (four, few[0], CROWD - 1, one)]
    scan = (scanned.append_cpu_seconds - few[0].append_cpu_seconds) / large[0].rows
    reading = [seen.load_reading_cpu_seconds / seen.load_cpu_seconds for seen in whole]
    return {
        **costs,
        **_rounds(added),
        "crowded": _crowded(whole, few[0], crowd, four),
        "scan_row": max(0.0, scan),
        "reading": min(1.0, max(0.0, float(np.median(reading)))),
        "file": float(np.median([seen.file_seconds for seen in found])),
        "write_bytes_per_second": float(np.median([seen.write_bytes_per_second for seen in found])),
        "read_bytes_per_second": float(np.median([seen.read_bytes_per_second for seen in found])),
    }


def _rounds(runs: Sequence[tuple[Observed, Observed, int, Run]]) -> dict[str, float]:
    """What ranks add to dumps, increments and loads of hardly any rows.

    runs   what ranks saw, what one rank saw, how many more ranks there were, and what they ran
    """
    counts, seconds = [], []
    for seen, before, others, order in runs:
        for rounds, name in ((DUMP_ROUNDS, "dump"), (APPEND_ROUNDS, "append"), (LOAD_ROUNDS, "load")):
            counts.append([rounds * others, len(order.tables)])
            took = f"{name}_cpu_seconds"
            seconds.append(max(getattr(seen, took) - getattr(before, took), 1e-9))
    return dict(zip(("round", "round_table"), fitted(counts, seconds).tolist(), strict=True))


def _crowded(
    alone: Sequence[Observed], alone_empty: Observed, crowd: Sequence[Observed], crowd_empty: Observed
) -> float:
    """The share by which rows of dumps and loads become more work where ranks are twice as many as cores."""
    beyond = CROWD / len(os.sched_getaffinity(0)) - 1
    if beyond <= 0:
        return 0.0
    ratios = []
    for name in ("dump_cpu_seconds", "load_cpu_seconds"):
        for one, many in zip(alone, crowd, strict=True):
            rows = getattr(one, name) - getattr(alone_empty, name)
            ratios.append(CROWD * (getattr(many, name) - getattr(crowd_empty, name)) / max(rows, 1e-9))
    return max(0.0, float(np.median(ratios)) - 1) / beyond
