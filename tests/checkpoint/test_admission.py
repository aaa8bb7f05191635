"""The counters of keys that have no row yet come back with a dump where they mean the same."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import rank_jobs as jobs
from checkpoint.tables import make
from faces.dynamicemb import ranks

import embstore
from embstore.checkpoint.errors import CheckpointError

KEYS = np.arange(200) * 7919 - 300_000
FILE = "user_admission.rank_0.world_size_1"


def dumped(path: Path, **options: Any) -> embstore.Table:
    """A table that met the first hundred keys twice and the others once, of three times."""
    table = make(admission_threshold=3, **options)
    table.find_or_insert(KEYS)
    table.find_or_insert(KEYS[:100])
    assert len(table) == 0
    embstore.dump(path, {"model": {"user": table}})
    return table


@pytest.mark.parametrize("layout", ["v1a", "v2"])
def test_a_key_is_admitted_by_what_was_counted_before_and_after_a_dump(tmp_path: Path, layout: str) -> None:
    table = make(admission_threshold=3)
    table.find_or_insert(KEYS)
    table.find_or_insert(KEYS[:100])
    handle = embstore.dump(tmp_path / "d", {"model": {"user": table}}, layout=layout, async_=True)
    table.find_or_insert(KEYS)  # not in the dump
    assert handle is not None
    handle.wait()
    embstore.open_dump(tmp_path / "d").verify()
    back = make(admission_threshold=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embstore.load(tmp_path / "d", {"model": {"user": back}})
    assert len(back) == 0
    back.find_or_insert(KEYS)
    np.testing.assert_array_equal(back.contains(KEYS), np.arange(200) < 100)
    assert back.admission_counters().tobytes() == table.admission_counters().tobytes()  # type: ignore[union-attr]


def test_counters_of_a_table_over_a_store_come_back(tmp_path: Path) -> None:
    dumped(tmp_path / "d", store=embstore.stores.MemoryStore(embstore.stores.row_bytes(5, embstore.Adam())))
    back = make(admission_threshold=3)
    embstore.load(tmp_path / "d", {"model": {"user": back}})
    back.find_or_insert(KEYS)
    np.testing.assert_array_equal(back.contains(KEYS), np.arange(200) < 100)


def test_counters_for_another_threshold_stay_behind_with_a_warning(tmp_path: Path) -> None:
    dumped(tmp_path / "d")
    back = make(admission_threshold=2)
    fresh = back.admission_counters()
    with pytest.warns(UserWarning, match="admission counters of table 'user' are not loaded"):
        embstore.load(tmp_path / "d", {"model": {"user": back}})
    assert back.admission_counters().tobytes() == fresh.tobytes()  # type: ignore[union-attr]


def test_dumps_and_tables_without_counters_go_on_loading(tmp_path: Path) -> None:
    dumped(tmp_path / "with")
    embstore.dump(tmp_path / "without", {"model": {"user": make()}})
    assert not list(tmp_path.glob("without/*/*admission*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embstore.load(tmp_path / "with", {"model": {"user": make()}})
        embstore.load(tmp_path / "without", {"model": {"user": make(admission_threshold=3)}})


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_counters_are_refused(tmp_path: Path, damage: str) -> None:
    dumped(tmp_path / "d")
    path = tmp_path / "d" / "model" / FILE
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 2)
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    back = make(admission_threshold=3)
    fresh = back.admission_counters()
    with pytest.raises(CheckpointError, match=FILE):
        embstore.load(tmp_path / "d", {"model": {"user": back}})
    assert back.admission_counters().tobytes() == fresh.tobytes()  # type: ignore[union-attr]


def test_counters_that_no_table_gave_are_refused() -> None:
    table = make(admission_threshold=3)
    with pytest.raises(ValueError, match="counters should be .* but have this length: 7"):
        table.restore_admission_counters(np.full(7, 3, np.uint16))
    assert make().admission_counters() is None


@pytest.mark.multirank
@pytest.mark.timeout(300)
def test_ranks_get_their_own_counters_back_and_others_begin_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(2, jobs.count_and_dump, path)
    names = sorted(p.name for p in (tmp_path / "d" / "model").glob("*admission*"))
    assert names == [f"user_admission.rank_{rank}.world_size_2" for rank in range(2)]
    same = ranks.run(2, jobs.load_counters, path)
    assert [answer["counters"] for answer in same] == before
    assert [answer["warnings"] for answer in same] == [0, 0]
    other = ranks.run(2, jobs.load_counters, path, embstore.Ownership.HASH_ROUNDROBIN)
    for answers in (other, ranks.run(1, jobs.load_counters, path)):
        assert all(not any(answer["counters"][1:]) for answer in answers)
        assert answers[0]["warnings"] == 1
