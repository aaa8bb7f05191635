"""Table: operations against a dict, inputs of every kind, refusals, logs and copies."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from native_tables import as_dict, everything, random_keys, small_table, values_of

import embstore

SIZES = [0, 1, 7, 97, 1023]
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 32])
def test_rows_come_back_as_they_were_assigned(n, dtype, dim):
    table = small_table(dim, dtype=dtype, optimizer=embstore.Adam(), max_capacity=4096)
    keys = np.unique(random_keys(4 * n, max(n, 1), seed=1))[:n]
    n = len(keys)
    values = np.arange(n * dim, dtype=np.float32).reshape(n, dim) % 251  # exact in every dtype
    states = np.random.default_rng(0).standard_normal((n, 2 * dim)).astype(np.float32)
    scores = np.arange(1, n + 1, dtype=np.uint64)
    table.insert_or_assign(keys, values, states=states, scores=scores)
    rows = table.read(keys)
    np.testing.assert_array_equal(rows.values, values)
    np.testing.assert_array_equal(rows.states, states)
    np.testing.assert_array_equal(rows.scores, scores)
    exported = embstore.Rows.concatenate(list(table.export(block_rows=7)))
    order = np.argsort(exported.keys)
    np.testing.assert_array_equal(exported.keys[order], keys)
    np.testing.assert_array_equal(exported.values[order], values)
    assert len(table) == n and table.contains(keys).all()
    found, there = table.find(np.concatenate([keys, [123]]))
    assert there.sum() == n and not found[-1].any()
    assert table.erase(keys[: n // 2]) == n // 2
    assert len(table) == n - n // 2


def test_all_keys_are_legal():
    table = small_table(1, max_capacity=1024)
    keys = np.array([0, -1, -2, -4, 2**63 - 1, -(2**63), -(2**63) + 1, 1], dtype=np.int64)
    table.find_or_insert(keys)
    assert table.contains(keys).all() and len(table) == 8
    np.testing.assert_array_equal(table.rows().keys, np.sort(keys))
    assert table.erase(keys) == 8


KINDS = {
    "list": lambda k: k.tolist(),
    "tuple": lambda k: tuple(k.tolist()),
    "int64": lambda k: k,
    "int32": lambda k: k.astype(np.int32),
    "int8": lambda k: k.astype(np.int8),
    "uint64": lambda k: k.astype(np.uint64),
    "big endian": lambda k: k.astype(">i8"),
    "strided": lambda k: np.repeat(k, 2)[::2],
    "backwards": lambda k: k[::-1].copy()[::-1],
    "torch int64": torch.from_numpy,
    "torch int32": lambda k: torch.from_numpy(k).int(),
    "torch uint8": lambda k: torch.from_numpy(k).to(torch.uint8),
    "torch uint64": lambda k: torch.from_numpy(k).view(torch.uint64),
    "torch strided": lambda k: torch.from_numpy(np.repeat(k, 3))[::3],
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_any_integer_kind_are_accepted_and_answered_in_kind(kind):
    keys = np.array([5, 7, 5, 100, 0], dtype=np.int64)
    table = small_table(3)
    given = KINDS[kind](keys)
    values = table.find_or_insert(given)
    assert isinstance(values, torch.Tensor if "torch" in kind else np.ndarray)
    np.testing.assert_array_equal(np.asarray(values), np.repeat(keys[:, None], 3, 1).astype(np.float32))
    found, there = table.find(given)
    assert np.asarray(there).all() and np.asarray(found).tobytes() == np.asarray(values).tobytes()
    table.apply_gradients(given, np.ones((5, 3)))
    assert table.erase(given) == 4


@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (1, 2, 3), (0, 4), (6, 1)])
def test_the_shape_of_the_keys_is_kept(shape):
    table = small_table(2)
    keys = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    for given in (keys, torch.from_numpy(keys), torch.from_numpy(keys).t() if len(shape) == 2 else keys):
        values = table.find_or_insert(given)
        assert tuple(values.shape) == (*given.shape, 2)
        np.testing.assert_array_equal(np.asarray(values)[..., 1], np.asarray(given).astype(np.float32))
        assert tuple(table.contains(given).shape) == tuple(given.shape)


def test_uint64_keys_above_two_to_63_are_the_negative_ones():
    table = small_table(1)
    table.find_or_insert(np.array([2**64 - 1, 2**63], dtype=np.uint64))
    assert table.contains([-1, -(2**63)]).all()
    assert table.contains([2**64 - 1]).all()


def test_of_duplicates_the_last_assignment_counts_and_gradients_are_summed():
    table = small_table(1, optimizer=embstore.SGD(lr=1.0))
    table.insert_or_assign([4, 4, 5, 4], [[1.0], [2.0], [3.0], [8.0]])
    table.apply_gradients([4, 5, 4, 99], [[1.0], [0.5], [2.0], [7.0]])
    assert {k: v.tolist() for k, v in values_of(table).items()} == {4: [5.0], 5: [2.5]}
    with pytest.raises(KeyError, match="table 'small'"):
        table.apply_gradients([4, 99], [[1.0], [1.0]], missing="error")
    assert table.optimizer_step == 1


@pytest.mark.parametrize("repeated", [False, True])
def test_new_rows_have_their_vectors_and_states_where_others_find_no_room(repeated):
    table = small_table(3, optimizer=embstore.Adam(), max_capacity=128, check_mode="ignore")
    keys = random_keys(10_000, 997, seed=3)
    keys = np.concatenate([keys, keys[:5]]) if repeated else np.unique(keys)
    values = np.random.default_rng(1).standard_normal((len(keys), 3)).astype(np.float32)
    states = np.random.default_rng(2).standard_normal((len(keys), 6)).astype(np.float32)
    table.insert_or_assign(keys, values, states=states)
    last = {int(key): i for i, key in enumerate(keys)}
    rows = table.rows()
    assert 0 < len(rows) < len(last) and table.stats().refusals == len(last) - len(rows)
    at = [last[int(key)] for key in rows.keys]
    np.testing.assert_array_equal(rows.values, values[at])
    np.testing.assert_array_equal(rows.states, states[at])


def test_an_empty_batch_changes_nothing_but_the_step():
    table = small_table(3)
    table.find_or_insert([1, 2])
    before = as_dict(table)
    assert table.find_or_insert([]).shape == (0, 3)
    assert table.find([])[0].shape == (0, 3)
    assert table.contains([]).shape == (0,)
    table.insert_or_assign([], np.empty((0, 3)))
    table.apply_gradients([], np.empty((0, 3)))
    assert table.erase([]) == 0
    assert as_dict(table) == before


# ---- refusals


@pytest.mark.parametrize("mode", ["error", "warning", "ignore"])
def test_one_bucket_of_128_refuses_exactly_72_of_200_keys(mode):
    table = small_table(2, check_mode=mode)
    keys = np.arange(1, 201)
    if mode == "error":
        with pytest.raises(embstore.RefusedKeysError, match="refused 72 distinct keys of a batch of 200"):
            table.find_or_insert(keys)
        values = table.find(keys)[0]
    elif mode == "warning":
        with pytest.warns(UserWarning, match="refused 72 distinct keys of a batch of 200"):
            values = table.find_or_insert(keys)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = table.find_or_insert(keys)
    assert (values == 0).all(1).sum() == 72
    assert table.stats().refusals == 72 and len(table) == 128 and table.stats().evictions == 0
    assert issubclass(embstore.RefusedKeysError, RuntimeError)


@pytest.mark.parametrize("mode", ["error", "warning", "ignore"])
def test_a_module_drops_the_gradient_of_refused_keys(mode):
    emb = embstore.Embedding(table=small_table(2, check_mode=mode, optimizer=embstore.SGD(lr=1.0)))
    ids = torch.arange(1, 201)
    if mode == "error":
        with pytest.raises(RuntimeError, match="refused 72"):
            emb(ids)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        emb(ids).sum().backward()
    values = values_of(emb.table)
    assert len(values) == 128
    for key, value in values.items():
        np.testing.assert_array_equal(value, [key - 1.0] * 2)


# ---- growth, clearing, logs


def test_growth_keeps_rows_and_reserve_makes_room_at_once():
    table = small_table(3, max_capacity=1 << 14, initializer=embstore.Uniform(), max_load_factor=0.75)
    assert table.capacity == 128
    first = table.find_or_insert(np.arange(100))
    table.reserve(6000)
    assert table.capacity >= 8000
    np.testing.assert_array_equal(table.find(np.arange(100))[0], first)
    table.clear()
    assert len(table) == 0 and table.capacity >= 8000 and not table.contains(np.arange(100)).any()
    np.testing.assert_array_equal(table.find_or_insert(np.arange(100)), first)


@pytest.mark.parametrize("log", ["off", "keys", "rows"])
def test_the_log_holds_what_was_evicted(log):
    table = small_table(2, eviction_log=log, optimizer=embstore.Adagrad(initial_accumulator_value=0.5))
    table.find_or_insert(np.arange(128))
    table.find_or_insert(np.arange(1000, 1010))
    gone = table.evictions()
    assert len(gone) == (0 if log == "off" else 10)
    assert gone.values.shape == ((10, 2) if log == "rows" else (0, 2))
    if log == "rows":
        np.testing.assert_array_equal(gone.values[:, 0], gone.keys)
        np.testing.assert_array_equal(gone.states, np.full((10, 2), 0.5))
    if log != "off":
        assert not table.contains(gone.keys).any() and set(gone.scores.tolist()) == {1}
    assert len(table.evictions()) == 0 and table.stats().evictions == 10


def test_an_export_is_the_state_at_the_call_though_the_table_grows_and_is_cleared():
    table = small_table(1, max_capacity=4096)
    table.find_or_insert(np.arange(100))
    blocks, selected = table.export(block_rows=10), table.export(min_score=2, with_states=False)
    assert len(next(blocks)) == 10
    table.reserve(4000)
    table.find_or_insert(np.arange(50, 3000))
    table.clear()
    rest = embstore.Rows.concatenate(list(blocks))
    assert len(rest) == 90 and (rest.scores == 1).all() and (rest.keys < 100).all()
    assert sum(len(block) for block in selected) == 0


def test_rows_in_memory_are_walked_while_the_table_grows_but_not_once_it_is_cleared():
    table = small_table(1, max_capacity=4096)
    table.find_or_insert(np.arange(100))
    blocks = table.resident(block_rows=10)
    keys = next(blocks).keys.tolist()
    table.reserve(4000)
    keys += [key for rows in blocks for key in rows.keys.tolist()]
    assert sorted(keys) == list(range(100))
    blocks = table.resident(block_rows=10)
    next(blocks)
    table.clear()
    with pytest.raises(RuntimeError, match="cleared during an export"):
        next(blocks)


def test_a_closed_table_raises_for_every_use_but_stats():
    table = small_table(2, score_strategy="step")
    table.find_or_insert([1])
    table.close()
    uses = [
        lambda: len(table),
        lambda: table.capacity,
        lambda: table.find([1]),
        lambda: table.find_or_insert([1]),
        lambda: table.insert_or_assign([1], np.ones((1, 2))),
        lambda: table.read([1]),
        lambda: table.erase([1]),
        lambda: table.contains([1]),
        lambda: table.clear(),
        lambda: table.reserve(1),
        lambda: table.rows(),
        lambda: table.evictions(),
        lambda: table.apply_gradients([1], np.ones((1, 2))),
        lambda: table.score,
        lambda: setattr(table, "score", 3),
        lambda: pickle.dumps(table),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="table 'small' is closed"):
            use()
    assert table.stats().inserts == 1 and table.optimizer_step == 0
    assert "small" in repr(table)
    table.close()


# ---- copies


@pytest.mark.parametrize("strategy", ["timestamp", "step", "customized", "lfu", "no_eviction"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_hold_the_same_and_train_on_alike(strategy, dtype):
    table = small_table(
        3, score_strategy=strategy, dtype=dtype, optimizer=embstore.Adam(), max_capacity=512,
        max_load_factor=0.75, initializer=embstore.Uniform(),
    )  # fmt: skip

    def train(tables, seed):
        keys = random_keys(200, 2000, seed)
        for t in tables:
            if strategy == "customized":
                t.score = seed + 1
            t.find_or_insert(keys)
            t.apply_gradients(keys, np.random.default_rng(seed).standard_normal((200, 3)))

    for seed in range(10):
        train([table], seed)
    table.learning_rate = 0.5
    copies = [copy.deepcopy(table), pickle.loads(pickle.dumps(table)), copy.copy(table)]
    for other in copies:
        assert as_dict(other) == as_dict(table)
        assert other.optimizer_step == 10 and other.learning_rate == 0.5 and other.options == table.options
    for seed in range(10, 14):
        train([table, *copies], seed)
    for other in copies:
        if strategy in ("timestamp", "no_eviction"):  # clocks differ, rows do not
            assert {k: r[:2] for k, r in as_dict(other).items()} == {
                k: r[:2] for k, r in as_dict(table).items()
            }
        else:
            assert as_dict(other) == as_dict(table)


def test_a_state_that_does_not_fit_is_refused_before_the_table_changes():
    table = small_table(2)
    table.find_or_insert([1, 2, 3])
    before = everything(table)
    good = table.state()
    big = small_table(2, max_capacity=4096)
    big.find_or_insert(np.arange(500))
    other_dim = small_table(3)
    other_dim.find_or_insert([1])
    bad = [
        ({**good, "scores": good["scores"][:2]}, ValueError),
        ({**good, "scores": np.zeros(3, np.int64)}, ValueError),
        ({**good, "values": good["values"][:, :1]}, ValueError),
        ({**good, "keys": good["keys"].astype(np.float32)}, TypeError),
        ({k: v for k, v in good.items() if k != "optimizer_step"}, KeyError),
        (big.state(), ValueError),
        (other_dim.state(), ValueError),
    ]
    for state, error in bad:
        with pytest.raises(error):
            table.load_state(state)
        assert everything(table) == before


def test_a_state_of_as_many_rows_as_a_table_holds_is_loaded_and_one_more_is_refused():
    crowded = small_table(1, max_capacity=4096)
    crowded.find_or_insert(np.arange(1001))
    narrow = small_table(1, max_capacity=1000)
    with pytest.raises(ValueError, match=r"at most max_capacity \(1000\) rows but holds: 1001"):
        narrow.load_state(crowded.state())
    crowded.erase([500])
    narrow.load_state(crowded.state())
    assert as_dict(narrow) == as_dict(crowded)


def test_a_table_of_1024_rows_keeps_all_943_users():
    table = small_table(1, max_capacity=1024, init_capacity=1024)
    for part in np.array_split(np.arange(1, 944), 13):
        table.find_or_insert(part)
    assert len(table) == 943 and table.stats().evictions == 0
    full = small_table(1, max_capacity=943)
    for part in np.array_split(np.arange(1, 944), 13):
        full.find_or_insert(part)
    assert len(full) == 943 and full.stats().evictions == 0


def test_statistics_add_up():
    table = small_table(1, max_capacity=256)
    rng = np.random.default_rng(0)
    for _ in range(20):
        table.find_or_insert(rng.integers(0, 2000, size=100))
    stats = table.stats()
    assert stats.inserts - stats.evictions == stats.size == len(table) == len(as_dict(table))
    assert stats.hits > 0 and stats.bytes > 0 and stats.capacity == table.capacity <= stats.max_capacity


class Tagged(torch.Tensor):
    """A subclass, as those of TorchRec and DTensor are."""


@pytest.mark.parametrize(
    "kind", [np.asarray, torch.as_tensor, lambda k: torch.as_tensor(k).as_subclass(Tagged)]
)
def test_reading_rows_copies_the_keys_and_warns_of_nothing(kind):
    table = small_table()
    keys = np.array([[7, -1], [7, 2**62]], np.int64)
    values = table.find_or_insert(keys).reshape(4, -1)
    given = kind(keys.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = table.read(given)
    given[:] = 0
    assert type(rows.keys) is np.ndarray and rows.keys.tolist() == [7, -1, 7, 2**62]
    np.testing.assert_array_equal(rows.values, values)
