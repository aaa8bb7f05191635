"""Every example runs as its docstring says, with small sizes, and does what it claims."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked_programs
import numpy as np
import pytest
import redis_server

from benchmarks import movielens_data
from embstore.stores.urls import open_store

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")


def example(*arguments: object, ranks: int = 0) -> str:
    """What it prints, on this many ranks of torchrun."""
    needs = ["dynamicemb.shard", "torchrec_dynamic_embedding"]
    return forked_programs.run(arguments, ranks=ranks, needs=needs, seconds=110, cwd=ROOT)


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, output)]


def test_an_example_has_fewer_than_100_lines_and_a_line_in_the_list():
    listed = (ROOT / "examples" / "README.md").read_text()
    for path in EXAMPLES:
        assert f"({path.name})" in listed, path.name
        if path.name != "click_stream.py":  # the figures of the docs, not an example to copy
            assert len(path.read_text().splitlines()) < 100, path.name


@pytest.mark.multirank
def test_two_towers_beat_the_most_popular_films_after_the_epoch_that_the_validation_chose():
    try:
        movielens_data.fetch()
    except movielens_data.Unavailable as reason:
        pytest.skip(str(reason))
    output = example("-m", "examples.two_tower", "--epochs", 2)
    losses = numbers(r"loss ([\d.]+)", output)
    assert losses[-1] < losses[0]
    found, chosen = numbers(r"recall (0[\d.]+)", output), numbers(r"after epoch (\d+)", output)
    assert len(found) == 2 and chosen == [1 + found.index(max(found))]
    towers, popular = numbers(r"(?:two towers|most popular) +([\d.]+)", output)
    assert towers > popular


@pytest.mark.multirank
@pytest.mark.timeout(200)
def test_the_dlrm_learns_from_a_file_of_criteo_on_two_ranks(tmp_path):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from dlrm_torchrun import made_up
    finally:
        sys.path.pop(0)
    lines = made_up()
    data = tmp_path / "day_0"
    data.write_text("".join(f"{next(lines)}\n" for _ in range(512 * 30 + 7)))
    output = example("examples/dlrm_torchrun.py", "--data", data, ranks=2)
    losses, rows = numbers(r"loss ([\d.]+)", output), numbers(r"([\d,]+) rows", output)
    assert len(losses) == 3 and losses[-1] < losses[0] and rows[-1] > rows[0]


@pytest.mark.multirank
def test_another_process_serves_what_is_learned_online():
    output = example("examples/online_learning.py", "--steps", 120)
    known, right = numbers(r"([\d.]+)% of the", output)
    assert known > 70 and right > 70  # a coin has 50
    assert numbers(r"(\d+) increments followed", output)[0] >= 10


def test_rows_on_the_ssd_are_the_same_bits_as_in_memory():
    output = example("examples/larger_than_memory.py", "--steps", 30, "--ids", 50_000, "--rows", 4096)
    assert "same bits as with all" in output and output.rstrip().endswith("yes")
    assert numbers(r"in memory +([\d,]+)", output)[0] < numbers(r"on disk +([\d,]+)", output)[0]
    assert numbers(r"came back from disk ([\d,]+)", output)[0] > 0


@pytest.mark.parametrize("origin", ["dynamicemb", "one_embedding", "sok"])
def test_training_goes_on_from_a_dump_of(origin):
    output = example(f"examples/from_{origin}.py")
    assert "1,000 rows" in output
    first, last = numbers(r"loss ([\d.]+)", output)
    assert last < first


@pytest.mark.multirank
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
def test_training_goes_on_with_rows_that_tde_left_in_redis(tmp_path):
    server = redis_server.RedisServer(tmp_path).start()
    try:
        url = f"redis://{server.where}/?prefix=shop"
        output = example("examples/from_tde.py", "--url", url, "--sample")
        assert numbers(r"mean ([\d.]+)", output) == [0.5]
        losses = numbers(r"loss ([\d.]+)", output)
        assert len(losses) == 3 and losses == sorted(losses, reverse=True)
        store = open_store(url, table="emb.t_user", tensor_bytes=[64, 4])
        rows, _, found = store.get(np.arange(500) * 1_000_003)
        vectors = rows.view(np.float32)[:, :16]
        assert found.all() and (vectors > 0.6).all()  # under TDE's keys, and trained from 0.5 towards 1
        assert np.square(vectors - 1).mean() < losses[-1]
    finally:
        server.stop()
