"""Increments in the background: each is the state of one step, and training never waits for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import rank_jobs as jobs
from checkpoint.tables import make, require_same
from faces.dynamicemb import ranks

import embstore
from embstore.checkpoint import publishing
from embstore.checkpoint.publishing import Publisher
from embstore.checkpoint.writing import PartWriter


def disturb(table: embstore.Table, step: int, erase: bool = True) -> None:
    """Every row of the range gets the number of the step; some go."""
    rng = np.random.default_rng(step)
    table.insert_or_assign(np.arange(-300, 301), np.full((601, 5), float(step), np.float32))
    table.find_or_insert(rng.integers(1000, 5000, 211))
    if erase:
        table.erase([step % 300])
        table.erase(rng.integers(1000, 5000, 97))


def until(publisher: Publisher, condition: Callable[[], bool], train: Callable[[int], None]) -> int:
    """Trains until it is so; returns the number of steps."""
    deadline = time.monotonic() + 60
    steps = 0
    while not condition():
        assert time.monotonic() < deadline
        steps += 1
        train(steps)
        publisher.step()
    return steps


@pytest.mark.parametrize("interval", [{"steps": 7}, {"seconds": 0.01}, {"steps": 10**9, "seconds": 0.0}])
def test_increments_are_whole_steps_and_the_last_is_the_table(
    tmp_path: Path, interval: dict[str, Any]
) -> None:
    table = make(max_capacity=2048, init_capacity=2048)
    tables = {"model": {"user": table}}
    disturb(table, 0)
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    states: dict[int, embstore.Rows] = {}
    clock = iter(range(1, 10**6))

    def train(_: int) -> None:
        step = next(clock)
        disturb(table, step)
        states[step] = table.rows()

    with log.append_every(tables, **interval) as publisher:
        until(publisher, lambda: log.applied >= 4, train)
    assert log.applied >= 5 and table.stats().evictions > 0
    server = make(max_capacity=8192, init_capacity=8192)
    follower = embstore.IncrementLog(tmp_path / "log")
    entries = follower.entries()["increment"]
    for number in sorted(entries):  # one after the other
        partial = embstore.IncrementLog(tmp_path / "log")
        partial.entries = lambda number=number: {  # type: ignore[method-assign, misc]
            "base": {0: tmp_path / "log" / "base-000000000000"},
            "increment": {n: path for n, path in entries.items() if n <= number},
        }
        partial.load({"model": {"user": server}})
        step = int(server.find([-300])[0][0, 0])
        require_same(states[step], server)
    require_same(table, server)


def test_nothing_is_appended_by_hand_meanwhile_and_arguments_are_checked(tmp_path: Path) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    for wrong in ({}, {"steps": 0}, {"seconds": -1.0}, {"steps": 1, "compact_after": 0}):
        with pytest.raises(ValueError):
            log.append_every(tables, **wrong)
    with log.append_every(tables, steps=1) as publisher:
        for call in (log.append, log.load, lambda of: log.append_every(of, steps=1)):
            with pytest.raises(RuntimeError, match="while append_every publishes"):
                call(tables)
    with pytest.raises(RuntimeError, match="after close"):
        publisher.step()
    assert log.append(tables) == 2


def test_the_log_is_compacted_by_another_process(tmp_path: Path) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = embstore.serving.Reader(tmp_path / "log", cache=tmp_path / "cache")
    with log.append_every(tables, seconds=0.0, compact_after=3) as publisher:
        until(publisher, lambda: len(log.entries()["base"]) > 1, lambda step: disturb(table, step))
    assert embstore.durations.durations()["compact"].count >= 1
    reader.follow()
    keys = np.arange(-400, 5000)
    np.testing.assert_array_equal(reader.find("user", keys)[0], table.find(keys)[0])


def broken(self: PartWriter, rows: embstore.Rows) -> int:
    raise OSError(28, "no space left on device")


def test_a_failure_comes_out_of_step_once_and_its_changes_are_in_the_next_increment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    tables = {"model": {"user": table}}
    disturb(table, 0)
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    disturb(table, 1)
    with log.append_every(tables, seconds=0.0) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(PartWriter, "write", broken)
            with pytest.raises(embstore.CheckpointError, match="in the background failed: OSError.*no space"):
                until(publisher, lambda: False, lambda step: table.find_or_insert([9000 + step]))
            assert log.last() == 0
        deadline = time.monotonic() + 60
        while log.applied < 1 or publisher._pending or publisher._error:  # a second attempt may have failed
            assert time.monotonic() < deadline
            table.erase([7])
            with contextlib.suppress(embstore.CheckpointError):
                publisher.step()
    server = make()
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": server}})
    require_same(table, server)


def test_a_failure_that_step_has_not_told_comes_out_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    publisher = log.append_every(tables, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "write", broken)
        disturb(table, 1)
        deadline = time.monotonic() + 60
        while publisher._agreed < 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        publisher.step()
        while publisher._error is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(embstore.CheckpointError, match="no space left"):
            publisher.close()
    assert log.append(tables) == 1
    server = make()
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": server}})
    require_same(table, server)


def test_an_exception_in_the_block_ends_the_thread_and_keeps_the_changes(tmp_path: Path) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    with pytest.raises(KeyError), log.append_every(tables, steps=10**6) as publisher:
        disturb(table, 1)
        publisher.step()
        raise KeyError("a mistake of the program")
    assert not publisher._thread.is_alive() and log.last() == 0
    assert log.append(tables) == 1
    server = make()
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": server}})
    require_same(table, server)


def test_a_failing_compaction_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    monkeypatch.setattr(publishing._Compaction, "CODE", "raise SystemExit('the disk is gone')")
    publisher = log.append_every(tables, seconds=0.0, compact_after=1)
    told = "compaction ended with 1: the disk is gone"
    with pytest.raises(embstore.CheckpointError, match=told):
        until(publisher, lambda: False, lambda step: disturb(table, step))
    monkeypatch.setattr(publishing._Compaction, "CODE", "")
    with contextlib.suppress(embstore.CheckpointError):  # one more may have failed since
        publisher.close()


@pytest.mark.multirank
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_publish_the_same_step(tmp_path: Path, world: int) -> None:
    """Each row carries the number of its step, on ranks that take turns to be slow."""
    answers = ranks.run(world, jobs.publish, str(tmp_path / "log"))
    assert all(answer >= 4 for answer in answers) and len(set(answers)) == 1
    log = embstore.IncrementLog(tmp_path / "log")
    for path in [*log.entries()["base"].values(), *log.entries()["increment"].values()]:
        dump = embstore.open_dump(path)
        dump.verify()
        assert len(np.unique(dump["model"]["user"].values)) == 1, path
        assert len(dump["model"]["user"].keys) == 600


@pytest.mark.multirank
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["the disk", "the program"])
def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path, how: str) -> None:
    answers = ranks.run(2, jobs.publish_and_fail, str(tmp_path / "log"), how)
    expected = "no space left" if how == "the disk" else "a mistake of rank 1"
    assert all(expected in message for message, _ in answers), answers
    if how == "the disk":
        assert len({step for _, step in answers}) == 1, answers
