"""Embedding and EmbeddingBag against torch's own on a dense table, forward and backward."""

import numpy as np
import pytest
import torch
from native_tables import as_dict, small_table

import embstore

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dense_twin(table, keys):
    """A dense weight with the rows of the (sorted) keys, and a way from ids to its rows."""
    weight = torch.from_numpy(table.find_or_insert(keys).copy()).requires_grad_()
    return weight, lambda ids: torch.from_numpy(np.searchsorted(keys, ids.numpy()))


@pytest.mark.parametrize("shape", [(1,), (7,), (97,), (3, 5), (2, 3, 4), (0,), (1023,)])
@pytest.mark.parametrize("dim", [1, 7, 32])
def test_an_embedding_equals_a_dense_one(shape, dim):
    table = small_table(
        dim, initializer=embstore.Normal(0, 1), optimizer=embstore.SGD(lr=0.5), max_capacity=2048
    )
    keys = np.arange(-40, 60, dtype=np.int64)
    weight, rows_of = dense_twin(table, keys)
    emb = embstore.Embedding(table=table)
    for step in range(3):
        ids = torch.from_numpy(np.random.default_rng(step).choice(keys, size=shape))
        out = emb(ids)
        expected = torch.nn.functional.embedding(rows_of(ids), weight)
        assert out.shape == (*shape, dim)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        upstream = torch.randn_like(out)
        out.backward(upstream)
        (g,) = torch.autograd.grad(expected, weight, upstream)
        weight.data -= 0.5 * g
    np.testing.assert_allclose(table.find(keys)[0], weight.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("two_dimensional", [False, True])
def test_a_bag_equals_autograd_of_a_dense_one(mode, weighted, two_dimensional):
    table = small_table(
        5, initializer=embstore.Normal(0, 1), optimizer=embstore.SGD(lr=0.3), max_capacity=2048
    )
    keys = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63, size=97, dtype=np.int64))
    weight, rows_of = dense_twin(table, keys)
    bag = embstore.EmbeddingBag(table=table, mode=mode)
    rng = np.random.default_rng(1)
    for _ in range(4):
        if two_dimensional:
            lengths = np.full(13, 6)
        else:
            lengths = rng.integers(0, 9, size=33)
            lengths[5] = 130  # longer than a block of the probe
        ids = torch.from_numpy(rng.choice(keys, size=lengths.sum()))
        per_sample = torch.from_numpy(rng.standard_normal(len(ids)).astype(np.float32))
        if two_dimensional:
            ids, per_sample = ids.view(13, 6), per_sample.view(13, 6)
        per_sample.requires_grad_()
        bag_of = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        scale = per_sample.view(-1) if weighted else torch.ones(bag_of.numel())
        if mode == "mean":
            scale = scale / torch.from_numpy(lengths)[bag_of]
        terms = weight[rows_of(ids).view(-1)] * scale[:, None].float()
        expected = torch.zeros(len(lengths), 5).index_add(0, bag_of, terms)
        offsets = (
            None if two_dimensional else torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
        )
        got = bag(ids, offsets, per_sample if weighted else None)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        upstream = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, [weight, per_sample] if weighted else [weight], upstream)
        got.backward(upstream)
        if weighted:
            assert per_sample.grad.shape == per_sample.shape
            torch.testing.assert_close(per_sample.grad, wanted[1], rtol=1e-4, atol=1e-5)
        weight.data -= 0.3 * wanted[0]
    np.testing.assert_allclose(table.find(keys)[0], weight.detach().numpy(), rtol=1e-4, atol=2e-5)


def test_weights_of_another_dtype_get_their_gradient_in_it():
    bag = embstore.EmbeddingBag(table=small_table(2))
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    bag(torch.tensor([1, 2, 3]), torch.tensor([0, 1]), weights).sum().backward()
    assert weights.grad.dtype == torch.float64
    np.testing.assert_array_equal(weights.grad.numpy(), [2, 4, 6])


def test_weights_that_were_changed_before_backward_are_noticed():
    bag = embstore.EmbeddingBag(table=small_table(2))
    weights = torch.ones(3)
    out = bag(torch.tensor([1, 2, 3]), torch.tensor([0]), weights)
    weights.mul_(2)
    before = as_dict(bag.table)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert as_dict(bag.table) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_come_in_the_dtype_of_the_table(dtype):
    table = small_table(3, dtype=dtype, initializer=embstore.Normal(0, 1), optimizer=embstore.SGD(lr=1.0))
    emb, bag = embstore.Embedding(table=table), embstore.EmbeddingBag(table=table)
    ids = torch.tensor([4, 5, 4])
    first = emb(ids)
    assert first.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(first.detach().float().numpy(), table.initial_values(ids).numpy())
    pooled = bag(ids, torch.tensor([0, 1]))
    assert pooled.dtype == DTYPES[dtype]
    first.sum().backward()
    expected = table.initial_values([4, 5]) - np.array([[2.0], [1.0]], np.float32)
    got = table.find([4, 5])[0]
    np.testing.assert_array_equal(got, torch.from_numpy(expected).to(DTYPES[dtype]).float().numpy())


def test_offsets_with_the_last_one_included_and_of_other_types():
    bag = embstore.EmbeddingBag(table=small_table(1), include_last_offset=True)
    ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    out = bag(ids, torch.tensor([0, 2, 2, 3], dtype=torch.int32))
    np.testing.assert_array_equal(out.detach().numpy(), [[3], [0], [3]])
    np.testing.assert_array_equal(
        bag(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])).detach(), [[0]]
    )
    plain = embstore.EmbeddingBag(table=bag.table)
    assert plain(torch.empty(5, 0, dtype=torch.int64)).shape == (5, 1)
    assert plain(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)).shape == (0, 1)


def test_non_contiguous_ids_and_gradients_are_read_in_their_order():
    table = small_table(2, optimizer=embstore.SGD(lr=1.0))
    ids = torch.arange(12).view(3, 4).t()
    out = embstore.Embedding(table=table)(ids)
    np.testing.assert_array_equal(out.detach()[..., 0].numpy(), ids.numpy())
    gradient = torch.arange(24.0).view(2, 4, 3).permute(1, 2, 0)
    out.backward(gradient)
    np.testing.assert_array_equal(table.find(ids.contiguous())[0], ids[..., None] - gradient)


def test_every_second_of_a_row_of_ids_is_read_in_its_order():
    module = embstore.EmbeddingBag(2, initializer=embstore.Uniform(-1.0, 1.0), seed=7)
    ids, offsets = torch.arange(10), torch.tensor([0, 9, 2, 9, 3, 9])
    expected = module(torch.tensor([0, 2, 4, 6, 8]), torch.tensor([0, 2, 3]))
    torch.testing.assert_close(module(ids[::2], offsets[::2]), expected, rtol=0, atol=0)
