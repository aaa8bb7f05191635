"""Files of the original package without a manifest: what sizes and names leave open, and its counters."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoint.tables import keys_of, make, require_same, train
from checkpoint.test_dump_and_load import write, write_original

import embstore
from embstore.key_counts import KeyCounts

KEYS = keys_of(1, 31)
VALUES = np.random.default_rng(2).standard_normal((31, 5)).astype(np.float32)
COUNTED = np.array([11, -7, 2**62, -(2**63), 0])
SEEN = np.array([1, 2, 3, 4, 5])
COUNTS_OF_USE = (("keys", np.int64), ("uses", np.uint32))  # files and what they hold


def write_rows(folder: Path, rows: np.ndarray, **arguments: object) -> None:
    write(folder, user_keys=KEYS, user_values=rows.astype(np.float32))
    (folder / "user_opt_args.json").write_text(json.dumps(arguments))


@pytest.mark.parametrize(("state", "arguments"), [(5, {"eps": 1e-8}), (10, {"beta1": 0.9, "eps": 1e-8})])
def test_vectors_are_read_without_the_states_behind_them(
    tmp_path: Path, state: int, arguments: dict[str, float]
) -> None:
    rows = np.concatenate([VALUES, np.full((31, state), 7.0)], axis=1)
    write_rows(tmp_path / "model", rows, lr=0.1, **arguments)
    back = make(optimizer=embstore.SGD())
    embstore.load(tmp_path, {"model": {"user": back}})
    np.testing.assert_array_equal(back.find(KEYS)[0], VALUES)


@pytest.mark.parametrize(("state", "arguments"), [(10, {"eps": 1e-8}), (5, {"beta1": 0.9}), (5, {})])
def test_rows_with_more_than_the_states_of_their_optimizer_are_refused(
    tmp_path: Path, state: int, arguments: dict[str, float]
) -> None:
    rows = np.concatenate([VALUES, np.full((31, state), 7.0)], axis=1)
    write_rows(tmp_path / "model", rows, lr=0.1, **arguments)
    back = make(optimizer=embstore.SGD())
    with pytest.raises(embstore.CheckpointError, match="expected vectors of 5 components, found"):
        embstore.load(tmp_path, {"model": {"user": back}})
    assert len(back) == 0


@pytest.mark.parametrize(("arguments", "dim"), [({}, 30), ({"eps": 1e-8}, 15), ({"beta1": 0.9}, 10)])
def test_the_optimizer_tells_the_dim_of_rows_that_no_table_is_known_for(
    tmp_path: Path, arguments: dict[str, float], dim: int
) -> None:
    write_rows(tmp_path / "model", np.tile(VALUES, 6), lr=0.1, **arguments)
    assert embstore.open_dump(tmp_path)["model"]["user"].dim == dim


def test_states_of_another_optimizer_are_told_by_its_name_or_by_their_own(tmp_path: Path) -> None:
    table = make()
    train(table, 2)
    write_original(tmp_path / "named" / "model", "v2", table, now=0)
    write_original(tmp_path / "unnamed" / "model", "v1a", table, now=0)
    for folder in ("named", "unnamed"):
        other, same = make(optimizer=embstore.Adagrad()), make()
        with pytest.warns(UserWarning, match="optimizer states of table 'user' start fresh"):
            embstore.load(
                tmp_path / folder, {"model": {"user": other}}, optim=True, allow_other_optimizer=True
            )
        require_same(table, other, states=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="optimizer states")
            embstore.load(
                tmp_path / folder, {"model": {"user": same}}, optim=True, allow_other_optimizer=True
            )
        require_same(table, same)


@pytest.mark.parametrize("layout", ["v1a", "v2"])
def test_uses_of_rows_come_back(tmp_path: Path, layout: str) -> None:
    options = {"evict_least_used": True, "init_capacity": 128, "max_capacity": 128, "bucket_capacity": 128}
    table = make(**options)
    table.find_or_insert(np.arange(100))
    for _ in range(2):
        table.find_or_insert(np.arange(50))  # the others are used least
    embstore.dump(tmp_path, {"model": {"user": table}}, layout=layout)
    back = make(**options)
    embstore.load(tmp_path, {"model": {"user": back}})
    for t in (table, back):
        t.find_or_insert(np.arange(1000, 1060))
        assert t.contains(np.arange(50)).all() and not t.contains(np.arange(50, 100)).all()
    require_same(table, back)


def test_uses_of_rows_that_a_load_overwrites_are_those_of_the_dump(tmp_path: Path) -> None:
    table, back = make(evict_least_used=True), make(evict_least_used=True)
    table.find_or_insert([1, 2, 3])  # once, twice, three times
    table.find_or_insert([2, 3])
    table.find_or_insert([3])
    for _ in range(5):
        back.find_or_insert([1, 2, 3])
    embstore.dump(tmp_path / "d", {"model": {"user": table}})
    embstore.load(tmp_path / "d", {"model": {"user": back}})
    embstore.dump(tmp_path / "again", {"model": {"user": back}})
    for folder in ("d", "again"):
        keys, uses = (np.fromfile(tmp_path / folder / "model" / f"user_{n}", t) for n, t in COUNTS_OF_USE)
        assert dict(zip(keys.tolist(), uses.tolist())) == {1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("counted", [True, False])
def test_a_table_that_is_too_small_keeps_the_rows_that_are_worth_most(tmp_path: Path, counted: bool) -> None:
    """Those used most, or where the dump does not say how often, those with the highest scores."""
    table = make(evict_least_used=counted)
    table.find_or_insert(np.arange(300))
    for _ in range(2):
        table.find_or_insert(np.arange(44))  # used most
    table.find_or_insert(np.arange(256, 300))  # used last, and so placed last: without uses all are equal
    embstore.dump(tmp_path, {"model": {"user": table}})
    back = make(evict_least_used=True, init_capacity=128, max_capacity=128, bucket_capacity=128)
    with pytest.warns(UserWarning):
        embstore.load(tmp_path, {"model": {"user": back}})
    best = np.arange(44) if counted else np.arange(256, 300)
    assert len(back) == 128 and back.contains(best).all()


# ---- how often keys were seen that have no row


def write_counts(folder: Path) -> None:
    """A dump of two ranks with counters."""
    table = make()
    train(table, 1)
    write_original(folder, "v2", table, now=0)
    for rank, part in ((0, slice(0, 3)), (1, slice(3, 5))):
        tail = f".rank_{rank}.world_size_2"
        write(folder, **{f"user_counter_keys{tail}": COUNTED[part]})
        write(folder, **{f"user_counter_frequencies{tail}": SEEN[part]})


def load_counts(path: Path) -> list[tuple[list[int], list[int]]]:
    table = make()
    table.exact_counts = KeyCounts()
    table.exact_counts.add(np.array([4711]), np.array([3]))  # is replaced
    embstore.load(path, {"model": {"user": table}})
    keys, counts = table.exact_counts.items()
    return [(keys.tolist(), counts.tolist())]


def test_counts_of_all_ranks_come_back(tmp_path: Path) -> None:
    write_counts(tmp_path / "model")
    order = np.argsort(COUNTED)
    assert load_counts(tmp_path) == [(COUNTED[order].tolist(), SEEN[order].tolist())]


def test_a_dump_without_counts_has_none(tmp_path: Path) -> None:
    table = make()
    train(table, 1)
    write_original(tmp_path / "model", "v2", table, now=0)
    assert load_counts(tmp_path) == [([], [])]


@pytest.mark.parametrize(
    ("keys", "counts", "said"),
    [
        (COUNTED[:3], SEEN[:2], "found 16 bytes"),
        (COUNTED[:2], SEEN[:3], "found 24 bytes"),
        (COUNTED.view(np.int8)[:12], SEEN.view(np.int8)[:12], "found 12 bytes"),
        (COUNTED[:3], np.array([1, 0, 3]), "at least 1 but one is: 0"),
    ],
)
def test_counts_that_do_not_fit_their_keys_are_refused(
    tmp_path: Path, keys: np.ndarray, counts: np.ndarray, said: str
) -> None:
    write_counts(tmp_path / "model")
    write(tmp_path / "model", **{"user_counter_keys.rank_1.world_size_2": keys})
    write(tmp_path / "model", **{"user_counter_frequencies.rank_1.world_size_2": counts})
    with pytest.raises(embstore.CheckpointError, match=f"frequencies.rank_1.world_size_2: .*{said}"):
        load_counts(tmp_path)
