"""What the ranks of the tests of dumps do. Every function runs on each rank."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from checkpoint.tables import keys_of, make

import embstore
from embstore.checkpoint.writing import PartWriter

OPTIONS: dict[str, dict[str, Any]] = {
    "user": {},
    "item": {"dim": 7, "optimizer": embstore.RowwiseAdagrad(), "score_strategy": "timestamp"},
    "none": {"dim": 2, "optimizer": embstore.SGD(), "score_strategy": "lfu", "dtype": "bfloat16"},
}
OWNERSHIP = {"model.a": {"user": embstore.Ownership.ROUNDROBIN}, "model.b": {}}
OWNERSHIP["model.b"] = {
    "item": embstore.Ownership.HASH_ROUNDROBIN,
    "none": embstore.Ownership.ROUNDROBIN,
}


def collections() -> dict[str, dict[str, embstore.Table]]:
    tables = {name: make(name, **options) for name, options in OPTIONS.items()}
    return {"model.a": {"user": tables["user"]}, "model.b": {n: tables[n] for n in ("item", "none")}}


def train(tables: dict[str, dict[str, embstore.Table]], first: int, steps: int) -> list[float]:
    """The same global batches whatever the number of ranks; returns a loss for each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, first + steps):
        loss = 0.0
        for collection, named in tables.items():
            for name, table in named.items():
                keys = keys_of(step % 4, 0 if name == "none" and step < 2 else 211)
                mine = embstore.owner(keys, world, OWNERSHIP[collection][name]) == rank
                gradients = np.random.default_rng(step).standard_normal((len(keys), table.dim))
                vectors = table.find_or_insert(keys[mine])
                table.apply_gradients(keys[mine], gradients[mine])
                loss += float(np.abs(vectors.astype(np.float64)).sum())
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, loss)
        losses.append(sum(parts))
    return losses


def rows_of(tables: dict[str, dict[str, embstore.Table]]) -> dict[str, Any]:
    return {
        name: {"rows": table.rows(), "step": table.optimizer_step}
        for named in tables.values()
        for name, table in named.items()
    }


def train_and_dump(path: str, layout: str, async_: bool = False, rest: int = 3) -> dict[str, Any]:
    """Dumps after five steps; the losses are those of the steps after the dump."""
    tables = collections()
    train(tables, 0, 5)
    stored = rows_of(tables)
    handle = embstore.dump(path, tables, optim=True, ownership=OWNERSHIP, layout=layout, async_=async_)
    losses = train(tables, 5, rest)
    if handle is not None:
        handle.wait()
    return {"rows": stored, "losses": losses, "after": rows_of(tables)}


def load_and_train(path: str, rest: int = 3) -> dict[str, Any]:
    tables = collections()
    embstore.load(path, tables, optim=True, ownership=OWNERSHIP)
    stored = rows_of(tables)
    return {"rows": stored, "losses": train(tables, 5, rest), "after": rows_of(tables)}


def fail_on_rank(path: str, failing: int) -> None:
    """One rank cannot write."""
    tables = collections()
    train(tables, 0, 2)
    if dist.get_rank() == failing:

        def broken(self: PartWriter, rows: Any) -> int:
            raise OSError(5, "the disk of this rank is broken")

        original, PartWriter.write = PartWriter.write, broken  # type: ignore[method-assign]
        try:
            embstore.dump(path, tables, ownership=OWNERSHIP)
        finally:
            PartWriter.write = original  # type: ignore[method-assign]
    else:
        embstore.dump(path, tables, ownership=OWNERSHIP)


def dump_plain(path: str) -> None:
    tables = collections()
    train(tables, 0, 2)
    embstore.dump(path, tables, ownership=OWNERSHIP)


def load_plain(path: str) -> None:
    tables = collections()
    try:
        embstore.load(path, tables, ownership=OWNERSHIP)
    finally:
        assert all(len(table) == 0 for named in tables.values() for table in named.values())


def different_tables(path: str) -> None:
    tables = collections()
    if dist.get_rank() == 1:
        del tables["model.b"]["none"]
    embstore.dump(path, tables, ownership=OWNERSHIP)


