"""What is refused, how it is said, and that a refused load changes nothing."""

from __future__ import annotations

import json
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import make, require_same, train
from checkpoint.test_damage import sealed
from checkpoint.test_dump_and_load import write, write_original

import embstore
from embstore.checkpoint.fitting import Match
from embstore.checkpoint.manifest import Manifest
from embstore.checkpoint.parts import RowFile


@pytest.mark.parametrize("optim", [False, True])
@pytest.mark.parametrize("optimizer", [embstore.SGD(), embstore.Adagrad(), embstore.RowwiseAdagrad()])
@pytest.mark.parametrize("dim", [3, 4, 7])
def test_vectors_of_another_width_are_not_cut(
    tmp_path: Path, dim: int, optimizer: embstore.Optimizer, optim: bool
) -> None:
    write(tmp_path / "model", user_keys=np.arange(9), user_values=np.ones((9, 8), np.float32))
    table = make(dim=dim, optimizer=optimizer)
    states = {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[optimizer.engine_name]
    # With optim the caller says that what is behind the vector are the states of this optimizer.
    fits = optim and states and (8 - dim == states or (states == 1 and 8 - dim in (1, 4, 8)))
    if fits:
        embstore.load(tmp_path, {"model": {"user": table}}, optim=True)
        return
    with pytest.raises(embstore.CheckpointError, match="user_values: .*(found 8|of optimizer state)"):
        embstore.load(tmp_path, {"model": {"user": table}}, optim=optim)
    assert len(table) == 0


def test_vectors_beside_their_states_are_not_cut(tmp_path: Path) -> None:
    table = make(dim=8)
    train(table, 1)
    write_original(tmp_path / "model", "v1a", table, now=0)
    small = make(dim=4)
    with pytest.raises(embstore.CheckpointError, match="expected vectors of 4 components, found 8"):
        embstore.load(tmp_path, {"model": {"user": small}})
    write_original(tmp_path / "b" / "model", "v1b", table, now=0)
    back = make(dim=8, optimizer=embstore.SGD())
    embstore.load(tmp_path / "b", {"model": {"user": back}})
    require_same(table, back, states=False)


def dumped(path: Path) -> embstore.Table:
    table = make()
    train(table, 2)
    embstore.dump(path, {"model": {"user": table}}, optim=True)
    return table


@pytest.mark.parametrize("rows", [[10**18], [96], [98], [97, 10**15], [-1], []])
def test_rows_of_rank_that_are_not_in_the_files_are_refused_at_once(tmp_path: Path, rows: list[int]) -> None:
    dumped(tmp_path)
    path = tmp_path / "model" / "embstore.json"
    document = json.loads(path.read_text())
    document["tables"]["user"]["rows_of_rank"] = rows
    document["world"] = max(len(rows), 1)
    path.write_text(sealed(document))
    with pytest.raises(embstore.CheckpointError, match=r"embstore\.json: .*rows_of_rank"):
        embstore.load(tmp_path, {"model": {"user": make()}}, optim=True)


def test_a_file_that_shrinks_during_a_load_is_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(tmp_path)
    read = RowFile.read

    def shrinking(self: RowFile, *arguments: Any) -> Any:
        os.truncate(tmp_path / "model" / "user_values", 40)
        return read(self, *arguments)

    monkeypatch.setattr(RowFile, "read", shrinking)
    table = make()
    with pytest.raises(embstore.CheckpointError, match="user_values: the file ends .* bytes too early"):
        embstore.load(tmp_path, {"model": {"user": table}}, optim=True)
    assert len(table) == 0


def test_counters_that_are_none_are_refused_before_a_row_changes(tmp_path: Path) -> None:
    table, back = make(), make()
    train(table, 2)
    write_original(tmp_path / "model", "v2", table, now=0)
    arguments = tmp_path / "model" / "user_opt_args.json"
    arguments.write_text(arguments.read_text().replace('"iters": 9', '"iters": "many"'))
    back.insert_or_assign([5], np.ones((1, 5)))
    before, score = back.rows(), back.score
    with pytest.raises(embstore.CheckpointError, match=r"opt_args\.json: iters should be a number"):
        embstore.load(tmp_path, {"model": {"user": back}}, optim=True)
    require_same(before, back)
    assert (back.score, back.learning_rate) == (score, 0.1)


@pytest.mark.parametrize(("name", "most"), [("iters", 2**62 - 1), ("step_score", 2**64 - 1)])
def test_counters_of_the_original_end_where_those_of_a_table_do(tmp_path: Path, name: str, most: int) -> None:
    table = make()
    train(table, 2)
    write_original(tmp_path / "model", "v2", table, now=0)
    arguments = tmp_path / "model" / "user_opt_args.json"
    document = json.loads(arguments.read_text())
    arguments.write_text(json.dumps({**document, name: most}))
    embstore.load(tmp_path, {"model": {"user": make()}}, optim=True)
    arguments.write_text(json.dumps({**document, name: most + 1}))
    back = make()
    with pytest.raises(embstore.CheckpointError, match=f"{name} should be a number from 0 to {most} but is"):
        embstore.load(tmp_path, {"model": {"user": back}}, optim=True)
    assert len(back) == 0


@pytest.mark.parametrize("name", ["seed", "score"])
def test_seeds_and_scores_of_a_manifest_have_64_bits(tmp_path: Path, name: str) -> None:
    dumped(tmp_path)
    path = tmp_path / "model" / "embstore.json"
    document = json.loads(path.read_text())
    document["tables"]["user"][name] = 2**64 - 1
    path.write_text(sealed(document))
    spec = embstore.open_dump(tmp_path)["model"]["user"].spec
    assert getattr(spec, name) == 2**64 - 1
    document["tables"]["user"][name] = 2**64
    path.write_text(sealed(document))
    with pytest.raises(embstore.CheckpointError, match=f"{name} should be an integer from 0 to {2**64 - 1}"):
        embstore.open_dump(tmp_path)


def test_what_a_dump_says_about_itself_cannot_be_changed(tmp_path: Path) -> None:
    """Its tables share it, and so do all that read them."""
    dumped(tmp_path)
    stored = embstore.open_dump(tmp_path)["model"]["user"]
    for described in (stored.spec, stored.entry, Manifest.read(tmp_path / "model")):
        assert described is not None
        for field in fields(described):
            with pytest.raises(FrozenInstanceError):
                setattr(described, field.name, None)


def test_an_empty_table_is_empty_again_when_rows_cannot_be_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(tmp_path)
    assign, placed = Match.assign, []

    def failing(self: Match, rows: embstore.Rows) -> None:
        assign(self, rows)
        placed.append(len(rows))
        raise MemoryError("no memory")

    monkeypatch.setattr(Match, "assign", failing)
    back = make()
    with pytest.raises(MemoryError):
        embstore.load(tmp_path, {"model": {"user": back}}, optim=True)
    assert placed and len(back) == 0 and back.optimizer_step == 0


def test_messages_say_what_was_expected_and_what_was_found(tmp_path: Path) -> None:
    dumped(tmp_path)
    path = tmp_path / "model" / "user_scores"
    size = path.stat().st_size
    os.truncate(path, 100)
    with pytest.raises(embstore.CheckpointError, match=f"is truncated: expected {size} bytes, found 100"):
        embstore.open_dump(tmp_path)


def test_what_is_not_a_dump_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for read in (embstore.open_dump, lambda path: embstore.load(path, {"model": {"user": make()}})):
        with pytest.raises(embstore.CheckpointError, match="is not a dump: it has neither embstore.json nor"):
            read(tmp_path)
    embstore.IncrementLog.create(tmp_path / "log", {"model": {"user": make()}})
    with pytest.raises(embstore.CheckpointError, match="is an increment log, not a dump"):
        embstore.open_dump(tmp_path / "log")


def test_files_of_another_number_of_ranks_beside_a_dump_are_refused(tmp_path: Path) -> None:
    table = make()
    train(table, 2)
    write_original(tmp_path / "model", "v2", table, now=0)
    names = [path.name for path in (tmp_path / "model").glob("*.rank_0.world_size_2")]
    for name in names:
        data = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name.replace("size_2", "size_3")).write_bytes(data)
    back = make()
    with pytest.raises(embstore.CheckpointError, match=r"different world sizes are mixed: \[2, 3\]"):
        embstore.load(tmp_path, {"model": {"user": back}}, optim=True)
    assert len(back) == 0


