"""Dumps in the layout of the current original package: which bytes we write, and what we read of others."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faces.dynamicemb.small_tables import LFU, STEP, TIMESTAMP, Strategy, options, tables, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import embstore
from dynamicemb import DynamicEmbDump, DynamicEmbEvictStrategy, DynamicEmbLoad
from dynamicemb.batched_dynamicemb_tables import encode_checkpoint_file_path, encode_meta_json_file_path
from dynamicemb.incremental_dump import get_score, incremental_dump, set_score

TAIL = ".rank_0.world_size_1"
OURS = "embstore.json"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != OURS}


def _rows(module: Any, name: str = "t0") -> embstore.Rows:
    return module.dynamic_tables[name].table.rows()


def _dumped(folder: Path, module: Any, **keywords: Any) -> dict[str, bytes]:
    DynamicEmbDump(str(folder), module, counter=False, **keywords)
    return _files(folder / "model")


STATES = {EmbOptimType.SGD: 0, EmbOptimType.ADAM: 8, EmbOptimType.EXACT_ADAGRAD: 4}
STATES[EmbOptimType.EXACT_ROWWISE_ADAGRAD] = 1


@pytest.mark.parametrize("optimizer", STATES)
def test_a_dump_has_exactly_the_files_sizes_and_types_of_the_layout(
    optimizer: EmbOptimType, tmp_path: Path
) -> None:
    module = tables(options(score_strategy=STEP), options(score_strategy=STEP), optimizer=optimizer)
    module(torch.tensor([7, -1, 1 << 62]), torch.tensor([0, 3, 3])).sum().backward()
    for optim in (False, True):
        files = _dumped(tmp_path / str(optim), module, optim=optim)
        items = ["keys", "values", "scores", *(["opt_values"] if optim else [])]
        names = {f"{t}_emb_{item}{TAIL}" for t in ("t0", "t1") for item in items}
        assert set(files) == names | {"t0_opt_args.json", "t1_opt_args.json"}
        assert all(files[f"t1_emb_{item}{TAIL}"] == b"" for item in items), "an empty table is empty files"
        keys = np.frombuffer(files[f"t0_emb_keys{TAIL}"], np.int64)
        order = np.argsort(keys)
        rows = _rows(module)
        assert keys[order].tolist() == rows.keys.tolist() == [-1, 7, 1 << 62]
        values = np.frombuffer(files[f"t0_emb_values{TAIL}"], np.float32).reshape(3, 4)
        assert values[order].tobytes() == rows.values.tobytes()
        assert np.frombuffer(files[f"t0_emb_scores{TAIL}"], np.int64).tolist() == [1, 1, 1]
        if optim:
            states = np.frombuffer(files[f"t0_emb_opt_values{TAIL}"], np.float32)
            assert states.reshape(3, STATES[optimizer])[order].tobytes() == rows.states.tobytes()


@pytest.mark.parametrize(
    ("strategy", "evict", "step"),
    [
        (TIMESTAMP, "KLru", 0),
        (Strategy.NO_EVICTION, "KCustomized", 0),
        (STEP, "KCustomized", 3),
        (Strategy.CUSTOMIZED, "KCustomized", 41),
        (LFU, "KLfu", 1),
        ((LFU, TIMESTAMP), "KLfu", 0),
    ],
)
def test_the_meta_file_has_these_bytes(strategy: Any, evict: str, step: int, tmp_path: Path) -> None:
    module = tables(options(score_strategy=strategy))
    if strategy == Strategy.CUSTOMIZED:
        set_score(module, 41)
    train(module, 7)
    train(module, 7, 9)
    files = _dumped(tmp_path / "d", module)
    expected = {
        "lr": 0.5,
        "opt_type": "sgd",
        "evict_strategy": f"EvictStrategy.{evict}",
        "step_score": step,
        "dist_type": "roundrobin",
    }
    assert files["t0_opt_args.json"].decode() == json.dumps(expected, indent=4)
    adam = tables(options(score_strategy=strategy), optimizer=EmbOptimType.ADAM, eps=1e-6, weight_decay=0.25)
    assert json.loads(_dumped(tmp_path / "adam", adam)["t0_opt_args.json"]) == {
        **expected,
        "step_score": {STEP: 1, Strategy.CUSTOMIZED: 0}.get(strategy, step),
        "opt_type": "adam",
        "iters": 0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.25,
    }


def test_scores_of_timestamps_are_ages_and_others_raw(tmp_path: Path) -> None:
    module = tables(options(), options(score_strategy=Strategy.NO_EVICTION), options(score_strategy=LFU))
    module(torch.tensor([7, 7, 7, 7]), torch.tensor([0, 1, 2, 4])).sum().backward()
    taken = [_rows(module, name).scores[0] for name in ("t0", "t1")]
    files = _dumped(tmp_path / "d", module)
    age, raw, count = (int(np.frombuffer(files[f"t{i}_emb_scores{TAIL}"], np.int64)[0]) for i in range(3))
    assert 0 <= age < 60 * 10**9 and raw == taken[1] and count == 2
    again = tables(options(), options(score_strategy=Strategy.NO_EVICTION), options(score_strategy=LFU))
    DynamicEmbLoad(str(tmp_path / "d"), again)
    assert [_rows(again, name).scores[0] for name in ("t0", "t1", "t2")] == [*taken, 2]


# ---- compound scores


@pytest.mark.parametrize("strategy", [(TIMESTAMP, LFU), (LFU, TIMESTAMP)])
@pytest.mark.parametrize("layout", ["v1a", "v2"])
def test_a_compound_evicts_by_count_dumps_by_time_and_survives_a_dump(
    strategy: Any, layout: str, tmp_path: Path
) -> None:
    def build() -> Any:
        return tables(options(score_strategy=strategy, max_capacity=128))

    module = build()
    often = list(range(60))
    for _ in range(3):
        train(module, *often)
    train(module, *often[:30], *often[:30])
    before = (get_score(module) or {})["model"]["t0"]
    train(module, *range(1000, 1040))
    answer = incremental_dump(module, {"model": {"t0": before}})
    assert answer and answer[0]["model"]["t0"][0].tolist() == list(range(1000, 1040))
    later = incremental_dump(module, answer[1])
    assert later and later[0]["model"]["t0"][0].tolist() == [], "nothing was used since"
    train(module, 1000, 3)
    again = incremental_dump(module, answer[1])
    assert again and again[0]["model"]["t0"][0].tolist() == [3, 1000], "a key that is used again comes again"

    DynamicEmbDump(str(tmp_path / "d"), module, layout=layout)
    if layout == "v2":
        files = _files(tmp_path / "d" / "model")
        words = np.frombuffer(files[f"t0_emb_scores{TAIL}"], np.int64).reshape(-1, 2)
        keys = np.frombuffer(files[f"t0_emb_keys{TAIL}"], np.int64)
        found = dict(zip(keys.tolist(), words.tolist(), strict=True))
        times, counts = (strategy.index(word) for word in (TIMESTAMP, LFU))
        assert [found[key][counts] for key in (3, 45, 1000, 1001)] == [6, 3, 2, 1]
        rows = _rows(module)
        assert {key: word[times] for key, word in found.items()} == dict(
            zip(rows.keys.tolist(), rows.scores.tolist(), strict=True)
        )
        assert not any("uses" in name for name in files)
    restored = build()
    DynamicEmbLoad(str(tmp_path / "d"), restored)
    for twin in (module, restored):
        for first in range(5000, 5400, 20):
            train(twin, *range(first, first + 20))
        left = set(_rows(twin).keys.tolist())
        assert set(often) <= left, "used three times or more, and long ago"


def test_compound_scores_of_other_tools_load_and_another_number_of_words_starts_fresh(tmp_path: Path) -> None:
    root = tmp_path / "d" / "model"
    _write_by_hand(root, scores=None)
    words = np.array([[5, 1_700_000_000_000_000_000], [2, 1_700_000_000_000_000_007]], np.int64)
    words.tofile(encode_checkpoint_file_path(str(root), "t0", 0, 1, "scores"))
    compound = tables(options(score_strategy=(LFU, TIMESTAMP)))
    DynamicEmbLoad(str(tmp_path / "d"), compound)
    assert _rows(compound).scores.tolist() == [words[0, 1], words[1, 1]]
    single = tables(options(score_strategy=LFU))
    with pytest.warns(UserWarning, match="start fresh.*another number of words"):
        DynamicEmbLoad(str(tmp_path / "d"), single)
    assert _rows(single).scores.tolist() == [1, 1]


def test_counts_of_use_beside_other_scores_survive_a_dump(tmp_path: Path) -> None:
    def build() -> Any:
        by_use = DynamicEmbEvictStrategy.LFU
        return tables(options(score_strategy=STEP, evict_strategy=by_use, max_capacity=128))

    module = build()
    for _ in range(3):
        train(module, *range(60))
    for layout in ("v1a", "v2"):
        DynamicEmbDump(str(tmp_path / layout), module, layout=layout)
        restored = build()
        DynamicEmbLoad(str(tmp_path / layout), restored)
        for first in range(5000, 5400, 20):
            train(restored, *range(first, first + 20))
        assert set(range(60)) <= set(_rows(restored).keys.tolist())


# ---- dumps that were written by hand


def _write_by_hand(root: Path, *, meta: str | None = "{}", scores: int | None = 0, name: str = "t0") -> None:
    os.makedirs(root, exist_ok=True)

    def path(item: str) -> str:
        return encode_checkpoint_file_path(str(root), name, 0, 1, item)

    np.array([5, 1 << 60], np.int64).tofile(path("keys"))
    np.full((2, 4), 0.75, np.float32).tofile(path("values"))
    if scores is not None:
        np.full(2, scores, np.int64).tofile(path("scores"))
    if meta is not None:
        Path(encode_meta_json_file_path(str(root), name)).write_text(meta)


@pytest.mark.parametrize("strategy", [*Strategy, (TIMESTAMP, LFU)])
@pytest.mark.parametrize("meta", [None, "{}"])
@pytest.mark.parametrize("scores", [None, 0])
def test_a_dump_by_hand_loads_under_any_strategy(
    strategy: Any, meta: str | None, scores: int | None, tmp_path: Path
) -> None:
    _write_by_hand(tmp_path / "d" / "model", meta=meta, scores=scores)
    module = tables(options(score_strategy=strategy))
    if strategy == Strategy.CUSTOMIZED:
        set_score(module, 3)
    with warnings.catch_warnings():
        if scores is None or not isinstance(strategy, tuple):
            warnings.simplefilter("error")
        else:
            warnings.simplefilter("ignore")  # one word is not a compound
        DynamicEmbLoad(str(tmp_path / "d"), module, counter=True)
    assert _rows(module).keys.tolist() == [5, 1 << 60]
    assert (_rows(module).values == 0.75).all() and (_rows(module).scores > 0).all()
    train(module, 5, 6)


def test_linked_folders_may_have_another_name_than_the_collection(tmp_path: Path) -> None:
    module = tables(options())
    train(module, 7, 9)
    DynamicEmbDump(str(tmp_path / "d"), torch.nn.ModuleDict({"ebc": module}), counter=True)
    (tmp_path / "linked").mkdir()
    for name in ("model.ebc", "model.ebc_user"):
        os.symlink(tmp_path / "d" / "model.ebc", tmp_path / "linked" / name)
    again = tables(options())
    DynamicEmbLoad(str(tmp_path / "linked"), torch.nn.ModuleDict({"ebc_user": again}))
    assert _rows(again).keys.tolist() == [7, 9]


# ---- what does not fit


def test_a_table_without_files_is_named_and_kept_unless_it_was_asked_for(tmp_path: Path) -> None:
    old = tables(options())
    train(old, 7)
    DynamicEmbDump(str(tmp_path / "d"), old)
    new = tables(options(), options())
    new(torch.tensor([3]), torch.tensor([0, 0, 1])).sum().backward()
    with pytest.warns(UserWarning, match="table 't1' is not in the dump and keeps its rows"):
        DynamicEmbLoad(str(tmp_path / "d"), new)
    assert (_rows(new, "t0").keys.tolist(), _rows(new, "t1").keys.tolist()) == ([7], [3])
    with pytest.raises(embstore.CheckpointError, match="t1_keys: is missing"):
        DynamicEmbLoad(str(tmp_path / "d"), new, table_names={"model": ["t0", "t1"]})


def test_some_missing_files_of_a_table_raise(tmp_path: Path) -> None:
    root = tmp_path / "d" / "model"
    _write_by_hand(root)
    os.remove(encode_checkpoint_file_path(str(root), "t0", 0, 1, "values"))
    with pytest.raises(embstore.CheckpointError, match="t0_emb_values"):
        DynamicEmbLoad(str(tmp_path / "d"), tables(options()))


@pytest.mark.parametrize("layout", ["v1a", "v2"])
@pytest.mark.parametrize("manifest", [True, False])
def test_another_optimizer_keeps_the_vectors_and_starts_states_fresh(
    layout: str, manifest: bool, tmp_path: Path
) -> None:
    adam = tables(options(), optimizer=EmbOptimType.ADAM)
    train(adam, 7, 9)
    DynamicEmbDump(str(tmp_path / "d"), adam, optim=True, layout=layout)
    if not manifest:
        os.remove(tmp_path / "d" / "model" / OURS)
    adagrad = tables(options(), optimizer=EmbOptimType.EXACT_ADAGRAD, initial_accumulator_value=0.125)
    with pytest.warns(UserWarning, match="optimizer states of table 't0' start fresh"):
        DynamicEmbLoad(str(tmp_path / "d"), adagrad, optim=True)
    assert _rows(adagrad).values.tobytes() == _rows(adam).values.tobytes()
    assert (_rows(adagrad).states == 0.125).all()


def test_another_strategy_keeps_the_rows_and_starts_scores_fresh(tmp_path: Path) -> None:
    module = tables(options(score_strategy=STEP))
    train(module, 7)
    DynamicEmbDump(str(tmp_path / "d"), module, counter=True)
    other = tables(options(score_strategy=LFU))
    with pytest.warns(UserWarning, match="scores of table 't0' start fresh"):
        DynamicEmbLoad(str(tmp_path / "d"), other)
    assert _rows(other).scores.tolist() == [1]


def test_local_keys_of_blocks_from_several_ranks_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "d" / "model"
    _write_by_hand(root, meta='{"dist_type": "continuous"}')
    DynamicEmbLoad(str(tmp_path / "d"), tables(options()))
    for path in list(root.iterdir()):
        if TAIL in path.name:
            path.rename(root / path.name.replace(TAIL, ".rank_0.world_size_2"))
    for item in ("keys", "values", "scores"):
        Path(encode_checkpoint_file_path(str(root), "t0", 1, 2, item)).write_bytes(b"")
    with pytest.raises(embstore.CheckpointError, match="'continuous' from 2 ranks"):
        DynamicEmbLoad(str(tmp_path / "d"), tables(options()))
