"""A trainer that starts again from a log counts on: the same ids get a row as if it had never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faces.dynamicemb import ranks, retention_jobs
from faces.dynamicemb.small_tables import STEP, options, tables

import embstore
from dynamicemb import FrequencyAdmissionStrategy, KVCounter
from dynamicemb.types import Counter, MemoryType


class OwnCounter(Counter):
    """A user's: a dict, in which nothing says what changed."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        for key, more in zip(keys.tolist(), frequencies.tolist(), strict=True):
            self.seen[key] = self.seen.get(key, 0) + more
        return torch.tensor([self.seen[key] for key in keys.tolist()])

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for key in keys.tolist():
            self.seen.pop(key, None)

    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        return 0

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        keys, counts = np.fromfile(key_file, np.int64), np.fromfile(counter_file, np.int64)
        self.seen = dict(zip(keys.tolist(), counts.tolist(), strict=True))

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        np.array(list(self.seen), np.int64).tofile(key_file)
        np.array(list(self.seen.values()), np.int64).tofile(counter_file)


COUNTERS: dict[str, Any] = {
    "roomy": lambda: KVCounter(1 << 20),
    "full": lambda: KVCounter(97),  # the smallest counts give way
    "own": OwnCounter,
    "none": lambda: None,  # a threshold above 255 counts exactly too
}


def make(counter: str) -> Any:
    strategy = FrequencyAdmissionStrategy(300 if counter == "none" else 4)
    chosen = options(admit_strategy=strategy, admission_counter=COUNTERS[counter](), score_strategy=STEP)
    return tables(chosen)


