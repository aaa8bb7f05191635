"""A table that comes back from a log admits the same keys as the one that went on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.tables import make, require_same

import embstore
from embstore.key_counts import KeyCounts

FREQUENT = {"score_strategy": "lfu", "admission": "frequency", "shared_rows": 1, "max_capacity": 97}
KINDS: dict[str, dict[str, Any]] = {
    "frequency": FREQUENT,
    "importance": {**FREQUENT, "score_strategy": "importance"},
    "grows": {**FREQUENT, "max_capacity": 3000},  # the sketch appears with the first key without room
    "threshold": {"admission_threshold": 3, "score_strategy": "step"},
    "crowded": {"admission_threshold": 2, "score_strategy": "step", "max_capacity": 97},
}


def train(table: embstore.Table, first: int, steps: int, n: int = 301) -> None:
    """Few keys are frequent, and others are every ten steps. A step depends on its number alone."""
    for step in range(first, first + steps):
        rng = np.random.default_rng(step)
        keys = (20_000 ** rng.random(n)).astype(np.int64) + 31 * (step // 10)
        vectors = embstore.Embedding(table=table)(torch.from_numpy(keys))
        vectors.backward(torch.from_numpy(rng.standard_normal(vectors.shape, np.float32)))


def bits(table: embstore.Table) -> tuple[Any, ...]:
    shared, counters = table.shared_rows(), table.admission_counters()
    assert counters is not None
    return shared.values.tobytes(), shared.states.tobytes(), counters.tobytes(), table.score


def require_alike(ours: embstore.Table, theirs: embstore.Table) -> None:
    require_same(ours, theirs)
    assert bits(ours) == bits(theirs)


def written(path: Path, **options: Any) -> tuple[embstore.Table, embstore.IncrementLog]:
    """A log with three increments, and the table that was trained."""
    table = make(**options)
    train(table, 0, 7)
    log = embstore.IncrementLog.create(path, {"model": {"user": table}})
    for number in range(3):
        train(table, 7 + 10 * number, 10)
        log.append({"model": {"user": table}})
    return table, log


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["load", "follow", "compact", "merge"])
def test_a_restored_table_goes_on_with_the_same_bits(tmp_path: Path, kind: str, way: str) -> None:
    table, log = written(tmp_path / "log", **KINDS[kind])
    back = make(**KINDS[kind])
    tables = {"model": {"user": back}}
    if way == "load":
        embstore.IncrementLog(tmp_path / "log").load(tables)
    elif way == "follow":
        shutil.copytree(tmp_path / "log", tmp_path / "short")
        for number in (2, 3):
            shutil.rmtree(tmp_path / "short" / f"increment-{number:012d}")
        short = embstore.IncrementLog(tmp_path / "short")
        short.load(tables)
        for number in (2, 3):
            name = f"increment-{number:012d}"
            shutil.copytree(tmp_path / "log" / name, tmp_path / "short" / name)
        assert short.follow(tables) == [2, 3]
    elif way == "compact":
        log.compact()
        train(table, 37, 3)
        log.append({"model": {"user": table}})
        embstore.IncrementLog(tmp_path / "log").load(tables)
    else:
        embstore.merge(tmp_path / "log", tmp_path / "merged")
        embstore.load(tmp_path / "merged", tables, optim=True)
    require_alike(table, back)
    for one in (table, back):
        train(one, 40, 15)
    require_alike(table, back)


def test_a_trainer_that_starts_again_appends_to_the_log(tmp_path: Path) -> None:
    table, _ = written(tmp_path / "log", **FREQUENT)
    again, last = make(**FREQUENT), make(**FREQUENT)
    log = embstore.IncrementLog(tmp_path / "log")
    log.load({"model": {"user": again}}, writable=True)
    for one in (table, again):
        train(one, 37, 10)
    log.append({"model": {"user": again}})
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": last}})
    require_alike(table, last)


@pytest.mark.parametrize("kind", ["frequency", "threshold"])
def test_counts_of_a_failed_increment_are_in_the_next_one(tmp_path: Path, kind: str) -> None:
    table, log = written(tmp_path / "log", **KINDS[kind])
    train(table, 37, 4)
    blocker = tmp_path / "log" / "increment-000000000004"
    blocker.write_text("in the way")
    with pytest.raises(Exception, match=blocker.name):
        log.append({"model": {"user": table}})
    blocker.unlink()
    log.append({"model": {"user": table}})
    back = make(**KINDS[kind])
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    require_alike(table, back)


def test_counts_begin_anew_when_the_table_was_cleared(tmp_path: Path) -> None:
    table, log = written(tmp_path / "log", **FREQUENT)
    table.clear()
    log.append({"model": {"user": table}})
    train(table, 50, 5)
    log.append({"model": {"user": table}})
    back = make(**FREQUENT)
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    require_alike(table, back)


def test_an_increment_has_the_counts_that_changed_and_no_more(tmp_path: Path) -> None:
    options = {**FREQUENT, "max_capacity": 20_000, "init_capacity": 20_000}
    table = make(**options)
    table.find_or_insert(np.arange(60_000))
    counters = table.admission_counters()
    assert counters is not None
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    table.find_or_insert(np.arange(10**6, 10**6 + 50))
    log.append({"model": {"user": table}})
    file = tmp_path / "log/increment-000000000001/model/user_admission_changes.rank_0.world_size_1"
    assert 40 * 68 < file.stat().st_size < 101 * 68 < counters.nbytes / 50
    back = make(**options)
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    require_alike(table, back)


def test_counts_of_a_table_with_another_capacity_stay_behind(tmp_path: Path) -> None:
    written(tmp_path / "log", **{**FREQUENT, "max_capacity": 5000})
    back = make(**{**FREQUENT, "max_capacity": 50_000})
    embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    train(back, 37, 2)


@pytest.mark.parametrize("way", ["load", "compact", "merge"])
def test_exact_counts_come_back_from_a_log(tmp_path: Path, way: str) -> None:
    table, back = make(), make()
    table.exact_counts, back.exact_counts = KeyCounts(), KeyCounts()
    counts = {-(2**63): 4, 11: 1}
    table.exact_counts.add(*(np.array(column) for column in zip(*counts.items())))
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    for more in ({11: 2, 0: 7}, {2**62: 3}):
        table.exact_counts.add(*(np.array(column) for column in zip(*more.items())))
        counts = {key: counts.get(key, 0) + more.get(key, 0) for key in counts | more}
        log.append({"model": {"user": table}})
    if way == "merge":
        embstore.merge(tmp_path / "log", tmp_path / "merged")
        embstore.load(tmp_path / "merged", {"model": {"user": back}}, counts=True)
    else:
        if way == "compact":
            log.compact()
        embstore.IncrementLog(tmp_path / "log").load({"model": {"user": back}})
    keys, seen = back.exact_counts.items()
    assert dict(zip(keys.tolist(), seen.tolist())) == counts


def test_changes_that_no_table_gave_are_refused() -> None:
    table = make(**FREQUENT)
    for wrong in ([], [0x5CE8], [0x5CE8, 0, 64, 0, 0, 0, 0, *[1] * 34], [1] * 41):
        with pytest.raises(ValueError, match="changes should be what a table gave"):
            table.apply_admission_changes(np.array(wrong, np.uint16))
    with pytest.raises(RuntimeError, match="tracked"):
        table.take_admission_changes()
    assert make().take_admission_changes() is None
