"""A dump in the background holds the state at the call, whatever training does meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint.tables import make, require_same

import embstore
from embstore.checkpoint import dumping
from embstore.checkpoint.dumping import Pace
from embstore.checkpoint.writing import PartWriter

N = 20_000


def filled(**options: object) -> embstore.Table:
    table = make(**options)
    table.insert_or_assign(
        np.arange(N), np.random.default_rng(0).standard_normal((N, 5)), states=np.ones((N, 10))
    )
    return table


def disturb(table: embstore.Table, step: int) -> None:
    rng = np.random.default_rng(step)
    keys = rng.integers(0, N + 500, 700)
    table.find_or_insert(keys)
    table.apply_gradients(keys, rng.standard_normal((700, 5)))
    table.erase(rng.integers(0, N, 9))
    table.insert_or_assign(rng.integers(-N, N, 50), np.zeros((50, 5)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_and_the_dump_is_the_state_at_the_call(tmp_path: Path, dtype: str) -> None:
    table = filled(dtype=dtype)
    for number in range(4):
        before, step, score = table.rows(), table.optimizer_step, table.score
        handle = embstore.dump(tmp_path / str(number), {"model": {"user": table}}, optim=True, async_=True)
        assert handle is not None
        steps = 0
        while not handle.done() or steps < 3:
            disturb(table, 1000 * number + steps)
            steps += 1
        handle.wait()
        back = make(dtype=dtype)
        embstore.load(tmp_path / str(number), {"model": {"user": back}}, optim=True)
        require_same(before, back)
        assert (back.optimizer_step, back.score) == (step, score)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_snapshot_outlives_growth_eviction_erasing_and_clearing(threads: int) -> None:
    before_threads = embstore.get_num_threads()
    embstore.set_num_threads(threads)
    try:
        for change in ("grow", "evict", "erase", "clear"):
            small = {"max_capacity": 4096, "init_capacity": 4096} if change == "evict" else {}
            table = make(init_capacity=256, **small) if change != "evict" else make(**small)
            table.insert_or_assign(np.arange(3000), np.arange(15000).reshape(3000, 5))
            before = table.rows()
            snapshot = table.snapshot()
            got = [read(snapshot, 100)]
            if change in ("grow", "evict"):
                for step in range(10):
                    table.find_or_insert(np.arange(10_000 * step + 5000, 10_000 * step + 9000))
                    if step < 5:
                        got.append(read(snapshot, 97))
                assert table.stats().evictions > 0 or change == "grow"
            elif change == "erase":
                table.erase(np.arange(0, 3000, 2))
                table.insert_or_assign(np.arange(0, 3000, 4), np.zeros((750, 5)))
            else:
                table.clear()
                table.find_or_insert(np.arange(500))
            while len(got[-1]):
                got.append(read(snapshot, 1023))
            whole = embstore.Rows.concatenate(got)
            order = np.argsort(whole.keys, kind="stable")
            taken = embstore.Rows(*(getattr(whole, f)[order] for f in ("keys", "values", "states", "scores")))
            require_same(before, taken)
    finally:
        embstore.set_num_threads(before_threads)


def read(snapshot: object, n: int) -> embstore.Rows:
    rows = embstore.Rows(
        np.empty(n, np.int64),
        np.empty((n, 5), np.float32),
        np.empty((n, 10), np.float32),
        np.empty(n, np.uint64),
    )
    addresses = [a.__array_interface__["data"][0] for a in (rows.keys, rows.values, rows.states, rows.scores)]
    got = snapshot.read(n, *addresses)  # type: ignore[attr-defined]
    return embstore.Rows(rows.keys[:got], rows.values[:got], rows.states[:got], rows.scores[:got])


def test_rows_of_a_snapshot_are_shared_out_among_threads() -> None:
    table = filled()
    before, snapshot = table.rows(), table.snapshot()
    parts: list[embstore.Rows] = []

    def take() -> None:
        while len(rows := read(snapshot, 500)):
            parts.append(rows)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(20):
        disturb(table, step)
    for thread in threads:
        thread.join()
    whole = embstore.Rows.concatenate(parts)
    order = np.argsort(whole.keys, kind="stable")
    require_same(
        before, embstore.Rows(*(getattr(whole, f)[order] for f in ("keys", "values", "states", "scores")))
    )


def test_a_table_may_be_dumped_and_read_while_it_has_other_snapshots(tmp_path: Path) -> None:
    table = filled()
    before, snapshot, blocks = table.rows(), table.snapshot(), table.export(block_rows=977)
    disturb(table, 1)
    now = table.rows()
    embstore.dump(tmp_path / "now", {"model": {"user": table}}, optim=True)
    disturb(table, 2)
    back = make()
    embstore.load(tmp_path / "now", {"model": {"user": back}}, optim=True)
    require_same(now, back)
    for rows in ([read(snapshot, N)], list(blocks)):
        whole = embstore.Rows.concatenate(rows)
        order = np.argsort(whole.keys, kind="stable")
        fields = ("keys", "values", "states", "scores")
        require_same(before, embstore.Rows(*(getattr(whole, f)[order] for f in fields)))


def test_a_dump_in_the_background_uses_a_small_share_of_the_time_at_the_usual_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"monotonic": 1000.0, "thread_time": 7.0}
    policies: list[int] = []
    for name in clock:
        monkeypatch.setattr(dumping.time, name, lambda name=name: clock[name])
    monkeypatch.setattr(dumping.os, "sched_setscheduler", lambda thread, policy, _: policies.append(policy))
    monkeypatch.setattr(Pace, "REST", 0.0)
    pace = Pace(share=0.05)
    used = 0.0
    for seconds, cpu_seconds in [(1, 0.04), (1, 0.05), (1, 0.9), (10, 0.1), (10, 0.5), (1, 0.3)]:
        clock["monotonic"] += seconds
        clock["thread_time"] += cpu_seconds
        used += cpu_seconds if policies[-1:] != [os.SCHED_IDLE] else 0.0
        pace()
        beyond = used > 0.05 * (clock["monotonic"] - 1000.0)
        assert policies[-1] == (os.SCHED_IDLE if beyond else os.SCHED_OTHER)
    assert set(policies) == {os.SCHED_IDLE, os.SCHED_OTHER}
    pace.hurry()
    assert policies[-1] == os.SCHED_OTHER


def test_a_second_dump_waits_for_the_first(tmp_path: Path) -> None:
    table = filled()
    first = embstore.dump(tmp_path / "a", {"model": {"user": table}}, async_=True)
    embstore.dump(tmp_path / "b", {"model": {"user": table}})
    assert first is not None and first.done()
    first.wait()
    embstore.open_dump(tmp_path / "a").verify()


def broken_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PartWriter, rows: embstore.Rows) -> int:
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(PartWriter, "write", broken)


def test_an_error_in_the_background_comes_out_of_wait_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled()
    with monkeypatch.context() as patch:
        broken_disk(patch)
        handle = embstore.dump(tmp_path / "a", {"model": {"user": table}}, async_=True)
        assert handle is not None
        with pytest.raises(OSError, match="the disk is broken"):
            handle.wait()
    embstore.dump(tmp_path / "b", {"model": {"user": table}})
    table.close()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("call", ["dump", "dump in the background", "log", "close"])
def test_an_error_that_nobody_waited_for_comes_out_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    table = filled()
    tables = {"model": {"user": table}}
    with monkeypatch.context() as patch:
        broken_disk(patch)
        handle = embstore.dump(tmp_path / "a", tables, async_=True)
        assert handle is not None
        handle.finish()

    def again() -> None:
        if call == "close":
            table.close()
        elif call == "log":
            embstore.IncrementLog.create(tmp_path / "log", tables)
        else:
            later = embstore.dump(tmp_path / "b", tables, async_=call != "dump")
            if later is not None:
                later.wait()

    with pytest.raises(embstore.CheckpointError, match="background dump to .*/a failed: OSError.*is broken"):
        again()
    assert list(tmp_path.iterdir()) == []
    again()  # told once


def test_closing_a_table_waits_for_its_dump(tmp_path: Path) -> None:
    table = filled()
    before = table.rows()
    embstore.dump(tmp_path / "a", {"model": {"user": table}}, async_=True, optim=True)
    table.close()
    back = make()
    embstore.load(tmp_path / "a", {"model": {"user": back}}, optim=True)
    require_same(before, back)


EXITING = """
import sys, time
from pathlib import Path
import numpy as np
import embstore
from embstore.checkpoint import dumping
from embstore.checkpoint.dumping import Pace
from embstore.checkpoint.writing import PartWriter

def write(self, rows):
    if sys.argv[2] == "hang":
        print("writing", flush=True)
        time.sleep(60)
    raise OSError(5, "the disk is broken")

PartWriter.write = write
table = embstore.Table("user", dim=5)
table.insert_or_assign(np.arange(100), np.ones((100, 5)))
embstore.dump(Path(sys.argv[1]) / "a", {"model": {"user": table}}, async_=True)
"""


@pytest.mark.multirank
@pytest.mark.parametrize("how, told", [("fail", "failed: OSError"), ("hang", "is not complete")])
def test_the_end_of_the_process_tells_what_became_of_a_dump(tmp_path: Path, how: str, told: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EXITING, str(tmp_path), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if how == "hang":
                assert process.stdout is not None and process.stdout.readline() == "writing\n"
                while process.poll() is None:  # the first may come before the program is at its end
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=5)
            errors = process.communicate(timeout=50)[1]
        finally:
            process.kill()
    assert f"embstore: the background dump to {tmp_path / 'a'} {told}" in errors
    assert not (tmp_path / "a").exists()
