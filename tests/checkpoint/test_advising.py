"""`embstore advise` over dumps and logs."""

import json

import numpy as np
import pytest

import embstore
from embstore.readable import duration_text

typer_testing = pytest.importorskip("typer.testing")


def run(*arguments, code=0):
    from embstore.cli.commands import app

    done = typer_testing.CliRunner().invoke(app, ["advise", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def advice_of(path, *arguments):
    return json.loads(run(path, "--json", *arguments))


def test_a_dump_of_counts_tells_what_the_most_used_ids_find(tmp_path):
    table = embstore.Table("user", dim=3, max_capacity=512, score_strategy="lfu")
    counts = np.random.default_rng(0).zipf(1.3, 400).clip(1, 10**6).astype(np.uint64)
    table.insert_or_assign(np.arange(400), np.ones((400, 3)), scores=counts)
    embstore.dump(tmp_path / "dump", {"model": {"user": table}})
    (advice,) = advice_of(tmp_path / "dump")
    ordered = np.sort(counts)[::-1]
    assert [p["rows"] for p in advice["points"]][:4] == [64, 128, 256, 512]
    for point in advice["points"]:
        assert point["by_recency"] is None
        assert point["by_frequency"] == pytest.approx(ordered[: point["rows"]].sum() / counts.sum())
    assert "how often" in run(tmp_path / "dump")


def test_a_dump_of_aged_counts_tells_what_the_most_used_ids_find(tmp_path):
    table = embstore.Table("user", dim=3, max_capacity=512, score_strategy="lfu", half_life=1000)
    counts = np.random.default_rng(1).integers(1, 40, 300)
    for _ in range(2):
        table.find_or_insert(np.repeat(np.arange(300), counts))
    embstore.dump(tmp_path / "dump", {"model": {"user": table}})
    (advice,) = advice_of(tmp_path / "dump")
    ordered = np.sort(counts)[::-1]
    for point in advice["points"]:
        expected = ordered[: point["rows"]].sum() / counts.sum()
        assert point["by_frequency"] == pytest.approx(expected, rel=0.01)
    assert "lately" in advice["based_on"]


def test_a_dump_of_times_tells_ages_and_no_hit_rates(tmp_path):
    table = embstore.Table("user", dim=3, score_strategy="step")
    for step in range(100):
        table.find_or_insert([step])
    embstore.dump(tmp_path / "dump", {"model": {"user": table}})
    (advice,) = advice_of(tmp_path / "dump")
    assert advice["points"] == []
    assert "50 rows hold what was used in the last 49 batches" in advice["notes"]
    assert "gives no hit rates" in run(tmp_path / "dump")


def test_a_log_tells_what_tables_of_other_sizes_would_find(tmp_path):
    table = embstore.Table("user", dim=3, max_capacity=128, score_strategy="step", bucket_capacity=16)
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    batches = [np.unique(np.random.default_rng(i).zipf(1.2, 60) % 3000) for i in range(30)]
    gone, returned = set(), 0
    for keys in batches:
        before = set(table.rows().keys.tolist())
        table.find_or_insert(keys)
        log.append({"model": {"user": table}})
        returned += len(gone & set(keys.tolist()))
        gone -= set(keys.tolist())
        gone |= before - set(table.rows().keys.tolist())
    (advice,) = advice_of(tmp_path / "log")
    assert advice["based_on"].startswith("ids that changed in 30 increments")
    by_rows = {p["rows"]: p["by_recency"] for p in advice["points"]}
    for rows in (128, 256, 512):
        twin = embstore.Table("t", dim=1, max_capacity=rows, score_strategy="step", bucket_capacity=16)
        found = 0
        for keys in batches:
            found += int(twin.contains(keys).sum())
            twin.find_or_insert(keys)
        assert by_rows[rows] == pytest.approx(found / sum(map(len, batches)), abs=0.03)
    assert advice["evicted"] == table.stats().evictions > 50
    assert advice["returned"] == returned


def test_one_table_is_selected_and_an_unknown_one_named(tmp_path):
    tables = {name: embstore.Table(name, dim=2, score_strategy="lfu") for name in ("user", "item")}
    for table in tables.values():
        table.find_or_insert([1, 2])
    embstore.dump(tmp_path / "dump", {"model": tables})
    assert [a["table"] for a in advice_of(tmp_path / "dump", "--table", "item")] == ["model/item"]
    assert "nobody" in run(tmp_path / "dump", "--table", "nobody", code=2)


def test_scores_of_the_users_own_tell_nothing_and_an_empty_table_neither(tmp_path):
    own = embstore.Table("own", dim=2, score_strategy="customized")
    own.score = 5
    own.find_or_insert([1])
    empty = embstore.Table("empty", dim=2, score_strategy="lfu")
    embstore.dump(tmp_path / "dump", {"model": {"own": own, "empty": empty}})
    for advice in advice_of(tmp_path / "dump"):
        assert advice["based_on"].startswith("nothing") and advice["points"] == []


def test_a_table_that_did_not_change_in_the_increments_gets_no_curve(tmp_path):
    tables = {name: embstore.Table(name, dim=2) for name in ("user", "item")}
    tables["item"].find_or_insert(range(97))
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": tables})
    for step in range(3):
        tables["user"].find_or_insert(range(step, step + 7))
        log.append({"model": tables})
    user, item = sorted(advice_of(tmp_path / "log"), key=lambda a: a["table"], reverse=True)
    assert len(user["points"]) > 1 and item["points"] == []
    assert item["based_on"] == "nothing: no id of it changed in the 3 increments"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5 * 86400, "5.0 days"),
        (5400, "90.0 minutes"),
        (7.25, "7.2 s"),
        (0.25, "250.0 ms"),
        (0.000177, "177 µs"),
        (0, "0 µs"),
    ],
)
def test_a_duration_is_told_in_a_unit_that_fits(seconds, text):
    assert duration_text(seconds) == text
