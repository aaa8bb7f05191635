"""Who reads an increment log has whole tables, whatever trainer, compaction and damage do meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import make, require_same
from checkpoint.test_increments import entry, step

import embstore


def base(path: Path, number: int) -> Path:
    return path / f"base-{number:012d}"


def flip(path: Path) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    return whole


def trained(path: Path, numbers: int = 3) -> tuple[embstore.Table, embstore.IncrementLog]:
    trainer = make()
    step(trainer, 0)
    log = embstore.IncrementLog.create(path, {"model": {"user": trainer}})
    for number in range(1, numbers + 1):
        step(trainer, number)
        log.append({"model": {"user": trainer}})
    return trainer, log


def test_a_damaged_log_is_refused_while_a_trainer_goes_on_appending(tmp_path: Path) -> None:
    trainer, log = trained(tmp_path, 2)
    flip(tmp_path / "increment-000000000001" / "model" / "user_values")
    tries = 0

    class Reading(embstore.IncrementLog):
        def entries(self) -> Any:  # something has come whenever it looks
            nonlocal tries
            tries += 1
            if tries < 50:
                step(trainer, 2 + tries)
                log.append({"model": {"user": trainer}})
            return super().entries()

    for read in (
        lambda: Reading(tmp_path).verify(),
        lambda: Reading(tmp_path).load({"model": {"user": make()}}),
    ):
        tries = 0
        with pytest.raises(embstore.CheckpointError, match="user_values: .*checksum"):
            read()
        assert tries < 50


@pytest.mark.parametrize("damaged", ["base-000000000000", "increment-000000000002"])
def test_a_load_that_fails_leaves_the_table_and_follow_goes_on_from_there(
    tmp_path: Path, damaged: str
) -> None:
    trainer, log = trained(tmp_path, 1)
    server, follower = make(), embstore.IncrementLog(tmp_path)
    follower.load({"model": {"user": server}})
    before = server.rows()
    step(trainer, 2)
    log.append({"model": {"user": trainer}})
    path = tmp_path / damaged / "model" / "user_values"
    whole = flip(path)
    with pytest.raises(embstore.CheckpointError, match="user_values: its checksum is wrong"):
        follower.load({"model": {"user": server}})
    require_same(before, server)
    assert follower.applied == 1
    if "increment" in damaged:
        with pytest.raises(embstore.CheckpointError, match="user_values: its checksum is wrong"):
            follower.follow({"model": {"user": server}})
        require_same(before, server)
        path.write_bytes(whole)
    assert follower.follow({"model": {"user": server}}) == [2]
    require_same(trainer, server)


def test_a_load_that_fails_in_the_second_table_leaves_the_first(tmp_path: Path) -> None:
    user, item = make(), make("item")
    tables = {"model": {"user": user, "item": item}}
    step(user, 0)
    step(item, 1)
    embstore.IncrementLog.create(tmp_path, tables)
    served = {"model": {"user": make(), "item": make("item", dim=6)}}
    served["model"]["user"].insert_or_assign([5], np.ones((1, 5)))
    with pytest.raises(embstore.CheckpointError, match="dim of table 'item' is 6"):
        embstore.IncrementLog(tmp_path).load(served)
    assert served["model"]["user"].rows().keys.tolist() == [5]


def test_a_table_over_a_store_gets_the_rows_of_the_log_and_no_others(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path)
    store = embstore.stores.MemoryStore(4 * 15)
    server = make(store=store, init_capacity=128, max_capacity=128)
    server.insert_or_assign(np.arange(5000, 5100), np.ones((100, 5)))
    embstore.IncrementLog(tmp_path).load({"model": {"user": server}})
    require_same(trainer, server)


def test_a_server_without_optimizer_states_and_of_another_dtype_follows(tmp_path: Path) -> None:
    trainer, log = trained(tmp_path)
    server, oracle = (make(dtype="bfloat16", optimizer=embstore.SGD()) for _ in range(2))
    follower = embstore.IncrementLog(tmp_path)
    with pytest.raises(embstore.CheckpointError, match="optimizer of table 'user' is 'sgd'"):
        follower.load({"model": {"user": server}})
    follower.load({"model": {"user": server}}, optim=False)
    for number in (4, 5):
        step(trainer, number)
        log.append({"model": {"user": trainer}})
    follower.follow({"model": {"user": server}})
    rows = trainer.rows()
    oracle.insert_or_assign(rows.keys, rows.values, scores=rows.scores)
    require_same(oracle, server)
    with pytest.raises(ValueError, match="optim should be True with writable"):
        follower.load({"model": {"user": server}}, optim=False, writable=True)


def test_what_is_not_a_log_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(embstore.CheckpointError, match="is not an increment log"):
        embstore.IncrementLog(tmp_path).load({"model": {"user": make()}})
    trained(tmp_path)
    shutil.rmtree(base(tmp_path, 0))
    with pytest.raises(embstore.CheckpointError, match="its base is missing"):
        embstore.IncrementLog(tmp_path).load({"model": {"user": make()}})


def test_an_entry_that_is_read_stays_until_the_compaction_after_the_next(tmp_path: Path) -> None:
    trainer, log = trained(tmp_path)
    reader = embstore.IncrementLog(tmp_path).chain()
    assert log.compact() == 3
    for dump in reader:
        dump.verify()
    kept = [p.name for p in (base(tmp_path, 0), base(tmp_path, 3), *(entry(tmp_path, n) for n in (1, 2, 3)))]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
    for number in (4, 5):
        step(trainer, number)
        log.append({"model": {"user": trainer}})
    log.compact()
    kept = [p.name for p in (base(tmp_path, 3), base(tmp_path, 5), entry(tmp_path, 4), entry(tmp_path, 5))]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_a_follower_goes_on_with_increments_that_a_new_base_replaces(tmp_path: Path) -> None:
    trainer, log = trained(tmp_path, 1)
    server, follower = make(), embstore.IncrementLog(tmp_path)
    follower.load({"model": {"user": server}})
    for number in (2, 3):
        step(trainer, number)
        log.append({"model": {"user": trainer}})
    log.compact()
    shutil.rmtree(base(tmp_path, 3))  # not needed by this follower
    assert follower.follow({"model": {"user": server}}) == [2, 3]
    require_same(trainer, server)


def test_a_log_that_was_replaced_is_not_followed(tmp_path: Path) -> None:
    trained(tmp_path / "log", 2)
    server, follower = make(), embstore.IncrementLog(tmp_path / "log")
    follower.load({"model": {"user": server}})
    before = server.rows()
    shutil.rmtree(tmp_path / "log")
    trained(tmp_path / "log", 1)
    with pytest.raises(embstore.CheckpointError, match="tables are at number 2 but the log is at: 1"):
        follower.follow({"model": {"user": server}})
    shutil.rmtree(tmp_path / "log")
    trained(tmp_path / "log", 3)
    with pytest.raises(
        embstore.CheckpointError, match="increment-000000000003: does not follow increment-000000000002,"
    ):
        follower.follow({"model": {"user": server}})
    require_same(before, server)


@pytest.mark.slow
def test_followers_beside_appends_and_compactions_are_never_empty_or_mixed(tmp_path: Path) -> None:
    trainer = make()
    trainer.insert_or_assign([-5], np.ones((1, 5)))  # nobody touches it
    tables = {"model": {"user": trainer}}
    step(trainer, 0)
    states = {0: trainer.rows()}
    log = embstore.IncrementLog.create(tmp_path, tables)
    failures: list[BaseException] = []
    done = threading.Event()
    checked = [0]

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)
                done.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    server, follower = make(), embstore.IncrementLog(tmp_path)
    follower.load({"model": {"user": server}})

    def follow() -> None:
        follower.follow({"model": {"user": server}})
        require_same(states[follower.applied], server)
        checked[0] += 1

    def load() -> None:
        late, fresh = make(), embstore.IncrementLog(tmp_path)
        require_same(states[fresh.load({"model": {"user": late}})], late)

    def reload() -> None:
        follower_of_reloaded.load({"model": {"user": reloaded}})

    def look() -> None:
        assert server.contains([-5]).all() and reloaded.contains([-5]).all()

    reloaded, follower_of_reloaded = make(), embstore.IncrementLog(tmp_path)
    reload()
    compactor = embstore.IncrementLog(tmp_path)
    work = (follow, load, reload, look, lambda: compactor.compact() and None, compactor.verify)
    threads = [guarded(w) for w in work]
    try:
        for number in range(1, 30):
            if done.is_set():
                break
            step(trainer, number)
            states[number] = trainer.rows()
            assert log.append(tables) == number
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert checked[0] > 3
    follower.follow({"model": {"user": server}})
    require_same(trainer, server)


# ---- what is published and then interrupted


@pytest.fixture(params=[OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"])
def after_rename(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Lets the sync after the rename of a target fail once; returns what catches it."""
    from embstore.checkpoint import drafts

    def arm(target: Path) -> Any:
        real, failed = drafts.sync_folder, []

        def sync(folder: Path) -> None:
            if folder == target.parent and not failed:  # the parent is synced after the rename alone
                failed.append(True)
                raise request.param
            real(folder)

        monkeypatch.setattr(drafts, "sync_folder", sync)
        published = "is complete and published" if isinstance(request.param, OSError) else None
        return pytest.raises(type(request.param), match=published)

    return arm


