"""A dump of a table over a store is the state at the call, however the rows move meanwhile.

A trainer makes steps that are known beforehand, and so does the oracle, a plain array. A dump must equal the
oracle after some whole step, one of those that the trainer was at during the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis_server
from stores.test_table_over_store import DictStore

import embstore
from embstore.stores import MemoryStore, SsdStore, Store, TieredStore, row_bytes
from embstore.stores.redis.store import RedisStore

KEYS, DIM, BATCH = 4001, 16, 97
BYTES = row_bytes(DIM)


class LockedStore(DictStore):
    """A store of the user's: its methods are called by several threads."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self._lock = threading.RLock()

    def get(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with self._lock:
            return super().get(keys)  # type: ignore[no-any-return]

    def put(self, keys: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> None:
        with self._lock:
            super().put(keys, rows, scores)

    def erase(self, keys: np.ndarray) -> None:
        with self._lock:
            super().erase(keys)


def ssd(path: Path) -> SsdStore:
    return SsdStore(path, BYTES, direct=False)


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda path: MemoryStore(BYTES),
    "python": lambda path: LockedStore(BYTES),
    "ssd": lambda path: ssd(path / "one"),
    "memory over memory": lambda path: TieredStore(MemoryStore(BYTES), MemoryStore(BYTES), 500),
    "memory over ssd": lambda path: TieredStore(MemoryStore(BYTES), ssd(path / "one"), 500),
    "ssd over ssd": lambda path: TieredStore(ssd(path / "one"), ssd(path / "two"), 500),
    "three tiers": lambda path: TieredStore(
        MemoryStore(BYTES), TieredStore(ssd(path / "one"), MemoryStore(BYTES), 700), 300
    ),
}


def step_of(number: int) -> tuple[str, np.ndarray]:
    """What a step does, and to which keys."""
    rng = np.random.default_rng(number)
    kind = ("train", "train", "erase", "train", "assign", "train", "prefetch")[number % 7]
    return kind, rng.choice(KEYS, 7 if kind == "erase" else BATCH, replace=False)


class Oracle:
    """value[key] is what every component of its row is; NaN where there is none."""

    def __init__(self) -> None:
        self.values = np.zeros(KEYS, np.float32)
        self.steps = 0

    def advance(self) -> None:
        kind, keys = step_of(self.steps)
        if kind == "train":
            self.values[keys] += 1
        elif kind == "erase":
            self.values[keys] = np.nan
        elif kind == "assign":
            self.values[keys] = 1000 + self.steps
        self.steps += 1


class Trainer:
    """Makes the steps of the oracle, each by one call of the table, on a thread of its own."""

    def __init__(self, store: Store) -> None:
        self.table = embstore.Table(
            "user",
            dim=DIM,
            initializer=embstore.Constant(0.0),
            optimizer=embstore.SGD(lr=1.0),
            store=store,
            init_capacity=256,
            max_capacity=256,
            bucket_capacity=16,
        )
        for at in range(0, KEYS, 100):
            self._assign(np.arange(at, min(at + 100, KEYS)), 0.0)
        self.steps = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _assign(self, keys: np.ndarray, value: float) -> None:
        self.table.insert_or_assign(keys, np.full((len(keys), DIM), value))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
                self.steps += 1
        except BaseException as error:
            self._error = error

    def _step(self) -> None:
        kind, keys = step_of(self.steps)
        if kind == "train":
            self.table.apply_gradients(keys, np.full((len(keys), DIM), -1.0))
        elif kind == "erase":
            self.table.erase(keys)
        elif kind == "assign":
            self._assign(keys, 1000.0 + self.steps)
        else:
            self.table.prefetch(keys)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error


def require_a_state(oracle: Oracle, keys: np.ndarray, values: np.ndarray, first: int, last: int) -> None:
    """The rows are those after some step between the first and the last; the oracle is left at it."""
    assert len(np.unique(keys)) == len(keys), f"{len(keys) - len(np.unique(keys))} keys come twice"
    assert (values == values[:, :1]).all()
    found = np.full(KEYS, np.nan, np.float32)
    found[keys] = values[:, 0]
    while oracle.steps < first:
        oracle.advance()
    lacking = int((np.isnan(found) & ~np.isnan(oracle.values)).sum())
    while not np.array_equal(found, oracle.values, equal_nan=True):
        assert oracle.steps < last, (
            f"not the state after any step from {first} to {last}; {lacking} keys are missing"
        )
        oracle.advance()


def check_dumps(store: Store, path: Path, rounds: int) -> None:
    trainer, oracle = Trainer(store), Oracle()
    tables = {"model": {"user": trainer.table}}
    with trainer.running():
        for number in range(rounds):
            first = trainer.steps
            rows = trainer.table.rows()
            # Far later than the call, but it cannot be told when within rows() the state was taken.
            require_a_state(oracle, rows.keys, rows.values, first, trainer.steps + 1)

            first = trainer.steps
            blocks = trainer.table.export(block_rows=61)
            last = trainer.steps + 1
            rows = embstore.Rows.concatenate(list(blocks))
            require_a_state(oracle, rows.keys, rows.values, first, last)

            for async_ in (False, True):
                where, first = path / f"{number}-{async_}", trainer.steps
                handle = embstore.dump(where, tables, async_=async_)
                last = trainer.steps + 1
                if handle is not None:
                    while trainer.steps < last + 20 and not handle.done():  # rows move under the writer
                        threading.Event().wait(0.001)
                    handle.wait()
                dumped = embstore.open_dump(where)["model"]["user"]
                require_a_state(oracle, np.array(dumped.keys), np.array(dumped.values), first, last)


@pytest.mark.parametrize("kind", list(STORES))
def test_dumps_beside_training_are_the_state_at_the_call(tmp_path: Path, kind: str) -> None:
    check_dumps(STORES[kind](tmp_path), tmp_path / "dumps", rounds=3)


@pytest.mark.multirank
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
@pytest.mark.parametrize("layout", ["packed", "compatible"])
def test_dumps_beside_training_over_redis_are_the_state_at_the_call(tmp_path: Path, layout: str) -> None:
    server = redis_server.RedisServer(tmp_path / "redis").start()
    try:
        bytes_ = [BYTES] if layout == "packed" else [BYTES // 2, BYTES // 2]
        store = RedisStore(f"redis://{server.where}", table="user", tensor_bytes=bytes_, layout=layout)
        check_dumps(store, tmp_path / "dumps", rounds=2)
    finally:
        server.stop()


class GatedStore(LockedStore):
    """Lists its keys only when it is let."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self.gate = threading.Event()

    def scan_keys(self) -> Iterator[np.ndarray]:
        assert self.gate.wait(60)
        yield from super().scan_keys()


def test_a_background_dump_does_not_wait_for_the_store_at_the_call(tmp_path: Path) -> None:
    store = GatedStore(BYTES)
    trainer, oracle = Trainer(store), Oracle()
    handle = embstore.dump(tmp_path / "dump", {"model": {"user": trainer.table}}, async_=True)
    with trainer.running():
        while trainer.steps < 50:
            threading.Event().wait(0.001)
        assert handle is not None and not handle.done()
        store.gate.set()
        handle.wait()
    dumped = embstore.open_dump(tmp_path / "dump")["model"]["user"]
    require_a_state(oracle, np.array(dumped.keys), np.array(dumped.values), 0, 0)


@pytest.mark.parametrize("kind", ["memory", "memory over ssd"])
def test_increments_of_a_table_over_a_store_lead_to_its_state(tmp_path: Path, kind: str) -> None:
    trainer, oracle = Trainer(STORES[kind](tmp_path)), Oracle()
    tables = {"model": {"user": trainer.table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    server = embstore.Table("user", dim=DIM, optimizer=embstore.SGD(lr=1.0))
    served = {"model": {"user": server}}
    follower = embstore.IncrementLog(tmp_path / "log")
    follower.load(served)
    with trainer.running():
        for _ in range(4):
            first = trainer.steps
            log.append(tables)
            last = trainer.steps + 1
            follower.follow(served)
            rows = server.rows()
            require_a_state(oracle, rows.keys, rows.values, first, last)
