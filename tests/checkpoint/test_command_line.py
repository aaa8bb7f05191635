"""The command line: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import make, require_same, train
from typer.testing import CliRunner

import embstore
from embstore.cli.commands import app


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def answer(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def dumped(tmp_path: Path) -> tuple[Path, embstore.Table]:
    table = make()
    train(table, 4)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    return tmp_path / "d", table


def loaded(path: Path, optim: bool = True) -> embstore.Table:
    table = make()
    embstore.load(path, {"model": {"user": table}}, optim=optim)
    return table


def test_inspect_counts_and_describes(dumped: tuple[Path, embstore.Table]) -> None:
    path, table = dumped
    (row,) = answer("inspect", path)
    assert row["table"] == "model/user" and row["rows"] == len(table) and row["dim"] == 5
    assert row["optimizer"] == "Adam" and row["states"] == "m, v" and row["layout"] == "v1a"
    assert row["bytes"] == sum(p.stat().st_size for p in (path / "model").glob("user_*"))
    assert sum(count for _, _, count in row["histogram"]) == len(table)
    assert "model/user" in run("inspect", path)


def test_verify_says_what_is_wrong_by_its_exit_code(dumped: tuple[Path, embstore.Table]) -> None:
    path, _ = dumped
    assert answer("verify", path)["bytes"] > 0
    file = path / "model" / "user_values"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "user_values" in run("verify", path, code=3)
    run("verify", path / "nowhere", code=2)


def test_get_and_top_read_rows(dumped: tuple[Path, embstore.Table]) -> None:
    path, table = dumped
    found = json.loads(run("get", "--json", path, "--", 7, -1))
    assert [row["key"] for row in found] == [7, -1]
    np.testing.assert_array_equal([row["vector"] for row in found], table.find([7, -1])[0])
    run("get", path, 424242, code=1)
    rows = table.rows()
    best = answer("top", path, "-n", 3)
    assert [row["score"] for row in best] == sorted(rows.scores.tolist())[::-1][:3]
    longest = answer("top", path, "-n", 1, "--by", "norm")[0]
    norms = np.linalg.norm(rows.values.astype(np.float64), axis=1)
    assert longest["key"] == rows.keys[norms.argmax()]
    run("top", path, "--by", "size", code=2)
    run("top", path, "--table", "item", code=2)


def test_diff_finds_every_kind_of_difference(tmp_path: Path, dumped: tuple[Path, embstore.Table]) -> None:
    path, table = dumped
    (same,) = answer("diff", path, path)
    assert not any(same[name] for name in ("only_first", "only_second", "vectors", "scores"))
    scores = table.read([7]).scores
    table.insert_or_assign([7], np.full((1, 5), 9.0), scores=scores)
    table.erase([0, -1])
    table.insert_or_assign([1234], np.ones((1, 5)))
    embstore.dump(tmp_path / "e", {"model": {"user": table}}, optim=True)
    (row,) = answer("diff", path, tmp_path / "e", code=1)
    assert (row["only_first"], row["only_second"], row["vectors"], row["scores"]) == (2, 1, 1, 0)


@pytest.mark.parametrize("world", [1, 3])
def test_reshard_and_convert_keep_every_row(
    tmp_path: Path, dumped: tuple[Path, embstore.Table], world: int
) -> None:
    path, table = dumped
    run("reshard", path, tmp_path / "r", "--world", world)
    require_same(table, loaded(tmp_path / "r"))
    run("convert", tmp_path / "r", tmp_path / "v2", "--to", "v2")
    names = {p.name for p in (tmp_path / "v2" / "model").iterdir() if "_emb_keys" in p.name}
    assert names == {f"user_emb_keys.rank_{r}.world_size_{world}" for r in range(world)}
    require_same(table, loaded(tmp_path / "v2"))
    run("convert", tmp_path / "v2", tmp_path / "v1a", "--to", "v1a")
    require_same(table, loaded(tmp_path / "v1a"))
    run("convert", path, tmp_path / "x", "--to", "v9", code=2)
    run("convert", path, tmp_path / "v2", "--to", "v1a", code=2)


@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_other_formats_and_back(tmp_path: Path, dumped: tuple[Path, embstore.Table], kind: str) -> None:
    path, table = dumped
    run("convert", path, tmp_path / "other", "--to", kind)
    assert [p.name for p in (tmp_path / "other" / "model").iterdir()] == [f"user.{kind}"]
    run("convert", tmp_path / "other", tmp_path / "back", "--to", "v1a")
    back = make(score_strategy="customized")
    embstore.load(tmp_path / "back", {"model": {"user": back}})
    require_same(table, back, states=False)


def test_merge_is_the_log_as_one_dump(tmp_path: Path) -> None:
    table = make()
    train(table, 1)
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    for step in range(3):
        train(table, 1, first=step)
        table.erase([7, -4][step % 2 : step % 2 + 1])
        log.append({"model": {"user": table}})
    run("verify", tmp_path / "log")
    run("merge", tmp_path / "log", tmp_path / "m")
    require_same(table, loaded(tmp_path / "m"))


def test_stats_draws_a_picture(tmp_path: Path, dumped: tuple[Path, embstore.Table]) -> None:
    path, table = dumped
    (row,) = answer("stats", path, "--plot", tmp_path / "s.png")
    assert row["rows"] == len(table) and row["not_finite"] == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
