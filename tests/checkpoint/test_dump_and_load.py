"""What is dumped is loaded again, in every layout, and what is damaged is refused."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import EXTREMES, files_in, keys_of, make, require_same, train

import embstore
from embstore import _core
from embstore.checkpoint.files import crc32
from embstore.checkpoint.names import file_stem, name_of

OPTIMIZERS = [
    embstore.SGD(lr=0.1),
    embstore.SGD(lr=0.1, momentum=0.9),
    embstore.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    embstore.RowwiseAdagrad(lr=0.1),
    embstore.AdamW(lr=0.1),
    embstore.Ftrl(),
    embstore.SmartDecayAdam(lr=0.1),
]
LAYOUTS = ("v1a", "v2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", [s.name.lower() for s in embstore.ScoreStrategy])
def test_every_strategy_comes_back_with_scores_and_counters(
    tmp_path: Path, layout: str, strategy: str
) -> None:
    table = make(score_strategy=strategy)
    train(table, 4)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True, layout=layout)
    back = make(score_strategy=strategy, seed=99)
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    require_same(table, back)
    assert back.optimizer_step == table.optimizer_step == 4
    if strategy in ("step", "customized", "aged_lfu", "importance"):
        assert back.score == table.score
    else:
        assert strategy == "lfu" or back.score > table.rows().scores.max()
    new = np.arange(1000, 1100)
    np.testing.assert_array_equal(back.initial_values(new), table.initial_values(new))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.engine_name}")
def test_every_optimizer_and_dtype_resumes_to_the_bit(
    tmp_path: Path, layout: str, dtype: str, optimizer: embstore.Optimizer
) -> None:
    whole = make(dtype=dtype, optimizer=optimizer)
    train(whole, 6)
    first = make(dtype=dtype, optimizer=optimizer)
    train(first, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": first}}, optim=True, layout=layout)
    second = make(dtype=dtype, optimizer=optimizer, seed=42)
    embstore.load(tmp_path / "d", {"model": {"user": second}}, optim=True)
    train(second, 3, first=3)
    require_same(whole, second)


def test_eviction_goes_on_in_the_same_order_after_a_load(tmp_path: Path) -> None:
    def full() -> embstore.Table:
        return make(max_capacity=256, bucket_capacity=128, init_capacity=256)

    table = full()
    train(table, 3, n=97)
    train(table, 4, first=7, n=200)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    back = full()
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    for step in range(20):
        for one in (table, back):
            one.find_or_insert(np.arange(step * 30, step * 30 + 30))
    require_same(table, back)


def test_without_optim_vectors_come_back_and_states_start_fresh(tmp_path: Path) -> None:
    table = make(optimizer=embstore.Adagrad(initial_accumulator_value=0.5))
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}})
    assert not any("opt_state" in name for name in files_in(tmp_path / "d"))
    back = make(optimizer=embstore.Adagrad(initial_accumulator_value=0.5))
    train(back, 5)
    embstore.load(tmp_path / "d", {"model": {"user": back}})
    require_same(table, back, states=False)
    assert (back.rows().states == 0.5).all()
    with pytest.raises(embstore.CheckpointError, match="user: has no optimizer states"):
        embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)


def test_load_replaces_what_is_there_and_keeps_the_rest(tmp_path: Path) -> None:
    table = make()
    train(table, 1)
    embstore.dump(tmp_path / "d", {"model": {"user": table}})
    back = make()
    back.insert_or_assign([7, 12345], np.ones((2, 5)))
    embstore.load(tmp_path / "d", {"model": {"user": back}})
    assert len(back) == len(table) + 1
    np.testing.assert_array_equal(back.find([12345])[0], np.ones((1, 5)))
    np.testing.assert_array_equal(back.find([7])[0], table.find([7])[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_table_is_empty_files(tmp_path: Path, layout: str) -> None:
    embstore.dump(tmp_path / "d", {"model": {"user": make()}}, optim=True, layout=layout)
    sizes = {name: len(data) for name, data in files_in(tmp_path / "d").items()}
    assert all(size == 0 for name, size in sizes.items() if not name.endswith(".json"))
    back = make()
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    assert len(back) == 0
    assert embstore.open_dump(tmp_path / "d")["model"]["user"].find([1])[1].tolist() == [False]


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    names = [
        "../../etc",
        "..",
        ".",
        "a/b",
        "a\\b",
        "nul\0",
        "ü 漢字\n",
        "%2F",
        "a_opt_state_m",
        "a",
        "x" * 300,
    ]
    names += ["x" * 299 + "y", ".hidden"]
    stems = [file_stem(name) for name in names]
    assert len(set(stems)) == len(names)
    assert [name_of(stem) for stem in stems if "%~" not in stem] == [n for n in names if len(n) < 200]
    tables = {name: make(name) for name in names}
    for number, table in enumerate(tables.values()):
        table.insert_or_assign([number], np.full((1, 5), number))
    collections = {"model.a/../..": tables, "..": {"t": make("t")}}
    embstore.dump(tmp_path / "in" / "d", collections, optim=True)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["d"]
    back = {name: make(name) for name in names}
    embstore.load(tmp_path / "in" / "d", {"model.a/../..": back}, optim=True)
    for name in names:
        require_same(tables[name], back[name])


# ---- layouts of the original package, written here by hand


def write(folder: Path, **arrays: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.asarray(array).tofile(folder / name)


def write_original(folder: Path, layout: str, table: embstore.Table, now: int) -> None:
    """The rows of an Adam table as the original package lays them out, on two ranks where it has ranks."""
    rows, dim = table.rows(), table.dim
    m, v = rows.states[:, :dim], rows.states[:, dim:]
    arguments: dict[str, Any] = {"lr": 0.25, "iters": 9, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    if layout == "v1a":
        write(folder, user_keys=rows.keys, user_values=rows.values, user_scores=rows.scores)
        turned = np.random.default_rng(0).permutation(len(rows))  # each state is a table of its own
        for name, state in (("m", m), ("v", v)):
            stem = f"user_opt_state_{name}"
            write(folder, **{f"{stem}_keys": rows.keys[turned], f"{stem}_values": state[turned]})
    elif layout == "v1b":
        joined = np.concatenate([rows.values, rows.states], axis=1)
        write(folder, user_keys=rows.keys, user_values=joined, user_scores=rows.scores)
    else:
        optimizer = "opt" if layout == "v2-alpha" else "emb_opt"
        scores = now - rows.scores.view(np.int64) if layout == "v2-age" else rows.scores
        for rank in range(2):
            mine = embstore.owner(rows.keys, 2) == rank
            arrays = {"emb_keys": rows.keys, "emb_values": rows.values, "emb_scores": scores}
            arrays[f"{optimizer}_values"] = rows.states
            for name, array in arrays.items():
                write(folder, **{f"user_{name}.rank_{rank}.world_size_2": array[mine]})
        if layout != "v2-alpha":
            strategy = "KLru" if layout == "v2-age" else "KCustomized"
            arguments |= {"opt_type": "adam", "evict_strategy": f"EvictStrategy.{strategy}", "step_score": 4}
    (folder / "user_opt_args.json").write_text(json.dumps(arguments, indent=4))


@pytest.mark.parametrize("layout", ["v1a", "v1b", "v2-alpha", "v2"])
def test_all_layouts_of_the_original_are_read(tmp_path: Path, layout: str) -> None:
    table = make()
    train(table, 3)
    write_original(tmp_path / "d" / "model", layout, table, now=0)
    back = make()
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    require_same(table, back)
    assert (back.optimizer_step, back.learning_rate, back.score) == (9, 0.25, 4)
    plain = make(optimizer=embstore.SGD())
    if layout in ("v1a", "v2-alpha"):
        embstore.load(tmp_path / "d", {"model": {"user": plain}})
        require_same(table, plain, states=False)
    stored = embstore.open_dump(tmp_path / "d")["model"]["user"]
    assert (stored.layout, stored.rows, stored.dim) == (layout, len(table), table.dim)
    np.testing.assert_array_equal(stored.find(EXTREMES)[0], table.find(EXTREMES)[0])


def test_ages_of_the_newest_layout_become_times_again(tmp_path: Path) -> None:
    table = make(score_strategy="timestamp")
    train(table, 3)
    now = table.score
    write_original(tmp_path / "d" / "model", "v2-age", table, now)
    back = make(score_strategy="timestamp")
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    ours, theirs = table.rows().scores, back.rows().scores
    np.testing.assert_array_equal(np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable"))
    assert len(set((theirs - ours).tolist())) == 1, "all are shifted by the same time"
    other = make()
    with pytest.warns(UserWarning, match="scores of table 'user' start fresh.*KLru.*'step'"):
        embstore.load(tmp_path / "d", {"model": {"user": other}}, optim=True)
    np.testing.assert_array_equal(other.rows().states, table.rows().states)
    assert (other.rows().scores == 1).all()


def test_padded_rowwise_states_are_read(tmp_path: Path) -> None:
    table = make(optimizer=embstore.RowwiseAdagrad())
    train(table, 3)
    rows = table.rows()
    for name, width in (("v1b", 4), ("half", 8)):
        padded = np.full((len(rows), width), 77.0, np.float32)
        padded[:, 0] = rows.states[:, 0]
        folder = tmp_path / name / "model"
        write(folder, user_keys=rows.keys, user_values=np.concatenate([rows.values, padded], axis=1))
        back = make(optimizer=embstore.RowwiseAdagrad())
        embstore.load(tmp_path / name, {"model": {"user": back}}, optim=True)
        np.testing.assert_array_equal(back.rows().states, rows.states)


def test_keys_and_values_alone_are_enough(tmp_path: Path) -> None:
    for strategy in embstore.ScoreStrategy:
        write(tmp_path / "d" / "model", user_keys=keys_of(0), user_values=np.ones((97, 5), np.float32))
        back = make(score_strategy=strategy)
        embstore.load(tmp_path / "d", {"model": {"user": back}})
        assert len(back) == 97
        np.testing.assert_array_equal(back.rows().values, np.ones((97, 5)))


def test_v2_is_written_as_the_original_writes_it(tmp_path: Path) -> None:
    table = make()
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True, layout="v2")
    folder = tmp_path / "d" / "model"
    tail = ".rank_0.world_size_1"
    names = {f"user_emb_{n}{tail}" for n in ("keys", "values", "scores", "opt_values")}
    assert {p.name for p in folder.iterdir()} == names | {"user_opt_args.json", "embstore.json"}
    keys = np.fromfile(folder / f"user_emb_keys{tail}", "<i8")
    stored = table.read(keys)
    assert (folder / f"user_emb_values{tail}").read_bytes() == stored.values.tobytes()
    assert (folder / f"user_emb_opt_values{tail}").read_bytes() == stored.states.tobytes()
    assert (folder / f"user_emb_scores{tail}").read_bytes() == stored.scores.tobytes()
    assert json.loads((folder / "user_opt_args.json").read_text()) == {
        "lr": 0.1,
        "iters": 3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "opt_type": "adam",
        "evict_strategy": "EvictStrategy.KCustomized",
        "step_score": 4,
        "dist_type": "roundrobin",
    }


# ---- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def cut_a_row(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12345678")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def test_counts_of_the_original_go_into_an_aged_table_but_not_its_moment(tmp_path: Path) -> None:
    table = make()
    train(table, 3)
    write_original(tmp_path / "d" / "model", "v2", table, now=0)
    file = tmp_path / "d" / "model" / "user_opt_args.json"
    arguments = json.loads(file.read_text())
    file.write_text(json.dumps({**arguments, "evict_strategy": "EvictStrategy.KLfu", "step_score": 1}))
    back = make(score_strategy="aged_lfu")
    moment = back.score
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    assert back.score == moment and len(back) == len(table)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", [cut, cut_a_row, lengthen, flip, remove], ids=lambda f: f.__name__)
def test_every_damaged_file_is_refused_by_name(
    tmp_path: Path, layout: str, damage: Callable[[Path], None]
) -> None:
    table, back = make(), make()
    train(table, 2)
    train(back, 1)
    before = back.rows()
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True, layout=layout)
    for path in sorted((tmp_path / "d" / "model").iterdir()):
        whole = path.read_bytes()
        damage(path)
        if path.name == "embstore.json" and damage is remove:
            pass  # then it is a dump without a manifest, which is legal
        else:
            with pytest.raises((embstore.CheckpointError, FileNotFoundError), match=path.name):
                embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
                embstore.open_dump(tmp_path / "d").verify()
            require_same(before, back)
        path.write_bytes(whole)
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)


def test_mixed_dumps_are_refused(tmp_path: Path) -> None:
    table = make()
    train(table, 1)
    for name in ("a", "b"):
        embstore.dump(tmp_path / name, {"model.x": {"user": table}})
    embstore.dump(tmp_path / "v2", {"model.x": {"user": table}}, layout="v2")
    for path in (tmp_path / "v2" / "model.x").iterdir():
        if "rank_" in path.name:
            (tmp_path / "a" / "model.x" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(embstore.CheckpointError, match="layouts are mixed"):
        embstore.open_dump(tmp_path / "a")
    os.rename(tmp_path / "v2" / "model.x", tmp_path / "b" / "model.y")
    with pytest.raises(embstore.CheckpointError, match="mixed|missing"):
        embstore.open_dump(tmp_path / "b")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    table = make()
    train(table, 1)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    for what, other in {
        "dim": make(dim=6),
        "optimizer": make(optimizer=embstore.Adagrad()),
    }.items():
        with pytest.raises(embstore.CheckpointError, match=f"model/user: {what} of table 'user'"):
            embstore.load(tmp_path / "d", {"model": {"user": other}}, optim=True)
        assert len(other) == 0
    with pytest.raises(embstore.CheckpointError, match="item_keys: is missing"):
        embstore.load(tmp_path / "d", {"model": {"item": make("item")}})
    with pytest.raises(embstore.CheckpointError, match="other: is missing"):
        embstore.load(tmp_path / "d", {"other": {"user": make()}})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        embstore.load(tmp_path / "nowhere", {"model": {"user": make()}})


@pytest.mark.parametrize("optim", [False, True])
@pytest.mark.parametrize(
    "theirs, ours", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
)
def test_rows_of_another_dtype_are_rounded_and_states_kept(
    tmp_path: Path, theirs: str, ours: str, optim: bool
) -> None:
    table, back, oracle = make(dtype=theirs), make(dtype=ours), make(dtype=ours)
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=optim)
    rows = table.rows()
    oracle.insert_or_assign(rows.keys, rows.values, states=rows.states, scores=rows.scores)
    require_same(oracle, back, states=optim)
    assert (back.rows().values != rows.values).any() == (ours != "float32")


@pytest.mark.parametrize("theirs", [s.name.lower() for s in embstore.ScoreStrategy])
@pytest.mark.parametrize("ours", [s.name.lower() for s in embstore.ScoreStrategy])
def test_scores_of_another_strategy_start_fresh_with_a_warning(
    tmp_path: Path, theirs: str, ours: str, recwarn: pytest.WarningsRecorder
) -> None:
    table, back = make(score_strategy=theirs), make(score_strategy=ours)
    train(table, 3)
    if ours == "step":
        back.score = 77
    before = back.score
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    embstore.load(tmp_path / "d", {"model": {"user": back}}, optim=True)
    stored, loaded = table.rows(), back.rows()
    for name in ("keys", "values", "states"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(loaded, name))
    clocks = {"timestamp", "no_eviction"}
    if ours in (theirs, "customized") or {theirs, ours} == clocks:
        np.testing.assert_array_equal(stored.scores, loaded.scores)
        assert not recwarn.list
    else:
        (warning,) = recwarn.list
        assert f"'user' start fresh: those of {tmp_path}" in str(warning.message)
        fresh = loaded.scores
        if ours in clocks:
            assert (fresh >= before).all()
        else:
            assert (fresh == {"step": 77, "lfu": 1}.get(ours, before)).all()


def test_a_newer_format_and_a_forged_manifest_are_refused(tmp_path: Path) -> None:
    embstore.dump(tmp_path / "d", {"model": {"user": make()}})
    path = tmp_path / "d" / "model" / "embstore.json"
    text = path.read_text()
    path.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(embstore.CheckpointError, match=r"embstore\.json: its checksum is wrong"):
        embstore.open_dump(tmp_path / "d")
    document = json.loads(text)
    document["version"] = 2
    del document["crc32"]
    plain = json.dumps(document, indent=1, sort_keys=True)
    document["crc32"] = zlib.crc32(plain.encode())
    path.write_text(json.dumps(document))
    with pytest.raises(embstore.CheckpointError, match=r"embstore\.json: version should be 1 but is: 2"):
        embstore.open_dump(tmp_path / "d")


def test_checksums_are_those_of_zlib() -> None:
    for n in (0, 1, 15, 16, 63, 64, 65, 97, 1023, 100_003):
        data = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
        assert crc32(data) == zlib.crc32(data.tobytes())
        assert crc32(data, 5) == zlib.crc32(data.tobytes(), 5)
        head, tail = data[: n // 3].tobytes(), data[n // 3 :].tobytes()
        assert _core.crc32_combine(zlib.crc32(head), zlib.crc32(tail), len(tail)) == zlib.crc32(head + tail)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["timestamp", "step", "lfu"])
def test_a_smaller_table_keeps_the_highest_scores(tmp_path: Path, layout: str, strategy: str) -> None:
    large = make(score_strategy=strategy)
    keys = np.random.default_rng(0).permutation(1000)
    scores = np.random.default_rng(1).permutation(1000) + 1
    large.insert_or_assign(keys, np.repeat(scores[:, None], 5, 1), scores=scores)
    embstore.dump(tmp_path / "d", {"model": {"user": large}}, optim=True, layout=layout)
    small = make(score_strategy=strategy, init_capacity=128, max_capacity=128)  # one bucket
    with pytest.warns(UserWarning, match="'user' has no room for 872 of 1000 rows"):
        embstore.load(tmp_path / "d", {"model": {"user": small}}, optim=True)
    kept = small.rows()
    assert sorted(kept.scores.tolist()) == list(range(873, 1001))
    np.testing.assert_array_equal(kept.values[:, 0], kept.scores)
    assert small.stats().refusals == 0


def test_a_damaged_file_leaves_an_empty_table_empty_and_a_filled_one_as_it_was(tmp_path: Path) -> None:
    table = make()
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model": {"user": table}}, optim=True)
    flip(tmp_path / "d" / "model" / "user_values")
    empty, filled = make(), make()
    filled.find_or_insert([5])
    before = filled.rows()
    for target in (empty, filled):
        with pytest.raises(embstore.CheckpointError, match="user_values: its checksum is wrong"):
            embstore.load(tmp_path / "d", {"model": {"user": target}}, optim=True)
    assert len(empty) == 0 and empty.optimizer_step == 0 and empty.score == 1
    require_same(filled, before)