def test_an_append_that_was_published_is_not_stuck(tmp_path: Path, after_rename: Any) -> None:
    trainer, log = trained(tmp_path, 0)
    step(trainer, 1)
    with after_rename(entry(tmp_path, 1)):
        log.append({"model": {"user": trainer}})
    assert entry(tmp_path, 1).is_dir()
    step(trainer, 2)
    assert log.append({"model": {"user": trainer}}) == 2
    server = make()
    assert embstore.IncrementLog(tmp_path).load({"model": {"user": server}}) == 2
    require_same(trainer, server)


def test_a_log_a_dump_and_a_compaction_that_were_published_may_be_made_again(
    tmp_path: Path, after_rename: Any
) -> None:
    trainer = make()
    tables = {"model": {"user": trainer}}
    step(trainer, 0)
    with after_rename(tmp_path / "d"):
        embstore.dump(tmp_path / "d", tables, optim=True)
    step(trainer, 1)
    embstore.dump(tmp_path / "d", tables, optim=True)
    back = make()
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    require_same(trainer, back)
    with pytest.raises(FileExistsError):
        embstore.dump(tmp_path / "d", tables)
    with after_rename(base(tmp_path / "log", 0)):
        embstore.IncrementLog.create(tmp_path / "log", tables)
    step(trainer, 2)
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    step(trainer, 3)
    log.append(tables)
    with after_rename(base(tmp_path / "log", 1)):
        log.compact()
    assert log.compact() == 1
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    require_same(trainer, back)
    assert not [p for p in tmp_path.rglob("*") if ".partial-" in p.name]


