"""Against FBGEMM's static tables: the same forward, backward and rows, pooled and weighted."""

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

import embstore

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: embstore.SGD(lr=0.1),
    EmbOptimType.EXACT_ADAGRAD: embstore.Adagrad(lr=0.1, eps=1e-6),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: embstore.RowwiseAdagrad(lr=0.1, eps=1e-6),
}
ROWS = (97, 1023)
DIMS = (8, 32)


def static_tables(kind, mode):
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in zip(ROWS, DIMS)],
        optimizer=kind,
        pooling_mode=PoolingMode.SUM if mode == "sum" else PoolingMode.MEAN,
        learning_rate=0.1,
        eps=1e-6,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda k: k.name)
# FBGEMM's CPU backward of a weighted mean leaves out the division by the length of the bag;
# test_bags.py compares that case with autograd.
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_a_dynamic_table_trains_as_a_static_one(kind, mode, weighted):
    static = static_tables(kind, mode)
    rng = np.random.default_rng(0)
    names = [f"t{t}" for t in range(len(ROWS))]
    # Row i of the static table is the key scatter[i] of ours.
    scatter = [
        np.unique(rng.integers(-(2**63), 2**63, size=rows + 9, dtype=np.int64))[:rows] for rows in ROWS
    ]
    options = [embstore.TableOptions(name=n, dim=d, optimizer=OPTIMIZERS[kind]) for n, d in zip(names, DIMS)]
    ours = embstore.EmbeddingBagCollection(options, mode=mode)
    for name, keys, weights in zip(names, scatter, static.split_embedding_weights()):
        weights.data.copy_(torch.from_numpy(rng.standard_normal(weights.shape).astype(np.float32)))
        ours.tables[name].insert_or_assign(keys, weights.numpy())

    bags = 33
    for _ in range(6):
        inputs, indices, lengths, all_weights = {}, [], [], []
        for name, rows, keys in zip(names, ROWS, scatter):
            length = rng.integers(0, 6, size=bags)
            index = rng.integers(0, rows, size=length.sum())
            w = torch.from_numpy(rng.uniform(0.5, 1.5, size=len(index)).astype(np.float32))
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(length)[:-1]]))
            inputs[name] = (torch.from_numpy(keys[index]), offsets, w if weighted else None)
            indices.append(torch.from_numpy(index))
            lengths.append(length)
            all_weights.append(w)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
        expected = static(torch.cat(indices), offsets, torch.cat(all_weights) if weighted else None)
        got = ours(inputs)
        vectors = torch.cat([got[name] for name in names], dim=1)
        torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
        gradient = torch.from_numpy(rng.standard_normal(expected.shape).astype(np.float32))
        expected.backward(gradient)
        vectors.backward(gradient)
    for name, keys, weights in zip(names, scatter, static.split_embedding_weights()):
        rows, found = ours.tables[name].find(keys)
        assert found.all()
        np.testing.assert_allclose(rows, weights.numpy(), rtol=1e-3, atol=2e-5)
