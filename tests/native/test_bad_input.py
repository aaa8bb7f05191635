"""Bad input raises the right exception with the name and the value, and changes nothing."""

# ruff: noqa: E501  (one case a line)

import math

import numpy as np
import pytest
import torch
from native_tables import everything, small_table

import embstore

NAN = math.nan

# (what is called, exception, part of the message)
CALLS = [
    (lambda t, m, b: t.find([1.0, 2.0]), TypeError, "keys should be integers but their dtype is: float64"),
    (lambda t, m, b: t.find(["a"]), TypeError, "dtype is: <U1; embstore.ids_from makes ids of strings"),
    (lambda t, m, b: t.find(np.array([True])), TypeError, "keys should be integers but their dtype is: bool"),
    (lambda t, m, b: t.find_or_insert(torch.tensor([1.0])), TypeError, "keys .* torch.float32"),
    (lambda t, m, b: t.find_or_insert(torch.tensor([True])), TypeError, "keys .* torch.bool"),
    (lambda t, m, b: t.find_or_insert(torch.tensor([1j])), TypeError, "keys .* torch.complex64"),
    (lambda t, m, b: t.find_or_insert(["a"]), TypeError, "keys should be integers"),
    (lambda t, m, b: t.find_or_insert(None), TypeError, "keys should be integers .* object"),
    (lambda t, m, b: t.find_or_insert([2**64]), TypeError, "keys should be integers"),
    (lambda t, m, b: t.find_or_insert(torch.eye(3).long().to_sparse()), TypeError, "keys .* dense .* torch.sparse_coo"),
    (lambda t, m, b: t.find_or_insert(torch.empty(3, dtype=torch.int64, device="meta")), ValueError, "keys .* meta"),
    (lambda t, m, b: t.erase([1.5]), TypeError, "keys .* float64"),
    (lambda t, m, b: t.contains(np.array(["x"])), TypeError, "keys"),
    (lambda t, m, b: t.insert_or_assign([1, 2], np.ones((2, 3))), ValueError, r"values should have the shape \(2, 4\) but has: \(2, 3\)"),
    (lambda t, m, b: t.insert_or_assign([1, 2], np.ones((3, 4))), ValueError, r"values .* \(3, 4\)"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones(4)), ValueError, r"values .* \(4,\)"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4), bool)), TypeError, "values .* bool"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4)), states=np.ones((1, 4))), ValueError, r"states .* \(1, 8\) but has: \(1, 4\)"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4)), scores=[0]), ValueError, r"scores\[0\] is: 0"),
    (lambda t, m, b: t.insert_or_assign([8, 9], np.ones((2, 4)), scores=[5, 0]), ValueError, r"scores\[1\] is: 0"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4)), scores=[-3]), ValueError, "scores .* -3"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4)), scores=[1.0]), TypeError, "scores .* float64"),
    (lambda t, m, b: t.insert_or_assign([1], np.ones((1, 4)), scores=[1, 2]), ValueError, r"scores .* \(1,\) but has: \(2,\)"),
    (lambda t, m, b: t.apply_gradients([1], np.ones((1, 3))), ValueError, r"gradients .* \(1, 4\) but has: \(1, 3\)"),
    (lambda t, m, b: t.apply_gradients([1], np.ones((2, 4))), ValueError, r"gradients .* \(2, 4\)"),
    (lambda t, m, b: t.apply_gradients([1], torch.ones(4)), ValueError, "gradients"),
    (lambda t, m, b: t.apply_gradients([1], [["a"] * 4]), TypeError, "gradients"),
    (lambda t, m, b: t.apply_gradients([1.0], np.ones((1, 4))), TypeError, "keys"),
    (lambda t, m, b: t.apply_gradients([99], np.ones((1, 4)), missing="error"), KeyError, "table 'small'"),
    (lambda t, m, b: t.apply_gradients([1], np.ones((1, 4)), missing="maybe"), ValueError, "missing .* 'maybe'"),
    (lambda t, m, b: t.reserve(-1), ValueError, "rows should be an integer between 0 and .* but is: -1"),
    (lambda t, m, b: t.reserve(2000), ValueError, r"rows should be between 0 and max_capacity \(1024\) but is: 2000"),
    (lambda t, m, b: t.reserve(2**70), ValueError, f"rows .* {2**70}"),
    (lambda t, m, b: t.reserve(1.5), ValueError, "rows .* 1.5"),
    (lambda t, m, b: list(t.export(block_rows=0)), ValueError, "block_rows .* 0"),
    (lambda t, m, b: list(t.export(block_rows=2**70)), ValueError, "block_rows"),
    (lambda t, m, b: list(t.export(min_score=-1)), ValueError, "min_score .* -1"),
    (lambda t, m, b: list(t.export(min_score=2**64)), ValueError, "min_score"),
    (lambda t, m, b: t.rows(min_score=1.5), ValueError, "min_score .* 1.5"),
    (lambda t, m, b: setattr(t, "score", 0), ValueError, "score .* 0"),
    (lambda t, m, b: setattr(t, "learning_rate", NAN), ValueError, "lr .* nan"),
    (lambda t, m, b: setattr(t, "learning_rate", -1.0), ValueError, "lr .* -1.0"),
    (lambda t, m, b: m([1, 2]), TypeError, "ids should be a tensor but is: list"),
    (lambda t, m, b: m(torch.tensor([1.0])), TypeError, "ids .* torch.float32"),
    (lambda t, m, b: m(torch.tensor([True])), TypeError, "ids .* torch.bool"),
    (lambda t, m, b: b(torch.tensor([1, 2])), ValueError, "ids should have two dimensions without offsets but have: 1"),
    (lambda t, m, b: b(torch.tensor([[1, 2]]), torch.tensor([0])), ValueError, "ids should have one dimension with offsets but have: 2"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0.0])), TypeError, "offsets .* torch.float32"),
    (lambda t, m, b: b(torch.tensor([1, 2]), [0]), ValueError, "offsets should be a tensor"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([[0]])), ValueError, "offsets should be a tensor of one dimension"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([1])), ValueError, r"offsets\[0\] is: 1"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([-1, 1])), ValueError, r"offsets\[0\] is: -1"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0, -1])), ValueError, r"offsets\[1\] is: -1 after 0"),
    (lambda t, m, b: b(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1])), ValueError, r"offsets\[2\] is: 1 after 2"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0, 3])), ValueError, r"offsets\[2\] is: 2 after 3"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)), ValueError, r"offsets\[0\] is: 2"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0]), torch.ones(3)), ValueError, "per_sample_weights should have 2 elements but has: 3"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0]), torch.ones(2, dtype=torch.int64)), TypeError, "per_sample_weights .* torch.int64"),
    (lambda t, m, b: b(torch.tensor([1, 2]), torch.tensor([0]), [1.0, 1.0]), TypeError, "per_sample_weights .* list"),
    (lambda t, m, b: m(torch.tensor([1])).backward(torch.ones(1, 3)), RuntimeError, "[Mm]ismatch in shape"),
    (lambda t, m, b: embstore.set_num_threads(0), ValueError, "threads .* 0"),
    (lambda t, m, b: embstore.set_num_threads(-1), ValueError, "threads .* -1"),
    (lambda t, m, b: embstore.owner([1], 0), ValueError, "world .* 0"),
    (lambda t, m, b: embstore.owner([1.0], 2), TypeError, "keys"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(CALLS)))