def test_a_dump_of_sok_that_was_published_may_be_made_again(tmp_path: Path, after_rename: Any) -> None:
    from embstore.formats.sok import DumpReader, DumpWriter

    def written(value: float) -> None:
        with DumpWriter(tmp_path / "sok") as writer:
            keys = np.arange(9)
            writer.table("user:0", np.int64).append(keys, np.full((9, 5), value, np.float32))

    for value in (1.0, 2.0):  # into a new folder, then over the old one
        with after_rename(tmp_path / "sok"):
            written(value)
        assert (DumpReader(tmp_path / "sok").table("user:0").values == value).all()
        written(value + 0.5)
        assert (DumpReader(tmp_path / "sok").table("user:0").values == value + 0.5).all()
    assert [p.name for p in tmp_path.iterdir()] == ["sok"]


def test_ctrl_c_while_changes_are_taken_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    trainer, log = trained(tmp_path, 0)
    step(trainer, 1)
    take = embstore.Table.snapshot_changes

    def interrupted(self: embstore.Table) -> Any:
        taken = take(self)
        os.kill(os.getpid(), signal.SIGINT)
        return taken

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(embstore.Table, "snapshot_changes", interrupted)
        log.append({"model": {"user": trainer}})
    assert log.append({"model": {"user": trainer}}) == 1
    server = make()
    embstore.IncrementLog(tmp_path).load({"model": {"user": server}})
    require_same(trainer, server)


# ---- leftovers


def leave(target: Path, days: float = 0) -> Path:
    draft = target.parent / f".{target.name}.partial-{'0a' * 8}"
    (draft / "model").mkdir(parents=True)
    (draft / "model" / "user_keys").write_bytes(b"12345678")
    then = (draft.stat().st_mtime - days * 86400,) * 2
    for path in (draft, draft / "model", draft / "model" / "user_keys"):
        os.utime(path, then)
    return draft


def test_what_killed_writers_left_in_a_log_is_removed(tmp_path: Path) -> None:
    from embstore.checkpoint.drafts import Draft

    trainer, log = trained(tmp_path, 2)
    gone = [leave(base(tmp_path, 1)), leave(base(tmp_path, 7)), leave(entry(tmp_path, 2))]
    next_one = leave(entry(tmp_path, 3))
    busy = Draft(base(tmp_path, 9))
    log.compact()
    assert not any(path.exists() for path in gone)
    assert busy.path.exists() and next_one.exists()
    busy.discard()
    log.append({"model": {"user": trainer}})
    assert not next_one.exists()


def test_drafts_of_other_dumps_are_removed_after_a_day(tmp_path: Path) -> None:
    mine, old, young = leave(tmp_path / "c"), leave(tmp_path / "a", days=1.1), leave(tmp_path / "b", days=0.5)
    embstore.dump(tmp_path / "c", {"model": {"user": make()}})
    assert not mine.exists() and not old.exists() and young.exists()
