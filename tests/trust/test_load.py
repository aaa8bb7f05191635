"""Short versions of trust.load and trust.soak: small tables, a few seconds. Costs are not judged here."""

import sys
from pathlib import Path

import numpy as np
import process_groups
import pytest

import embstore
from trust import load, soak

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    before = embstore.get_num_threads()
    yield
    embstore.set_num_threads(before)


def test_a_table_is_built_read_filled_dumped_loaded_and_served_at_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "BATCH", 1023)
    monkeypatch.setattr(load, "ROUNDS", 7)
    monkeypatch.setattr(load, "ENOUGH", 20_000)
    for keys in (5003, 70_001):
        found = load.costs(keys, tmp_path)
        kernel = {name: found.pop(load.KERNEL(name)) for name in load.TAKES_MEMORY}
        assert found.keys() == {*load.OPERATIONS, "plain reads", "bytes"}
        assert all(value + kernel.get(name, 0) > 0 for name, value in found.items())
        assert 32 + 16 < found["bytes"] < 32 + 48  # a row of dim 8, its slot, and room


def test_a_thousand_tables_train_in_one_step(capsys):
    assert load.many_tables(rounds=3) == 0
    assert capsys.readouterr().out.startswith("1,000 tables, 200 features of 64 ids in one step: ")


def test_crafted_keys_are_what_they_say():
    keys = load.unhashed(np.arange(97, dtype=np.uint64) << np.uint64(44))
    x = keys.view(np.uint64)
    with np.errstate(over="ignore"):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
        x = x ^ (x >> np.uint64(33))
    np.testing.assert_array_equal(x, np.arange(97, dtype=np.uint64) << np.uint64(44))
    assert len(np.unique(keys)) == 97


@pytest.mark.parametrize("kind", ["low", "high"])
def test_keys_with_equal_public_hashes_take_no_more_memory_than_random_ones(kind):
    numbers = np.arange(30_011, dtype=np.uint64)
    keys = load.unhashed(numbers << np.uint64(44) if kind == "low" else numbers)
    random = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(keys))
    crafted, plain = embstore.Table("t", dim=3), embstore.Table("t", dim=3)
    crafted.find_or_insert(keys)
    plain.find_or_insert(random)
    assert len(crafted) == len(plain) == 30_011 and crafted.find(keys)[1].all()
    assert crafted.stats().bytes <= 1.1 * plain.stats().bytes


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_soak_ends_with_the_same_rows_in_the_table_the_log_and_the_dump():
    command = [
        "env",
        "-C",
        str(ROOT),
        sys.executable,
        "-m",
        "trust.soak",
        "--minutes",
        "0.1",
        "--keys",
        "5003",
    ]
    output = process_groups.run(command, 160)
    assert output.rstrip().endswith("flat") and " evictions" in output
    for name in ("trainer MB", "reader MB", "disk MB", "step ms", "lookup us", "age s"):
        assert f"\n{name}" in output


def test_growth_is_what_the_last_quarter_has_more_than_the_second():
    assert soak.grown([9.0] * 10 + [2.0] * 30) == 0
    assert soak.grown([1.0] * 20 + [2.0] * 20) == pytest.approx(1.0)
    rising = [100.0 + i for i in range(80)]
    assert soak.judge({"trainer MB": rising}, judged=True) == 1
    assert soak.judge({"trainer MB": [100.0] * 80}, judged=True) == 0
