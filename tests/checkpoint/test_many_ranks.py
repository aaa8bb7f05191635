"""Dumps by several ranks: any world size into any other, and one verdict for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import rank_jobs as jobs
from checkpoint.tables import FIELDS, files_in
from faces.dynamicemb import ranks

import embstore

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]


def whole(answers: list[dict[str, Any]], key: str | None = "rows") -> dict[str, embstore.Rows]:
    """The rows of all ranks together, by table, sorted by key."""
    tables: dict[str, embstore.Rows] = {}
    parts = [answer[key] if key else answer for answer in answers]
    for name in parts[0]:
        joined = embstore.Rows.concatenate([part[name]["rows"] for part in parts])
        order = np.argsort(joined.keys, kind="stable")
        tables[name] = embstore.Rows(*(getattr(joined, field)[order] for field in FIELDS))
    return tables


def require_same(
    ours: dict[str, embstore.Rows], theirs: dict[str, embstore.Rows], scores: bool = True
) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        for field in FIELDS:
            if field != "scores" or scores or name != "item":
                np.testing.assert_array_equal(
                    getattr(ours[name], field), getattr(theirs[name], field), err_msg=f"{name} {field}"
                )


@pytest.mark.parametrize("layout", ["v1a", "v2"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_world_size_loads_into_any_other_and_trains_on(tmp_path: Path, world: int, layout: str) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(world, jobs.train_and_dump, path, layout)
    stored = whole(before)
    assert {name: len(rows) > 400 for name, rows in stored.items()} == dict.fromkeys(stored, True)
    embstore.open_dump(path).verify()
    for other in (1, 2, 3, 4):
        after = ranks.run(other, jobs.load_and_train, path)
        require_same(stored, whole(after))
        # Sums of a step depend on the order of the ranks only in their last bits.
        np.testing.assert_allclose(after[0]["losses"], before[0]["losses"], rtol=1e-12)
        require_same(whole(before, "after"), whole(after, "after"), scores=False)
        assert after[0]["after"]["user"]["step"] == before[0]["after"]["user"]["step"]


def test_ranks_dump_in_the_background_while_they_train(tmp_path: Path) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(3, jobs.train_and_dump, path, "v1a", async_=True, rest=20)
    require_same(whole(before), whole(ranks.run(2, jobs.load_and_train, path)))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_failing_rank_raises_on_all_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    for kind, message, _ in ranks.errors(3, jobs.fail_on_rank, str(tmp_path / "d"), failing, timeout=100):
        assert kind == "OSError" and "the disk of this rank is broken" in message
    assert list(tmp_path.iterdir()) == []
    ranks.run(3, jobs.dump_plain, str(tmp_path / "d"))
    embstore.open_dump(tmp_path / "d").verify()


@pytest.mark.parametrize("call", ["create", "append", "load"])
def test_a_rank_that_fails_in_an_increment_log_raises_on_all_and_a_retry_works(
    tmp_path: Path, call: str
) -> None:
    answers = ranks.run(3, jobs.fail_in_a_log, str(tmp_path / "log"), call, 1)
    for rank, (kind, message) in enumerate(answers):
        assert kind == "OSError" and "the store of this rank is gone" in message
        assert ("on rank 1" in message) == (rank != 1)


def test_a_rank_that_dies_ends_the_dump_of_the_others(tmp_path: Path) -> None:
    # Processes of their own: those of the pool are still needed.
    script = "import sys; from checkpoint import rank_jobs; rank_jobs.join_and_die(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == 9
    assert processes[0].returncode == 1 and "onnection" in errors[0]
    assert not (tmp_path / "d").exists()


def test_targets_that_are_taken_raise_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    before = files_in(tmp_path)
    for name, reason in (("full", "has files"), ("file", "is a file")):
        for kind, message, _ in ranks.errors(2, jobs.dump_plain, str(tmp_path / name), timeout=100):
            assert kind == "FileExistsError" and reason in message
    for kind, message, _ in ranks.errors(2, jobs.dump_plain, "/proc/nowhere/d", timeout=100):
        assert kind in ("PermissionError", "FileNotFoundError", "OSError") and "/proc/nowhere" in message
    assert files_in(tmp_path) == before
    for _, message, _ in ranks.errors(2, jobs.different_tables, str(tmp_path / "d"), timeout=100):
        assert "tables should be the same on all ranks" in message
    (tmp_path / "empty").mkdir()
    ranks.run(2, jobs.dump_plain, str(tmp_path / "empty"))


def test_a_damaged_dump_raises_on_every_rank_before_a_row_is_placed(tmp_path: Path) -> None:
    ranks.run(2, jobs.dump_plain, str(tmp_path / "d"))
    path = tmp_path / "d" / "model.b" / "item_values"
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    for kind, message, _ in ranks.errors(3, jobs.load_plain, str(tmp_path / "d"), timeout=100):
        assert kind == "CheckpointError" and "item_values: its checksum is wrong" in message


def test_a_log_of_three_ranks_is_followed_by_two(tmp_path: Path) -> None:
    trainer = ranks.run(3, jobs.follow_log, str(tmp_path / "log"), 4)
    require_same(whole(trainer, None), whole(ranks.run(2, jobs.load_log, str(tmp_path / "log")), None))
    embstore.IncrementLog(tmp_path / "log").compact()
    require_same(whole(trainer, None), whole(ranks.run(1, jobs.load_log, str(tmp_path / "log")), None))


@pytest.mark.parametrize("world, other", [(2, 2), (2, 3), (3, 1)])
def test_torch_distributed_checkpoint_holds_tables_too(tmp_path: Path, world: int, other: int) -> None:
    before = ranks.run(world, jobs.save_with_torch, str(tmp_path / "c"))
    after = ranks.run(other, jobs.load_with_torch, str(tmp_path / "c"))
    require_same(whole(before), whole(after))
    np.testing.assert_allclose(after[0]["losses"], before[0]["losses"], rtol=1e-12)
    assert after[0]["dense"] == before[0]["dense"]


def test_a_read_only_folder_raises_on_every_rank_and_keeps_the_old_dump(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.strip()}")
    try:
        ranks.run(2, jobs.dump_plain, str(tmp_path / "old"))
        before = files_in(tmp_path)
        # Permissions do not hold root back, a file system that is read-only does.
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        for name in ("new", "deeper/new"):
            failures = ranks.errors(2, jobs.dump_plain, str(tmp_path / name))
            assert all("Read-only file system" in message for _, message, _ in failures), failures
        assert files_in(tmp_path) == before
        embstore.open_dump(tmp_path / "old").verify()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
