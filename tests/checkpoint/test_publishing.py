"""Increments in the background: each is the state of one step, and training never waits for them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
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
from embstore.distributed.ranks import RankError, Ranks, describe


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
    before, begin = embstore.durations.durations()["compact"], time.monotonic()
    with log.append_every(tables, seconds=0.0, compact_after=3) as publisher:
        until(publisher, lambda: len(log.entries()["base"]) > 1, lambda step: disturb(table, step))
    told = embstore.durations.durations()["compact"]
    assert told.count > before.count
    assert 0 < told.seconds - before.seconds < time.monotonic() - begin  # one at a time
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


def test_a_compaction_does_not_outlive_a_program_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    monkeypatch.setattr(publishing._Compaction, "CODE", "import time; time.sleep(100)")
    with pytest.raises(KeyError), log.append_every(tables, seconds=0.0, compact_after=1) as publisher:
        compaction = publisher._compaction
        assert compaction is not None
        until(publisher, lambda: compaction.is_running, lambda step: disturb(table, step))
        process, begin = compaction._process, time.monotonic()
        raise KeyError("a mistake of the program")
    assert process is not None and process.returncode is not None and time.monotonic() < begin + 60


def test_an_interval_in_seconds_has_to_pass_before_an_append(tmp_path: Path) -> None:
    table = make()
    tables = {"model": {"user": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    with log.append_every(tables, seconds=3600.0) as publisher:
        for step in range(30):
            disturb(table, step)
            publisher.step()
            time.sleep(publishing.POLL_SECONDS)
        assert log.last() == 0
    assert log.last() == 1


def test_close_does_not_wait_for_the_next_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "POLL_SECONDS", 100.0)
    tables = {"model": {"user": make()}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    publisher = log.append_every(tables, steps=10**6)
    begin = time.monotonic()
    publisher.close()
    assert time.monotonic() < begin + 60


ENDS_WITHOUT_CLOSE = """
import sys
import embstore
table = embstore.Table("user", dim=5)
log = embstore.IncrementLog.create(sys.argv[1], {"model": {"user": table}})
publisher = log.append_every({"model": {"user": table}}, steps=10**6)
table.find_or_insert([1, 2, 3])
publisher.step()
"""


def test_a_program_that_forgets_to_close_ends_and_its_log_is_as_it_was(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(tmp_path / "log")], check=True, timeout=100)
    log = embstore.IncrementLog(tmp_path / "log")
    assert log.last() == 0
    log.load({"model": {"user": make(optimizer=embstore.SGD())}})


def test_the_thread_ends_when_the_main_thread_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"model": {"user": make()}}
    publisher = embstore.IncrementLog.create(tmp_path / "log", tables).append_every(tables, steps=10**6)
    ended = threading.Thread()
    monkeypatch.setattr(publishing.threading, "main_thread", lambda: ended)
    publisher._thread.join(20)
    assert not publisher._thread.is_alive()
    with pytest.raises(embstore.CheckpointError, match=r"the process ended without close\(\)"):
        publisher.step()


class BesideAnother(Ranks):
    """Rank 0 of two. What the other one reports at a meeting, `answer` makes of what rank 0 does."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def background(self, purpose: str) -> Ranks:
        return self

    def gather(self, value: Any, what: str = "") -> list[Any]:
        if not isinstance(value, publishing._Report):
            return super().gather(value, what)
        return [value, self._answer(value)]


class Stepping(threading.Thread):
    """Steps until something is raised."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(daemon=True)  # it may never end: that is what these tests are about
        self._publisher = publisher
        self.raised: list[BaseException] = []
        self.start()

    def run(self) -> None:
        try:
            while True:
                self._publisher.step()
                time.sleep(0.001)
        except BaseException as error:
            self.raised.append(error)


def published_beside(path: Path, answer: Callable[[Any], Any]) -> Publisher:
    tables = {"model": {"user": make()}}
    log = embstore.IncrementLog.create(path, tables)
    return log.append_every(tables, steps=10**6, group=BesideAnother(answer))


def test_all_ranks_know_the_step_at_which_they_raise_before_one_does(tmp_path: Path) -> None:
    fails, knows = threading.Event(), threading.Event()

    def other(ours: Any) -> Any:
        if ours.raising == "waits":
            knows.wait()
        if fails.is_set():
            fails.clear()
            return replace(ours, failure=describe(OSError("no space left")))
        return replace(ours, failure=None)

    publisher = published_beside(tmp_path / "log", other)
    for _ in range(2):
        knows.clear()
        fails.set()
        stepping = Stepping(publisher)
        stepping.join(0.5)
        assert not stepping.raised
        knows.set()
        stepping.join(60)
        [error] = stepping.raised
        assert isinstance(error, embstore.CheckpointError) and "no space left" in str(error)
    publisher.close()


def test_a_rank_that_waits_for_others_to_raise_hears_that_they_are_gone(tmp_path: Path) -> None:
    gone = threading.Event()

    def other(ours: Any) -> Any:
        if ours.raising == "waits":
            gone.wait()
            raise RankError("rank 1 is gone")
        return replace(ours, failure=describe(OSError("no space left")))

    publisher = published_beside(tmp_path / "log", other)
    stepping = Stepping(publisher)
    stepping.join(0.5)
    assert not stepping.raised
    gone.set()
    stepping.join(60)
    [error] = stepping.raised
    assert isinstance(error, embstore.CheckpointError)


def test_ranks_that_take_a_thousand_steps_between_meetings_soon_agree_on_one_to_raise_at(
    tmp_path: Path,
) -> None:
    meetings: list[int] = []  # the step that the other rank has reached at each
    begins = threading.Event()

    def other(ours: Any) -> Any:
        begins.wait()
        missed = bool(meetings) and publisher._raise_at < meetings[-1] + 1000
        meetings.append(1000 * len(meetings))
        failure = describe(OSError("no space left")) if len(meetings) == 1 else None
        raising = "missed" if ours.raising == "waits" and missed else ours.raising
        return replace(ours, step=meetings[-1], failure=failure, raising=raising)

    publisher = published_beside(tmp_path / "log", other)
    begins.set()
    deadline = time.monotonic() + 60
    while not publisher._is_certain:
        assert len(meetings) < 20 and time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(embstore.CheckpointError, match="no space left"):
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
