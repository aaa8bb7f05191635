"""The command line: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import make, require_same, train
from checkpoint.test_dump_and_load import write_original
from typer.testing import CliRunner

import embstore
from embstore.cli import main
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


@pytest.mark.parametrize("half_life", [0, 3])
def test_scores_that_age_are_shown_as_what_they_are_worth_now(tmp_path: Path, half_life: int) -> None:
    """Not as dates, which such numbers could be."""
    table = make(score_strategy="lfu", admission="frequency", half_life=half_life)
    for _ in range(8):
        table.find_or_insert([7])
    table.find_or_insert([7] * 40 + [9])
    embstore.dump(tmp_path / "d", {"model": {"user": table}})
    top = [line.split() for line in run("top", tmp_path / "d").splitlines()[2:]]
    assert [int(key) for key, _, _ in top] == [7, 9]
    # Three batches are a half-life: a use in the first ones is worth 1, 4/3 and 5/3, in the next double, and
    # when the fourth begins an eighth of that: (4 + 2 * 4 + 4 * (1 + 4/3 + 40 * 5/3)) / 8.
    assert [score for _, score, _ in top] == (["36", "0.8333"] if half_life else ["48", "1"])
    assert f"score   {top[1][1]}\n" in run("get", tmp_path / "d", 9)
    assert not re.search(r"\d{4}-\d\d-\d\d", run("inspect", tmp_path / "d"))
    (row,) = answer("top", tmp_path / "d", "-n", 1)
    assert row["score"] == int(table.read([7]).scores[0]), "programs get the score as it is"
    assert not re.search(r"\d{4}-\d\d-\d\d", table._repr_html_())


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


# ---- logs


@pytest.fixture
def logged(tmp_path: Path) -> tuple[Path, embstore.Table]:
    """A log in which a key is gone, one has changed and one is new since its base."""
    table = make()
    train(table, 2)
    log = embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": table}})
    table.erase([7])
    table.insert_or_assign([-1, 4242], np.full((2, 5), 9.0))
    log.append({"model": {"user": table}})
    table.find_or_insert([5])
    log.append({"model": {"user": table}})
    return tmp_path / "log", table


def test_a_log_is_read_with_its_increments(tmp_path: Path, logged: tuple[Path, embstore.Table]) -> None:
    path, table = logged
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    run("get", path, 7, code=1)
    (row,) = json.loads(run("get", "--json", path, "--", -1))
    assert row["vector"] == [9.0] * 5 and row["score"] == table.read([-1]).scores[0]
    (described,) = answer("inspect", path)
    assert (described["rows"], described["layout"], described["states"]) == (len(table), "log", "m, v")
    (same,) = answer("diff", path, tmp_path / "d")
    assert not any(same[name] for name in ("only_first", "only_second", "vectors", "scores"))
    assert answer("top", path, "-n", 3) == answer("top", tmp_path / "d", "-n", 3)
    np.testing.assert_allclose(answer("stats", path)[0]["mean"], answer("stats", tmp_path / "d")[0]["mean"])
    assert answer("verify", path)["bytes"] > answer("verify", tmp_path / "d")["bytes"]


@pytest.mark.parametrize("to", ["v1a", "v2", "parquet", "safetensors", "sok", "one_embedding"])
def test_a_log_is_converted_with_its_increments(
    tmp_path: Path, logged: tuple[Path, embstore.Table], to: str
) -> None:
    path, table = logged
    run("convert", path, tmp_path / "out", "--to", to)
    options = ("--dim", 5, "--optimizer", "Adam") if to == "one_embedding" else ()
    back = tmp_path / "out"
    if to not in ("v1a", "v2"):
        back = tmp_path / "back"
        run("convert", tmp_path / "out", back, "--to", "v2", *options)
    stored = embstore.open_dump(back).tables[0]
    rows = table.rows()
    order = np.argsort(stored.keys)
    np.testing.assert_array_equal(stored.keys[order], rows.keys)
    np.testing.assert_array_equal(stored.values[order], rows.values)
    np.testing.assert_array_equal(np.hstack([stored.state("m"), stored.state("v")])[order], rows.states)


def test_a_log_is_resharded_with_its_increments(tmp_path: Path, logged: tuple[Path, embstore.Table]) -> None:
    path, table = logged
    run("reshard", path, tmp_path / "r", "--world", 3)
    require_same(table, loaded(tmp_path / "r"))


def test_merge_takes_a_log_alone(tmp_path: Path, dumped: tuple[Path, embstore.Table]) -> None:
    assert "should be the folder of an increment log" in run("merge", dumped[0], tmp_path / "m", code=2)


# ---- what is kept by conversions


@pytest.mark.parametrize("strategy", ["timestamp", "step", "lfu"])
@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_states_strategy_and_counters_survive_other_formats(tmp_path: Path, kind: str, strategy: str) -> None:
    table = make(score_strategy=strategy)
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    run("convert", tmp_path / "d", tmp_path / "other", "--to", kind)
    run("convert", tmp_path / "other", tmp_path / "back", "--to", "v2")
    back = make(score_strategy=strategy, seed=99)
    embstore.load(tmp_path / "back", {"model": {"user": back}}, optim=True)
    require_same(table, back)
    assert (back.optimizer_step, back.options.seed) == (3, 3)


OPTIMIZERS = [embstore.Adam(), embstore.Adagrad(), embstore.RowwiseAdagrad(), embstore.SGD(momentum=0.9)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.engine_name)
@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_the_names_of_states_tell_the_optimizer_of_files_without_a_description(
    tmp_path: Path, kind: str, optimizer: embstore.Optimizer
) -> None:
    table = make(optimizer=optimizer, score_strategy="customized")
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    run("convert", tmp_path / "d", tmp_path / "other", "--to", kind)
    (file,) = (tmp_path / "other" / "model").iterdir()
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).replace_schema_metadata(None), file)
    else:
        from safetensors.numpy import load_file, save_file

        save_file(load_file(file), file)
    run("convert", tmp_path / "other", tmp_path / "back", "--to", "v1a")
    back = make(optimizer=optimizer, score_strategy="customized")
    embstore.load(tmp_path / "back", {"model": {"user": back}}, optim=True)
    require_same(table, back)


@pytest.mark.parametrize("layout", ["v1a", "v1b", "v2-alpha", "v2"])
def test_dumps_of_the_original_keep_their_states(tmp_path: Path, layout: str) -> None:
    table = make()
    train(table, 3)
    write_original(tmp_path / "d" / "model", layout, table, now=0)
    run("convert", tmp_path / "d", tmp_path / "ours", "--to", "v1a")
    # Only the newest layout says how scores are given.
    back = make(score_strategy="step" if layout == "v2" else "customized")
    embstore.load(tmp_path / "ours", {"model": {"user": back}}, optim=True)
    require_same(table, back)
    assert (back.optimizer_step, back.learning_rate) == (9, 0.25)


# ---- wrong use


def test_diff_takes_a_table_by_its_whole_name(tmp_path: Path) -> None:
    tables = {name: make(name) for name in ("user", "use", "r")}
    for name, table in tables.items():
        table.insert_or_assign([1], np.full((1, 5), len(name)))
    embstore.dump(tmp_path / "a", {"model": tables})
    tables["use"].insert_or_assign([2], np.ones((1, 5)))
    embstore.dump(tmp_path / "b", {"model": tables})
    assert [row["table"] for row in answer("diff", tmp_path / "a", tmp_path / "b", "--table", "user")] == [
        "model/user"
    ]
    (row,) = answer("diff", tmp_path / "a", tmp_path / "b", "--table", "model/use", code=1)
    assert row["only_second"] == 1
    run("diff", tmp_path / "a", tmp_path / "b", "--table", "us", code=2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("get", 2**63), "key should be an integer between -9223372036854775808 and 9223372036854775807"),
        (("get", "--", -(2**63) - 1), "but is: -9223372036854775809"),
        (("get", -(2**63) - 1), "but is: -9223372036854775809"),
        (("get", "7", "x"), "keys should be integers but one is: x"),
        (("get", "7", "--tabel", "user"), "there is no such option: --tabel"),
        (("top", "-n", -3), "-n should be an integer between 1 and 9223372036854775807 but is: -3"),
        (("top", "-n", 0), "but is: 0"),
        (("reshard", "out", "--world", 0), "--world should be an integer between 1 and 65536 but is: 0"),
        (("diff", ".", "--tolerance", -1), "--tolerance should be at least 0 but is: -1"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    dumped: tuple[Path, embstore.Table], arguments: tuple[Any, ...], said: str
) -> None:
    command, *rest = arguments
    output = run(command, dumped[0], *rest, code=2)
    assert said in output and len(output.splitlines()) == 1


def test_the_extremes_of_int64_are_keys(dumped: tuple[Path, embstore.Table]) -> None:
    for before in ((), ("--",)):
        run("get", dumped[0], *before, 2**63 - 1, -(2**63))


def test_a_path_that_is_no_folder_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "path should be the folder of a dump but is a file: " in run("inspect", tmp_path / "file", code=2)
    assert "path should be the folder of a dump but does not exist: " in run("stats", tmp_path / "no", code=2)


def test_times_of_a_histogram_differ_however_close_they_are(tmp_path: Path) -> None:
    for span in (10**12, 10**9, 10**6, 10**3):
        table = embstore.Table("user", dim=2)
        now = 1_794_908_226_306_798_817
        table.insert_or_assign(range(9), np.zeros((9, 2)), scores=[now + i * span // 8 for i in range(9)])
        embstore.dump(tmp_path / str(span), {"model": {"user": table}})
        times = re.findall(r"from (\S+ \S+)", run("inspect", tmp_path / str(span)))
        assert len(times) == len(set(times)) == 8 and times == sorted(times)


@pytest.mark.parametrize(
    "package, command",
    [
        ("typer", ("inspect", "d")),
        ("rich", ("inspect", "d")),
        ("pyarrow", ("convert", "d", "out", "--to", "parquet")),
        ("safetensors", ("convert", "d", "out", "--to", "safetensors")),
        ("matplotlib", ("stats", "d", "--plot", "x.png")),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(
    tmp_path: Path, dumped: tuple[Path, embstore.Table], package: str, command: tuple[str, ...]
) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from embstore.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    extra = {"typer": "cli", "rich": "cli", "matplotlib": "plot"}.get(package, "files")
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: this needs {package}: pip install 'embstore[{extra}]'"
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_dump_is_wrong_use_and_not_damage(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for command in (("inspect",), ("verify",), ("top",), ("stats",)):
        said = run(*command, tmp_path / "folder", code=2)
        assert "error:" in said and "is not a dump" in said
    run("convert", tmp_path / "folder", tmp_path / "out", "--to", "v1a", code=2)
    run("convert", tmp_path / "nowhere", tmp_path / "out", "--to", "v1a", code=2)


# ---- for people and for programs


def test_every_answer_fits_80_columns_and_keys_can_be_pasted_back(tmp_path: Path) -> None:
    ugly = [-(2**63), 2**63 - 1, 1_234_567_890_123]
    wide = embstore.Table("user", dim=97, optimizer=embstore.Adam())
    wide.insert_or_assign(ugly, np.random.default_rng(0).normal(size=(3, 97)) * 1e-6)
    clicks = embstore.Table("clicks", dim=1, score_strategy="lfu")
    clicks.find_or_insert(np.random.default_rng(1).zipf(1.2, 1023))
    both = {"model.sparse": {"user": wide, "clicks": clicks}}
    embstore.dump(tmp_path / "a", both)
    clicks.erase([1])
    clicks.insert_or_assign([2], [[0.1234567891]])
    embstore.dump(tmp_path / "b", both)
    a, b = tmp_path / "a", tmp_path / "b"
    for command in (
        ("inspect", a),
        ("stats", a),
        ("top", a, "-n", 3),
        ("get", a, "--table", "user", "--", *ugly),
        ("diff", a, b),
    ):
        text = run(*command, code=1 if command[0] == "diff" else 0)
        assert all(len(line) <= 80 for line in text.splitlines()), text
    shown = run("top", a, "--table", "user")
    for line in shown.splitlines()[2:]:
        key = line.split()[0]
        assert int(key) in ugly and json.loads(run("get", "--json", a, "--", key))[0]["key"] == int(key)
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", shown), shown  # a time, not 19 digits


def test_errors_are_json_when_results_are(
    tmp_path: Path,
    dumped: tuple[Path, embstore.Table],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _ = dumped
    (tmp_path / "empty").mkdir()

    def refused(*arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["embstore", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as done:
            main()
        (error,) = (json.loads(line)["error"] for line in capfd.readouterr().err.splitlines())
        assert done.value.code == error["exit_code"] != 0
        return error

    assert refused("inspect", tmp_path / "empty")["kind"] == "not a dump"
    assert refused("get", path, 424242) == {"kind": "missing", "message": "424242", "exit_code": 1}
    assert refused("top", path, "-n", 0)["kind"] == "wrong use"
    assert "--bad" in refused("inspect", path, "--bad")["message"]
    assert refused("nothing")["kind"] == "wrong use"
    file = path / "model" / "user_values"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert refused("verify", path)["kind"] == "damaged"
    assert refused("convert", path, tmp_path / "out", "--to", "v2")["exit_code"] == 3


def test_commands_that_write_say_what_there_is_now(
    tmp_path: Path, dumped: tuple[Path, embstore.Table]
) -> None:
    for command in (("reshard", "--world", 3), ("convert", "--to", "v2"), ("convert", "--to", "parquet")):
        target = tmp_path / f"out-{command[-1]}"
        said = answer(command[0], dumped[0], target, *command[1:])
        files = [p for p in target.rglob("*") if p.is_file()]
        assert said == {
            "path": str(target),
            "files": len(files),
            "bytes": sum(p.stat().st_size for p in files),
        }


def test_warnings_are_json_lines_too(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "in" / "model").mkdir(parents=True)
    arrays = {"keys": np.arange(3), "values": np.ones((3, 2), np.float32), "state.odd": np.ones((3, 2))}
    save_file(arrays, tmp_path / "in" / "model" / "user.safetensors")
    result = CliRunner().invoke(
        app, ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "v1a", "--json"]
    )
    assert "odd" in json.loads(result.stderr)["warning"] and json.loads(result.stdout)["files"] > 0


def test_completion_is_offered_for_the_shell() -> None:
    text = run("--help")
    assert "--install-completion" in text and "--show-completion" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_progress_of_slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from embstore.cli import app as shared

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", 0.0)
    with shared.Bars("verifying") as report:
        for done in (10, 50):
            report(done, 100)
            time.sleep(0.11)
    assert "verifying" in screen.getvalue() and "50 %" in screen.getvalue()


def test_a_terminal_sees_work_that_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from embstore.cli import app as shared

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", 0.05)
    with shared.Bars("converting") as report:
        report(100, 100)  # all is written before the bar is there
        time.sleep(0.3)
    assert "100 %" in screen.getvalue()
    screen.seek(0)
    screen.truncate()
    with shared.Bars("converting") as report:
        report(100, 100)  # quick work shows nothing
    assert screen.getvalue() == ""
