"""What trust.faults interrupts: each workload writes states 1, 2, 3, ... into a folder.

The rows tell the state: in state n there are n + 10 keys, each with the vector [n, n, n]. Rows of two states,
or too few of them, are no state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import embstore
from embstore.formats import sok
from embstore.stores import SsdStore

DIM = 3


def rows_of(state: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.arange(state + 10) * 7919 - 20_000
    return keys, np.full((len(keys), DIM), state, np.float32)


def state_of(keys: np.ndarray, values: np.ndarray) -> int:
    """The state that these rows are; raises AssertionError where they are none."""
    assert len(keys) > 0, "no row is there"
    state = int(values[0, 0])
    expected, vectors = rows_of(state)
    assert sorted(keys.tolist()) == sorted(expected.tolist()), f"the keys are not those of state {state}"
    assert np.array_equal(values, vectors), f"rows of several states: {np.unique(values)}"
    return state


def a_table(state: int = 0) -> embstore.Table:
    table = embstore.Table("user", dim=DIM, optimizer=embstore.Adagrad(), score_strategy="step")
    if state:
        move(table, state)
    return table


def move(table: embstore.Table, state: int) -> None:
    table.insert_or_assign(*rows_of(state))


class Dump:
    """A dump that replaces another."""

    name = "dump"
    states = (1, 2, 3)

    def prepare(self, folder: Path) -> None:
        self.write(folder, 0)

    def write(self, folder: Path, state: int) -> None:
        table = a_table()
        move(table, state)
        embstore.dump(folder / "dump", {"m": {"user": table}}, optim=True, overwrite=True)

    def read(self, folder: Path) -> int:
        dump = embstore.open_dump(folder / "dump")
        dump.verify()
        table = a_table()
        embstore.load(folder / "dump", {"m": {"user": table}}, optim=True)
        rows = table.rows()
        return state_of(rows.keys, rows.values)

    def go_on(self, folder: Path) -> None:
        self.write(folder, 9)
        assert self.read(folder) == 9


class Log:
    """A log that grows and is compacted in the middle."""

    name = "log"
    states = (1, 2, 3, 4)

    def prepare(self, folder: Path) -> None:
        self.table = a_table()
        move(self.table, 0)
        self.log = embstore.IncrementLog.create(folder / "log", {"m": {"user": self.table}})

    def write(self, folder: Path, state: int) -> None:
        if state == 3:
            self.log.compact()
        move(self.table, state)
        self.log.append({"m": {"user": self.table}})

    def read(self, folder: Path) -> int:
        log = embstore.IncrementLog(folder / "log")
        log.verify()
        table = a_table()
        log.load({"m": {"user": table}})
        rows = table.rows()
        return state_of(rows.keys, rows.values)

    def go_on(self, folder: Path) -> None:
        table = a_table()
        log = embstore.IncrementLog(folder / "log")
        log.load({"m": {"user": table}}, writable=True)
        move(table, 9)
        log.append({"m": {"user": table}})
        log.compact()
        assert self.read(folder) == 9


class Ssd:
    """An SSD store whose snapshot is replaced."""

    name = "ssd"
    states = (1, 2, 3)

    def prepare(self, folder: Path) -> None:
        self.store = SsdStore(folder / "ssd", row_bytes=4 * DIM)
        self.write(folder, 0)

    def write(self, folder: Path, state: int) -> None:
        keys, values = rows_of(state)
        self.store.put(keys, values)
        self.store.snapshot("s")

    def read(self, folder: Path) -> int:
        with SsdStore(folder / "ssd", row_bytes=4 * DIM, create=False) as store:
            store.load_snapshot("s")
            keys = np.concatenate([keys for keys, _, _ in store.scan()])
            values = np.concatenate([rows.view(np.float32) for _, rows, _ in store.scan()])
        return state_of(keys, values)

    def go_on(self, folder: Path) -> None:
        with SsdStore(folder / "ssd", row_bytes=4 * DIM) as store:
            store.load_snapshot("s")
            keys, values = rows_of(9)
            store.put(keys, values)
            store.snapshot("s")
        assert self.read(folder) == 9


class Sok:
    """A dump of SparseOperationKit that replaces another."""

    name = "sok"
    states = (1, 2, 3)

    def prepare(self, folder: Path) -> None:
        self.write(folder, 0)

    def write(self, folder: Path, state: int) -> None:
        keys, values = rows_of(state)
        with sok.DumpWriter(folder / "sok") as writer:
            writer.table("user", np.int64).append(keys, values, [])

    def read(self, folder: Path) -> int:
        table = sok.DumpReader(folder / "sok").table("user")
        keys, values, _ = table.block(0, 1000)
        return state_of(keys, values)

    def go_on(self, folder: Path) -> None:
        self.write(folder, 9)
        assert self.read(folder) == 9


WORKLOADS = {workload.name: workload for workload in (Dump(), Log(), Ssd(), Sok())}
