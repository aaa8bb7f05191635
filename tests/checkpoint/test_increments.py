"""The increment log: a server that follows has the trainer's rows, and nothing else is accepted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint.tables import files_in, make, require_same

import embstore
from embstore.checkpoint.drafts import drafts_of
from embstore.checkpoint.writing import PartWriter

STRATEGIES = [s.name.lower() for s in embstore.ScoreStrategy]


def step(table: embstore.Table, number: int) -> None:
    """Everything that may happen to a row between two increments."""
    rng = np.random.default_rng(number)
    if table.options.score_strategy == embstore.ScoreStrategy.CUSTOMIZED:
        table.score = max(1, 50 - number)  # falling: a threshold would miss these rows
    keys = rng.integers(0, 900, 60)
    table.find_or_insert(keys)
    table.apply_gradients(keys, rng.standard_normal((60, 5)))
    table.erase(rng.integers(0, 900, 5))
    table.apply_gradients(rng.integers(0, 900, 5), np.ones((5, 5)))  # moves no score
    table.insert_or_assign(rng.integers(900, 950, 3), np.ones((3, 5)), scores=np.ones(3, np.uint64))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_follower_has_the_rows_of_the_trainer(tmp_path: Path, strategy: str) -> None:
    # Small enough to evict, but for the strategy that never does.
    capacity = 1024 if strategy == "no_eviction" else 256
    options = {"score_strategy": strategy, "max_capacity": capacity, "bucket_capacity": 128}
    trainer, server = make(**options), make(**options)
    step(trainer, 0)
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": trainer}})
    follower = embstore.IncrementLog(tmp_path / "log")
    assert follower.load({"model": {"user": server}}) == 0
    require_same(trainer, server)
    for number in range(1, 8):
        for i in range(3):
            step(trainer, 10 * number + i)
        assert log.append({"model": {"user": trainer}}) == number
        if number % 2:
            continue  # the follower sometimes lags behind
        follower.follow({"model": {"user": server}})
        require_same(trainer, server)
    if strategy != "no_eviction":
        assert trainer.stats().evictions > 0
    log.verify()
    assert log.compact() == 7
    late = make(**options)
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": late}})
    require_same(trainer, late)
    step(trainer, 99)
    assert log.append({"model": {"user": trainer}}) == 8
    assert follower.follow({"model": {"user": server}}) == [7, 8]
    require_same(trainer, server)


def test_a_log_that_could_not_be_created_leaves_its_tables_as_they_were(tmp_path: Path) -> None:
    table = make()
    step(table, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        embstore.IncrementLog.create(tmp_path / "file" / "log", {"model": {"user": table}})
    with pytest.raises(RuntimeError, match="should be tracked but are not"):
        table.snapshot_changes()


def test_a_damaged_increment_is_not_compacted(tmp_path: Path) -> None:
    table = make()
    log = embstore.IncrementLog.create(tmp_path, {"model": {"user": table}})
    for number in range(3):
        step(table, number)
        log.append({"model": {"user": table}})
    path = next((tmp_path / "increment-000000000002").rglob("user_values"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = files_in(tmp_path)
    with pytest.raises(embstore.CheckpointError, match=r"increment-000000000002.*user_values"):
        log.compact()
    assert files_in(tmp_path) == before


def test_a_follower_far_behind_starts_from_the_new_base(tmp_path: Path) -> None:
    trainer, server = make(), make()
    log = embstore.IncrementLog.create(tmp_path, {"model": {"user": trainer}})
    follower = embstore.IncrementLog(tmp_path)
    follower.load({"model": {"user": server}})
    for number in range(3):
        step(trainer, number)
        log.append({"model": {"user": trainer}})
    trainer.erase(np.arange(900))
    log.append({"model": {"user": trainer}})
    log.compact()
    follower.follow({"model": {"user": server}})
    require_same(trainer, server)


def test_a_trainer_that_starts_again_goes_on_with_the_log(tmp_path: Path) -> None:
    trainer = make()
    step(trainer, 0)
    log = embstore.IncrementLog.create(tmp_path, {"model": {"user": trainer}})
    step(trainer, 1)
    log.append({"model": {"user": trainer}})
    again, whole = make(seed=77), trainer
    log2 = embstore.IncrementLog(tmp_path)
    assert log2.load({"model": {"user": again}}, writable=True) == 1
    for table in (again, whole):
        step(table, 2)
    log2.append({"model": {"user": again}})
    server = make()
    embstore.IncrementLog(tmp_path).load({"model": {"user": server}})
    require_same(whole, server)
    with pytest.raises(embstore.CheckpointError, match="tables are at number 1 but the log is at: 2"):
        log.append({"model": {"user": trainer}})


def made(path: Path, numbers: int = 4) -> None:
    trainer = make()
    log = embstore.IncrementLog.create(path, {"model": {"user": trainer}})
    for number in range(numbers):
        step(trainer, number)
        log.append({"model": {"user": trainer}})


def entry(path: Path, number: int) -> Path:
    return path / f"increment-{number:012d}"


def test_gaps_duplicates_disorder_and_strangers_are_refused(tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        shutil.copytree(tmp_path / "log", tmp_path / name)
        return tmp_path / name

    def refuses(path: Path, reason: str) -> None:
        server = make()
        with pytest.raises(embstore.CheckpointError, match=reason):
            embstore.IncrementLog(path).load({"model": {"user": server}})
        assert len(server) == 0

    made(tmp_path / "log")
    made(tmp_path / "other")
    gap = broken("gap")
    shutil.rmtree(entry(gap, 2))
    refuses(gap, "increment-000000000002: is missing, the log has a gap")
    twice = broken("twice")
    shutil.rmtree(entry(twice, 3))
    shutil.copytree(entry(twice, 2), entry(twice, 3))
    refuses(twice, "increment-000000000003: should be number 3 of its log but says: 2")
    swapped = broken("swapped")
    os.rename(entry(swapped, 1), swapped / "x")
    os.rename(entry(swapped, 2), entry(swapped, 1))
    os.rename(swapped / "x", entry(swapped, 2))
    refuses(swapped, "should be number 1 of its log but says: 2")
    stranger = broken("stranger")
    shutil.rmtree(entry(stranger, 4))
    shutil.copytree(entry(tmp_path / "other", 4), entry(stranger, 4))
    refuses(stranger, "increment-000000000004: belongs to another log")
    flipped = broken("flipped")
    path = entry(flipped, 4) / "model" / "user_removed"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(embstore.CheckpointError, match="user_removed: its checksum is wrong"):
        embstore.IncrementLog(flipped).load({"model": {"user": make()}})


def test_changes_of_a_failed_increment_are_in_the_next_one(tmp_path: Path) -> None:
    trainer, server = make(), make()
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": trainer}})
    for number in range(3):
        step(trainer, number)
    blocker = tmp_path / "log" / "increment-000000000001"
    blocker.write_text("in the way")
    with pytest.raises(Exception, match="increment-000000000001"):
        log.append({"model": {"user": trainer}})
    blocker.unlink()
    step(trainer, 3)
    assert log.append({"model": {"user": trainer}}) == 1
    assert not list(drafts_of(blocker))
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": server}})
    require_same(trainer, server)


def test_an_increment_holds_what_changed_and_no_more(tmp_path: Path) -> None:
    trainer = make()
    trainer.insert_or_assign(np.arange(1000), np.ones((1000, 5)))
    log = embstore.IncrementLog.create(tmp_path, {"model": {"user": trainer}})
    trainer.find_or_insert([5, 7, 5000])
    trainer.erase([9, 11, 7])
    log.append({"model": {"user": trainer}})
    stored = embstore.open_dump(entry(tmp_path, 1))["model"]["user"]
    assert sorted(stored.keys.tolist()) == [5, 5000]
    removed = np.frombuffer(files_in(entry(tmp_path, 1))["model/user_removed"], np.int64)
    assert removed.tolist() == [7, 9, 11]
    log.append({"model": {"user": trainer}})
    assert embstore.open_dump(entry(tmp_path, 2))["model"]["user"].rows == 0


def test_a_table_that_the_log_does_not_have_is_named(tmp_path: Path) -> None:
    table = embstore.Table("user", dim=3)
    table.find_or_insert([1])
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    table.find_or_insert([2])
    with pytest.raises(ValueError, match="among model/user but one is: other/user"):
        log.append({"other": {"user": table}})
    assert log.append({"model": {"user": table}}) == 1
    served = embstore.Table("user", dim=3)
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": served}})
    assert sorted(served.rows().keys.tolist()) == [1, 2]


def test_the_base_of_a_log_is_written_by_as_many_threads_as_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[int] = []
    write = PartWriter.write

    def slow(self: PartWriter, rows: embstore.Rows) -> int:
        writers.append(threading.get_ident())
        time.sleep(0.02)  # so that the other thread gets a block too
        return write(self, rows)

    monkeypatch.setattr(PartWriter, "write", slow)
    before = embstore.get_num_threads()
    embstore.set_num_threads(2)
    try:
        table = embstore.Table("user", dim=64)
        table.find_or_insert(np.arange(100_000))
        log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    finally:
        embstore.set_num_threads(before)
    assert len(set(writers)) == 2
    again = embstore.Table("user", dim=64)
    log.load({"model": {"user": again}})
    assert len(again) == 100_000