def train(module: Any, first: int, steps: int) -> None:
    """A few ids are frequent; with a high threshold, each comes many times in a batch."""
    (option,) = (dynamic.options for dynamic in module.dynamic_tables.values())
    often = option.admit_strategy.threshold // 4
    for step in range(first, first + steps):
        rng = np.random.default_rng(step)
        keys = torch.from_numpy((900 ** rng.random(61)).astype(np.int64) + 7 * (step // 10))
        keys = keys.repeat_interleave(often)
        module(keys, torch.arange(len(keys) + 1)).sum().backward()


def named(module: Any) -> dict[str, dict[str, embstore.Table]]:
    return {"model": {name: dynamic.table for name, dynamic in module.dynamic_tables.items()}}


def bits(module: Any) -> tuple[Any, ...]:
    (table,) = (dynamic.table for dynamic in module.dynamic_tables.values())
    rows = table.rows()
    assert table.exact_counts is not None
    keys, counts = table.exact_counts.items()
    return rows.keys.tobytes(), rows.values.tobytes(), rows.scores.tobytes(), keys.tolist(), counts.tolist()


def written(path: Path, counter: str) -> tuple[Any, embstore.IncrementLog]:
    """A log with three increments, and the module that was trained."""
    module = make(counter)
    train(module, 0, 7)
    log = embstore.IncrementLog.create(path, named(module))
    for number in range(3):
        train(module, 7 + 10 * number, 10)
        log.append(named(module))
    return module, log


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("way", ["load", "follow", "compact", "merge", "reshard"])
def test_a_restored_module_admits_the_same_ids(tmp_path: Path, counter: str, way: str) -> None:
    module, log = written(tmp_path / "log", counter)
    back = make(counter)
    if way == "load":
        embstore.IncrementLog(tmp_path / "log").load(named(back))
    elif way == "follow":
        shutil.copytree(tmp_path / "log", tmp_path / "short")
        for number in (2, 3):
            shutil.rmtree(tmp_path / "short" / f"increment-{number:012d}")
        short = embstore.IncrementLog(tmp_path / "short")
        short.load(named(back))
        for number in (2, 3):
            name = f"increment-{number:012d}"
            shutil.copytree(tmp_path / "log" / name, tmp_path / "short" / name)
        assert short.follow(named(back)) == [2, 3]
    elif way == "compact":
        log.compact()
        train(module, 37, 3)
        log.append(named(module))
        embstore.IncrementLog(tmp_path / "log").load(named(back))
    else:
        embstore.merge(tmp_path / "log", tmp_path / "merged")
        if way == "reshard":
            embstore.reshard(tmp_path / "merged", tmp_path / "three", world=3)
            shutil.rmtree(tmp_path / "merged")
            (tmp_path / "three").rename(tmp_path / "merged")
        embstore.load(tmp_path / "merged", named(back), optim=True)
    assert len(bits(module)[3]) > 20 and bits(module) == bits(back)
    for one in (module, back):
        train(one, 40, 15)
    assert bits(module) == bits(back)


@pytest.mark.parametrize("counter", ["full", "own"])
def test_counts_of_a_failed_increment_are_in_the_next_one(tmp_path: Path, counter: str) -> None:
    module, log = written(tmp_path / "log", counter)
    train(module, 37, 4)
    blocker = tmp_path / "log" / "increment-000000000004"
    blocker.write_text("in the way")
    with pytest.raises(Exception, match=blocker.name):
        log.append(named(module))
    blocker.unlink()
    log.append(named(module))
    back = make(counter)
    embstore.IncrementLog(tmp_path / "log").load(named(back))
    assert bits(module) == bits(back)


def test_a_trainer_that_starts_again_appends_to_the_log(tmp_path: Path) -> None:
    module, _ = written(tmp_path / "log", "full")
    again, last = make("full"), make("full")
    log = embstore.IncrementLog(tmp_path / "log")
    log.load(named(again), writable=True)
    for one in (module, again):
        train(one, 37, 10)
    log.append(named(again))
    embstore.IncrementLog(tmp_path / "log").load(named(last))
    assert bits(module) == bits(again) == bits(last)


def test_an_increment_has_the_counts_that_changed_and_no_more(tmp_path: Path) -> None:
    module = make("roomy")
    module(torch.arange(5000), torch.arange(5001)).sum().backward()
    log = embstore.IncrementLog.create(tmp_path / "log", named(module))
    module(torch.arange(10**6, 10**6 + 50), torch.arange(51)).sum().backward()
    log.append(named(module))
    files = sorted((tmp_path / "log/increment-000000000001/model").glob("t0_counter_*"))
    assert [file.stat().st_size for file in files] == [8 * 50, 8 * 50]


def test_a_log_without_counts_loads_and_counting_begins_at_0(tmp_path: Path) -> None:
    """As it was written before increments had counts."""
    plain = tables(options(score_strategy=STEP))
    plain(torch.arange(9), torch.arange(10)).sum().backward()
    log = embstore.IncrementLog.create(tmp_path / "log", named(plain))
    plain(torch.arange(5, 12), torch.arange(8)).sum().backward()
    log.append(named(plain))
    assert not list((tmp_path / "log").rglob("*_counter_*"))
    back = make("roomy")
    back(torch.arange(50), torch.arange(51)).sum().backward()
    embstore.IncrementLog(tmp_path / "log").load(named(back))
    assert len(back.dynamic_tables["t0"].table) == 12 and bits(back)[3] == []


def test_damaged_counts_of_an_increment_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    written(tmp_path / "log", "roomy")
    (file,) = (tmp_path / "log/increment-000000000002").rglob("t0_counter_frequencies*")
    content = bytearray(file.read_bytes())
    content[3] ^= 0x40
    file.write_bytes(content)
    back = make("roomy")
    train(back, 90, 2)
    before = bits(back)
    with pytest.raises(embstore.CheckpointError, match=r"t0_counter_frequencies.* checksum"):
        embstore.IncrementLog(tmp_path / "log").load(named(back))
    assert bits(back) == before


@pytest.mark.multirank
@pytest.mark.parametrize(("wrote", "loads"), [(2, 2), (2, 1), (1, 2)])
def test_any_number_of_ranks_goes_on_with_the_counts(wrote: int, loads: int, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    trained = ranks.run(wrote, retention_jobs.write_counted_log, path)
    loaded = ranks.run(loads, retention_jobs.load_counted_log, path)
    ours, theirs = (
        {key: count for result in results for key, count in result["counts"].items()}
        for results in (trained, loaded)
    )
    assert len(ours) > 20 and ours == theirs
    rows = [sorted(key for result in results for key in result["rows"]) for results in (trained, loaded)]
    assert rows[0] == rows[1]