@pytest.mark.parametrize("by", [-8, 8, -3])
def test_scores_that_are_not_one_for_each_key_are_refused(tmp_path: Path, by: int) -> None:
    table = make()
    train(table, 2)
    write_original(tmp_path / "model", "v2", table, now=0)
    scores = tmp_path / "model" / "user_emb_scores.rank_1.world_size_2"
    os.truncate(scores, scores.stat().st_size + by)
    back = make()
    said = f"{scores.name}: is {'too long' if by > 0 else 'truncated'}"
    with pytest.raises(embstore.CheckpointError, match=said):
        embstore.load(tmp_path, {"model": {"user": back}})
    with pytest.raises(embstore.CheckpointError, match=said):
        embstore.open_dump(tmp_path)
    assert len(back) == 0


def test_a_misspelt_table_is_told_with_the_names_that_the_dump_has(tmp_path: Path) -> None:
    embstore.dump(tmp_path / "dump", {"model": {"user": make()}})
    table = embstore.Table("usr", dim=5)
    with pytest.raises(
        embstore.CheckpointError, match=r"table 'usr' is not in the dump, which has: model/user$"
    ):
        embstore.load(tmp_path / "dump", {"model": {"usr": table}})
    with pytest.raises(
        embstore.CheckpointError, match=r"collection of table 'usr' .* which has: model/user$"
    ):
        embstore.load(tmp_path / "dump", {"modle": {"usr": table}})


def test_a_table_under_another_name_than_its_own_is_told_with_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="under its own name, 'user', but in 'model' it is under: 'users'"):
        embstore.dump(tmp_path / "dump", {"model": {"users": make()}})
