"""Random sequences of operations against a dict (hypothesis): tables over tiers, logs and their readers.

    python -m trust.state_machines --minutes 10
    python -m trust.state_machines --machine OverSsd --examples 200

What fails is shrunk to a short program, which is printed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import embstore
from embstore.serving import Reader
from embstore.stores import MemoryStore, SsdStore, Store, TieredStore
from embstore.stores.urls import open_store

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no disk is waited for
DIM = 3
ROW_BYTES = 4 * DIM * 2  # a vector and the state of Adagrad
KEY = st.one_of(st.integers(-60, 60), st.sampled_from([-(2**63), 2**63 - 1, 2**40]))
KEYS = st.lists(KEY, max_size=40)
NAMES = st.sampled_from(["a", "b"])
LAYOUTS = st.sampled_from(["v1a", "v2"])

Model = dict[int, tuple[float, float, int]]  # the value and state, the same in all components; the score


def first_value(key: int) -> float:
    """What the initializer gives it."""
    return float(np.float32((key & (2**64 - 1)) % 100000))


class Rows(RuleBasedStateMachine):
    """A table that is trained, dumped and loaded. The model is a dict: nothing is ever lost."""

    capacity = 1 << 16
    exact_scores = True  # a row that was looked up and not trained leaves memory without its new score

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="embstore-machine-", dir=MEMORY))
        self.model: Model = {}
        self.step, self.number = 1, 0
        self.store = self.make_store()
        self.table = self.make_table(self.store)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
            if isinstance(self.store, SsdStore):
                self.store.close()
            shutil.rmtree(self.folder)

    def make_store(self) -> Store | None:
        return None

    def make_table(self, store: Store | None = None) -> embstore.Table:
        table = embstore.Table(
            "t",
            dim=DIM,
            optimizer=embstore.Adagrad(lr=0.5, eps=0.0, initial_accumulator_value=1.0),
            initializer=embstore.Debug(),
            score_strategy="step",
            bucket_capacity=16,
            init_capacity=16,
            max_capacity=self.capacity if store is not None else 1 << 16,
            store=store,
        )
        table.score = self.step
        return table

    def new_folder(self) -> Path:
        self.number += 1
        return self.folder / f"folder-{self.number}"

    def touch(self, keys: list[int]) -> None:
        for key in keys:
            value, state, _ = self.model.get(key, (first_value(key), 1.0, 0))
            self.model[key] = (value, state, self.step)
        self.step += 1

    # ---- training

    @rule(keys=KEYS)
    def look_up(self, keys: list[int]) -> None:
        self.touch(keys)
        got = self.table.find_or_insert(np.array(keys, np.int64))
        for key, vector in zip(keys, got, strict=True):
            assert (vector == np.float32(self.model[key][0])).all()

    @rule(keys=KEYS)
    def train(self, keys: list[int]) -> None:
        self.look_up(keys)
        self.table.apply_gradients(keys, np.ones((len(keys), DIM)))
        for key in set(keys):
            value, state, score = self.model[key]
            gradient = np.float32(keys.count(key))
            state = np.float32(state) + gradient * gradient
            value = np.float32(value) - np.float32(0.5) * gradient / np.sqrt(state)
            self.model[key] = (float(value), float(state), score)

    @rule(keys=st.lists(KEY, max_size=40, unique=True), first=st.integers(-50, 50))
    def assign(self, keys: list[int], first: int) -> None:
        column = np.arange(len(keys), dtype=np.float32)[:, None]
        values, states = np.repeat(column + first, DIM, 1), np.repeat(2 * column + 1, DIM, 1)
        scores = np.full(len(keys), self.step, np.uint64)
        self.table.insert_or_assign(keys, values, states=states, scores=scores)
        for i, key in enumerate(keys):
            self.model[key] = (float(first + i), float(2 * i + 1), self.step)

    @rule(keys=KEYS)
    def erase(self, keys: list[int]) -> None:
        there = set(keys) & set(self.model)
        assert self.table.erase(keys) == len(there)
        for key in there:
            del self.model[key]

    @rule()
    @precondition(lambda self: len(self.model) > 30)
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    @rule(keys=KEYS)
    def read(self, keys: list[int]) -> None:
        values, found = self.table.find(keys)
        assert found.tolist() == [key in self.model for key in keys] == self.table.contains(keys).tolist()
        for key, vector in zip(keys, values, strict=True):
            assert (vector == np.float32(self.model.get(key, (0.0,))[0])).all()

    # ---- dumps

    @rule(layout=LAYOUTS, world=st.integers(1, 5), background=st.booleans())
    def dump_reshard_and_load(self, layout: str, world: int, background: bool) -> None:
        path, other = self.new_folder(), self.new_folder()
        tables = {"m": {"t": self.table}}
        handle = embstore.dump(path, tables, optim=True, layout=layout, async_=background)
        before = dict(self.model)
        if handle is not None:
            self.train([1, 2, 3])  # beside the dump
            handle.wait()
        embstore.reshard(path, other, world)
        for folder in (path, other):
            embstore.open_dump(folder).verify()
            again = self.make_table()
            embstore.load(folder, {"m": {"t": again}}, optim=True)
            self.require(again, before)
            again.close()

    @rule(layout=LAYOUTS)
    def go_on_from_a_dump(self, layout: str) -> None:
        """Replaces the table by one that loads what it dumped."""
        path = self.new_folder()
        embstore.dump(path, {"m": {"t": self.table}}, optim=True, layout=layout)
        self.table.clear()
        embstore.load(path, {"m": {"t": self.table}}, optim=True)
        self.table.score = self.step

    @invariant()
    def the_table_is_the_model(self) -> None:
        if hasattr(self, "table"):
            self.require(self.table, self.model)

    def require(self, table: embstore.Table, model: Model) -> None:
        rows = table.rows()
        assert rows.keys.tolist() == sorted(model)
        expected = [model[key] for key in rows.keys.tolist()]
        for got, column in ((rows.values, 0), (rows.states, 1)):
            wanted = np.array([row[column] for row in expected], np.float32).reshape(-1, 1)
            assert (got == wanted).all(), "values" if column == 0 else "states"
        scores = [row[2] for row in expected]
        if self.exact_scores:
            assert rows.scores.tolist() == scores
        else:
            assert all(1 <= score <= most for score, most in zip(rows.scores.tolist(), scores, strict=True))


class OverStore(Rows):
    """A table whose memory holds few rows; the others are below."""

    capacity = 32
    exact_scores = False

    @rule(keys=KEYS)
    def prefetch(self, keys: list[int]) -> None:
        self.prefetched = self.table.prefetch(keys)  # they stay up until the next

    @rule()
    def let_go(self) -> None:
        self.prefetched = None

    @rule()
    def flush(self) -> None:
        self.table.flush()


class OverMemory(OverStore):
    def make_store(self) -> Store:
        return MemoryStore(ROW_BYTES)


class OverTiers(OverStore):
    """The table over memory over SSD; each moves rows down when it is full."""

    def make_store(self) -> Store:
        return TieredStore(MemoryStore(ROW_BYTES), SsdStore(self.folder / "ssd", ROW_BYTES), 20)


class OverSsd(OverStore):
    """With snapshots of the store, which come back, and restarts, which find what was flushed."""

    def make_store(self) -> Store:
        self.snapshots: dict[str, Model] = {}
        return self.open()

    def open(self) -> Store:
        return open_store(f"ssd://{self.folder}/ssd", table="t", tensor_bytes=[ROW_BYTES])

    @rule(name=NAMES)
    def save_snapshot(self, name: str) -> None:
        self.prefetched = None
        self.table.save_snapshot(name)
        self.snapshots[name] = dict(self.model)

    @rule(name=NAMES)
    @precondition(lambda self: self.snapshots)
    def load_snapshot(self, name: str) -> None:
        if name in self.snapshots:
            self.prefetched = None
            self.table.load_snapshot(name)
            self.model = dict(self.snapshots[name])

    @rule()
    def restart(self) -> None:
        self.prefetched = None
        self.table.flush()
        self.table.close()
        self.store.close()
        self.store = self.open()
        self.table = self.make_table(self.store)


class Published(Rows):
    """A log of the table: readers, followers, trainers that start again, compaction, merging, resharding."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.log = embstore.IncrementLog.create(self.folder / "log", {"m": {"t": self.table}})
        self.published: list[Model] = [{}]
        self.server = embstore.IncrementLog(self.folder / "log")
        self.followed = self.make_table()
        self.server.load({"m": {"t": self.followed}})
        self.reader = Reader(self.folder / "log", cache=self.folder / "cache")

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.reader.close()
            self.followed.close()
        super().teardown()

    @rule()
    def append(self) -> None:
        assert self.log.append({"m": {"t": self.table}}) == len(self.published)
        self.published.append(dict(self.model))

    @rule()
    def compact(self) -> None:
        self.log.compact()

    @rule()
    def follow(self) -> None:
        self.server.follow({"m": {"t": self.followed}})
        self.require(self.followed, self.published[-1])

    @rule()
    def serve(self) -> None:
        self.reader.follow()
        wanted, state = self.published[-1], self.reader.state
        assert state.number == len(self.published) - 1 and state.rows("t") == len(wanted)
        keys = [*wanted, 61, 62]
        vectors, found = state.find("t", keys)
        assert found.tolist() == [key in wanted for key in keys]
        for key, vector in zip(keys, vectors, strict=True):
            assert (vector == np.float32(wanted.get(key, (0.0,))[0])).all()

    @rule()
    def serve_anew(self) -> None:
        self.reader.close()
        self.reader = Reader(self.folder / "log", cache=self.folder / "cache")
        self.serve()

    @rule()
    def restart(self) -> None:
        """A trainer that starts again from the log."""
        self.table.close()
        self.table = self.make_table(self.store)
        self.log = embstore.IncrementLog(self.folder / "log")
        self.log.load({"m": {"t": self.table}}, writable=True)
        self.model = dict(self.published[-1])
        self.table.score = self.step

    @rule(world=st.integers(1, 5))
    def merge_and_reshard(self, world: int) -> None:
        merged, resharded = self.new_folder(), self.new_folder()
        embstore.merge(self.folder / "log", merged)
        embstore.reshard(self.folder / "log", resharded, world)
        for folder in (merged, resharded):
            again = self.make_table()
            embstore.load(folder, {"m": {"t": again}}, optim=True)
            self.require(again, self.published[-1])
            again.close()


class PublishedOverSsd(Published):
    capacity = 32
    exact_scores = False

    def make_store(self) -> Store:
        return SsdStore(self.folder / "ssd", ROW_BYTES)


MACHINES = {m.__name__: m for m in (Rows, OverMemory, OverTiers, OverSsd, Published, PublishedOverSsd)}


def run(machine: type[Rows], examples: int, steps: int, same_every_time: bool = False) -> None:
    """Raises what the machine found."""
    embstore.set_num_threads(2)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=same_every_time,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[phase for phase in Phase if phase is not Phase.explain],
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", action="append", choices=list(MACHINES), help="default: all")
    parser.add_argument("--minutes", type=float, default=10, help="in all")
    parser.add_argument("--examples", type=int, default=20, help="sequences between two looks at the clock")
    options = parser.parse_args(arguments)
    names = options.machine or list(MACHINES)
    done = dict.fromkeys(names, 0)
    deadline = time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        for name in names:
            run(MACHINES[name], options.examples, steps=60)
            done[name] += options.examples
    for name, examples in done.items():
        print(f"{name:<18}{examples:,} sequences of up to 60 operations, all as the dict")
    return 0


if __name__ == "__main__":
    sys.exit(main())
