"""What trust.faults and trust.kills interrupt: each workload writes states 1, 2, 3, ... into a folder.

The rows tell the state: in state n there are n + 10 keys, each with the vector [n, n, n]. Rows of two states,
or too few of them, are no state.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import embstore
from embstore.checkpoint.files import sync_folder
from embstore.formats import sok
from embstore.serving import Reader
from embstore.stores import SsdStore
from embstore.stores.urls import tiers

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
        folder.mkdir(parents=True, exist_ok=True)
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

    def go_on(self, folder: Path, state: int) -> None:
        self.write(folder, state)
        assert self.read(folder) == state


class Load(Dump):
    """Dumps that are loaded, one after another. They are written beforehand, as for `Serving`."""

    name = "load"
    only_reads = True

    def prepare(self, folder: Path) -> None:
        self.source = folder.with_name("source")
        for state in (0, *self.states):
            super().write(self.source / str(state), state)
        os.rename(self.source / "0", folder / "0")

    def write(self, folder: Path, state: int) -> None:
        if not (folder / str(state)).exists():
            os.rename(self.source / str(state), folder / str(state))
        sync_folder(folder)
        assert self.read(folder) == state

    def read(self, folder: Path) -> int:
        return super().read(max(folder.iterdir()))

    def go_on(self, folder: Path, state: int) -> None:
        super().write(folder / str(state), state)
        assert self.read(folder) == state


class Log:
    """A log that grows and is compacted in the middle."""

    name = "log"
    states = (1, 2, 3, 4)
    compact_every = 3

    def prepare(self, folder: Path) -> None:
        self.table = a_table()
        move(self.table, 0)
        self.log = embstore.IncrementLog.create(folder / "log", {"m": {"user": self.table}})

    def write(self, folder: Path, state: int) -> None:
        if state % self.compact_every == 0:
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

    def go_on(self, folder: Path, state: int) -> None:
        table = a_table()
        log = embstore.IncrementLog(folder / "log")
        log.load({"m": {"user": table}}, writable=True)
        move(table, state)
        log.append({"m": {"user": table}})
        log.compact()
        assert self.read(folder) == state


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

    def go_on(self, folder: Path, state: int) -> None:
        with SsdStore(folder / "ssd", row_bytes=4 * DIM) as store:
            store.load_snapshot("s")
            keys, values = rows_of(state)
            store.put(keys, values)
            store.snapshot("s")
        assert self.read(folder) == state


class Reopened(Ssd):
    """The same store, opened for every state."""

    name = "reopened"

    def prepare(self, folder: Path) -> None:
        with SsdStore(folder / "ssd", row_bytes=4 * DIM) as self.store:
            super().write(folder, 0)

    def write(self, folder: Path, state: int) -> None:
        with SsdStore(folder / "ssd", row_bytes=4 * DIM) as self.store:
            self.store.load_snapshot("s")
            super().write(folder, state)


class Tier:
    """A table over an SSD store by its URL, flushed again and again."""

    name = "tier"
    states = (1, 2, 3)

    def _open(self, folder: Path) -> embstore.Table:
        options = embstore.TableOptions(
            name="user", dim=DIM, optimizer=embstore.Adagrad(), bucket_capacity=16, max_capacity=16
        )
        return embstore.Table(options, store=tiers(f"ssd://{folder}/tier", upper_rows=1)(options, 0))

    def prepare(self, folder: Path) -> None:
        self.table = self._open(folder)
        self.write(folder, 0)

    def write(self, folder: Path, state: int) -> None:
        move(self.table, state)
        self.table.flush()

    def read(self, folder: Path) -> int:
        # The table may be open in this process, and a store has one writer: its files are read beside it.
        (path,) = (folder / "tier").iterdir()
        with SsdStore(path, row_bytes=8 * DIM, create=False) as store:
            store.load_snapshot("flushed")
            keys = np.concatenate([keys for keys, _, _ in store.scan()])
            values = np.concatenate([rows.view(np.float32)[:, :DIM] for _, rows, _ in store.scan()])
        return state_of(keys, values)

    def go_on(self, folder: Path, state: int) -> None:
        self.table = self._open(folder)
        rows = self.table.rows()
        assert state_of(rows.keys, rows.values) < state
        self.write(folder, state)
        assert self.read(folder) == state


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

    def go_on(self, folder: Path, state: int) -> None:
        self.write(folder, state)
        assert self.read(folder) == state


class Serving:
    """A reader that follows a log. The log is written beforehand, so that all calls are the reader's: those
    that read count as well, and after an error it may show the new state, which is published already."""

    name = "serving"
    states = (1, 2, 3, 4)
    only_reads = True
    reader: Reader | None = None

    def prepare(self, folder: Path) -> None:
        self.source = folder.with_name("source")
        writer = Log()
        writer.prepare(self.source)
        for state in self.states:
            writer.write(self.source, state)
        (folder / "log").mkdir()
        self._publish(folder, "base-000000000000")
        self.reader = Reader(folder / "log", cache=folder / "cache")

    def _publish(self, folder: Path, name: str) -> None:
        target = folder / "log" / name
        if not target.exists():
            os.rename(self.source / "log" / name, target)
        sync_folder(target.parent)

    def write(self, folder: Path, state: int) -> None:
        assert self.reader is not None
        if state == 3:  # compacted before this increment
            self._publish(folder, f"base-{2:012}")
        self._publish(folder, f"increment-{state:012}")
        self.reader.follow()
        assert self.read(folder) == state

    def read(self, folder: Path) -> int:
        reader = self.reader or Reader(folder / "log", cache=folder / "cache")
        keys, _ = rows_of(max(self.states))
        values, found = reader.find("user", keys)
        return state_of(keys[found], values[found])

    def go_on(self, folder: Path, state: int) -> None:
        table = a_table()
        log = embstore.IncrementLog(folder / "log")
        log.load({"m": {"user": table}}, writable=True)
        for at in range(1, 3):
            move(table, max(self.states))
            log.append({"m": {"user": table}})
            if at == 1:
                log.compact()
        assert self.read(folder) == max(self.states)


EVERY = (Dump(), Load(), Log(), Ssd(), Reopened(), Tier(), Sok(), Serving())
WORKLOADS = {workload.name: workload for workload in EVERY}