def join_and_die(rank: str, folder: str) -> None:
    """A process of its own; rank 1 is gone in the middle of the dump."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    tables = collections()
    train(tables, 0, 2)
    if rank == "1":
        PartWriter.write = lambda self, rows: os._exit(9)  # type: ignore[method-assign, assignment]
    try:
        embstore.dump(f"{folder}/d", tables, ownership=OWNERSHIP)
    finally:
        dist.destroy_process_group()


def follow_log(path: str, steps: int) -> dict[str, Any]:
    """A trainer on all ranks; returns its rows."""
    tables = collections()
    log = embstore.IncrementLog.create(path, tables, ownership=OWNERSHIP)
    for step in range(steps):
        train(tables, step, 1)
        log.append(tables)
    return rows_of(tables)


def load_log(path: str) -> dict[str, Any]:
    tables = collections()
    embstore.IncrementLog(Path(path)).load(tables)
    return rows_of(tables)


def save_with_torch(path: str) -> dict[str, Any]:
    """torch.distributed.checkpoint with tables beside a dense module."""
    import torch
    import torch.distributed.checkpoint as dcp

    from embstore.checkpoint.torch_checkpoint import TablesState

    tables, dense = collections(), torch.nn.Linear(3, 2)
    train(tables, 0, 5)
    dcp.save({"model": dense, "tables": TablesState(tables, ownership=OWNERSHIP)}, checkpoint_id=path)
    return {"rows": rows_of(tables), "losses": train(tables, 5, 3), "dense": dense.weight.tolist()}


def load_with_torch(path: str) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    from embstore.checkpoint.torch_checkpoint import TablesState

    tables, dense = collections(), torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(dense.weight)
    state = TablesState(tables, ownership=OWNERSHIP, saved_in=path)
    dcp.load({"model": dense, "tables": state}, checkpoint_id=path)
    return {"rows": rows_of(tables), "losses": train(tables, 5, 3), "dense": dense.weight.tolist()}


def count_and_dump(path: str) -> list[int]:
    """Keys that are met once, which is not enough for a row; returns the counters of this rank."""
    table = make(admission_threshold=2)
    keys = keys_of(0)
    table.find_or_insert(keys[embstore.owner(keys, dist.get_world_size()) == dist.get_rank()])
    embstore.dump(path, {"model": {"user": table}})
    return _counters(table)


def load_counters(path: str, ownership: embstore.Ownership = embstore.Ownership.ROUNDROBIN) -> dict[str, Any]:
    table = make(admission_threshold=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        embstore.load(path, {"model": {"user": table}}, ownership=ownership)
    told = sum("admission counters" in str(warning.message) for warning in caught)
    return {"counters": _counters(table), "warnings": told}


def _counters(table: embstore.Table) -> list[int]:
    counters = table.admission_counters()
    assert counters is not None
    return counters.tolist()


def fail_in_a_log(path: str, call: str, failing: int) -> tuple[str, str]:
    """One rank cannot do its part of `call`; afterwards all of them can."""
    tables = collections()
    train(tables, 0, 2)
    log = None if call == "create" else embstore.IncrementLog.create(path, tables, ownership=OWNERSHIP)
    train(tables, 2, 1)
    broken = {"create": "track_changes", "append": "snapshot_changes", "load": "exchange"}[call]

    def fail(*arguments: Any) -> None:
        raise OSError(5, "the store of this rank is gone")

    def make() -> None:
        if log is None:
            embstore.IncrementLog.create(path, tables, ownership=OWNERSHIP)
        elif call == "append":
            log.append(tables)
        else:
            log.load(tables, writable=True)

    if dist.get_rank() == failing:
        setattr(tables["model.b"]["item"], broken, fail)
    try:
        make()
        answer = ("nothing", "")
    except Exception as error:
        answer = (type(error).__name__, str(error))
    if dist.get_rank() == failing:
        delattr(tables["model.b"]["item"], broken)
    make()
    return answer


def _publishing(path: str) -> tuple[embstore.Table, dict[str, Any], embstore.IncrementLog, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    table = make(optimizer=embstore.SGD(), score_strategy="step")
    mine = np.arange(600)[np.arange(600) % world == rank]

    def train(step: int) -> None:
        table.insert_or_assign(mine, np.full((len(mine), 5), float(step), np.float32))

    train(0)
    tables = {"model": {"user": table}}
    return table, tables, embstore.IncrementLog.create(path, tables), train


def publish(path: str) -> int:
    """Trains while increments are written. A step ends on all ranks only when it did on each."""
    _, tables, log, train = _publishing(path)
    with log.append_every(tables, seconds=0.0, compact_after=3) as publisher:
        for step in range(1, 10**6):
            train(step)
            if (step // 5) % dist.get_world_size() == dist.get_rank():
                time.sleep(0.002)
            publisher.step()
            enough = torch.tensor([int(log.applied >= 4)])
            dist.all_reduce(enough, op=dist.ReduceOp.MIN)
            if enough.item():
                break
    return log.applied


def publish_and_fail(path: str, how: str) -> tuple[str, int]:
    """Something goes wrong on rank 1; returns what is raised, and at which step."""
    _, tables, log, train = _publishing(path)
    step, write = 0, PartWriter.write
    if how == "the disk" and dist.get_rank() == 1:

        def broken(self: PartWriter, rows: embstore.Rows) -> int:
            raise OSError(28, "no space left on device")

        PartWriter.write = broken  # type: ignore[method-assign]
    try:
        with log.append_every(tables, seconds=0.0) as publisher:
            for step in range(1, 10**6):
                train(step)
                if how == "the program" and dist.get_rank() == 1 and step == 20:
                    raise ValueError("a mistake of rank 1")
                publisher.step()
                time.sleep(0.002)
                if how == "the disk":
                    dist.barrier()
    except Exception as error:
        return str(error), step
    finally:
        PartWriter.write = write  # type: ignore[method-assign]
    return "nothing", step