def test_a_bad_call_is_refused_and_changes_nothing(i):
    call, error, message = CALLS[i]
    table = small_table(4, optimizer=embstore.Adam(), max_capacity=1024)
    module, bag = embstore.Embedding(table=table), embstore.EmbeddingBag(table=table)
    table.find_or_insert([1, 2, 3])
    table.apply_gradients([1, 2], np.ones((2, 4)))
    if "backward" in message or "Mm" in message:
        module(torch.tensor([1]))  # the forward of the call itself renews a score
    before = everything(table)
    with pytest.raises(error, match=message):
        call(table, module, bag)
    after = everything(table)
    if "Mm" in message:
        rows = [{k: r[:2] for k, r in everything_[0].items()} for everything_ in (before, after)]
        assert rows[0] == rows[1] and before[2] == after[2]
    else:
        assert after == before
    table.find_or_insert([4])  # and it works on
    assert len(table) == 4


OPTIONS = [
    ({"dim": 0}, "dim .* 0"), ({"dim": -4}, "dim .* -4"), ({"dim": 1 << 17}, "dim .* 131072"),
    ({"dim": 2.0}, "dim .* 2.0"), ({"dim": True}, "dim .* True"), ({"dim": None}, "dim .* None"),
    ({"init_capacity": 0}, "init_capacity .* 0"), ({"init_capacity": -1}, "init_capacity .* -1"),
    ({"max_capacity": 0}, "max_capacity .* 0"), ({"max_capacity": -5}, "max_capacity .* -5"),
    ({"max_capacity": 0}, r"max_capacity should be at least 1 but is: 0"),
    ({"max_capacity": 1 << 31}, "max_capacity .* 2147483648"), ({"max_capacity": 2**70}, "max_capacity"),
    ({"max_capacity": 1e6}, "max_capacity .* 1000000.0"),
    ({"bucket_capacity": 0}, "bucket_capacity .* 0"), ({"bucket_capacity": 100}, "bucket_capacity .* 100"),
    ({"bucket_capacity": 32768, "max_capacity": 1 << 20}, "bucket_capacity .* 32768"),
    ({"max_load_factor": 0.0}, "max_load_factor"), ({"max_load_factor": 1.1}, "max_load_factor .* 1.1"),
    ({"max_load_factor": NAN}, "max_load_factor .* nan"), ({"max_load_factor": "x"}, "max_load_factor .* 'x'"),
    ({"dtype": "float64"}, "dtype .* 'float64'"), ({"dtype": torch.int64}, "dtype .* 'int64'"), ({"dtype": 0}, "dtype"),
    ({"score_strategy": "fifo"}, "score_strategy .* 'fifo'"), ({"score_strategy": 1}, "score_strategy .* 1"),
    ({"check_mode": "loud"}, "check_mode .* 'loud'"), ({"eviction_log": "all"}, "eviction_log .* 'all'"),
    ({"eviction_log_capacity": 0}, "eviction_log_capacity .* 0"), ({"seed": 1.5}, "seed .* 1.5"),
    ({"optimizer": "adam"}, "optimizer .* 'adam'"), ({"optimizer": torch.optim.Adam}, "optimizer"),
    ({"initializer": 0.0}, "initializer .* 0.0"), ({"initializer": embstore.Initializer()}, "initializer"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(OPTIONS)))
def test_a_bad_option_is_named_with_its_value(i):
    keywords, message = OPTIONS[i]
    with pytest.raises(ValueError, match=message):
        embstore.Table("bad", **{"dim": 4, **keywords})


def test_a_bad_name_or_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match="name should be a non-empty string but is: ''"):
        embstore.Table("", dim=2)
    with pytest.raises(TypeError, match="colour"):
        embstore.Table("x", dim=2, colour="red")
    with pytest.raises(ValueError, match="dim should be given"):
        embstore.Embedding()
    with pytest.raises(ValueError, match="table should come without dim"):
        embstore.Embedding(4, table=small_table())
    with pytest.raises(ValueError, match="mode should be 'sum' or 'mean' but is: 'max'"):
        embstore.EmbeddingBag(4, mode="max")
    with pytest.raises(ValueError, match="mode .* 'max'"):
        embstore.EmbeddingBagCollection([], mode="max")
    with pytest.raises(TypeError, match="one of its subclasses"):
        embstore.Optimizer()
