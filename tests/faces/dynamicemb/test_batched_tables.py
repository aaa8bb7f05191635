"""`BatchedDynamicEmbeddingTables` against torch's own embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import embstore
from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbLoad,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables
from dynamicemb.incremental_dump import incremental_dump

SUM, MEAN, NONE = DynamicEmbPoolingMode.SUM, DynamicEmbPoolingMode.MEAN, DynamicEmbPoolingMode.NONE
FEATURES, IDS = 3, 30


def options(dim: int = 4, **more: Any) -> DynamicEmbTableOptions:
    return DynamicEmbTableOptions(
        **{
            "dim": dim,
            "max_capacity": 1024,
            "initializer_args": DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.25),
            **more,
        }
    )


def module(dims: tuple[int, int] = (4, 8), **keywords: Any) -> BatchedDynamicEmbeddingTables:
    """Two tables; the first has two features."""
    return BatchedDynamicEmbeddingTables(
        [options(dim) for dim in dims], ["user", "item"], [0, 0, 1], learning_rate=0.5, **keywords
    )


def batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (FEATURES * samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, IDS, (int(offsets[-1]),), generator=generator), offsets


def rows(tables: BatchedDynamicEmbeddingTables, name: str) -> dict[int, torch.Tensor]:
    stored = tables.dynamic_tables[name].table.rows()
    return {int(k): torch.from_numpy(v) for k, v in zip(stored.keys, stored.values, strict=True)}


@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_equals_torch_s_embeddings(mode: DynamicEmbPoolingMode, weighted: bool) -> None:
    if mode == NONE and weighted:
        with pytest.raises(ValueError, match="per_sample_weights"):
            halves = torch.full((1,), 0.5)  # without pooling they are counts
            module((4, 4), pooling_mode=NONE)(torch.tensor([1]), torch.tensor([0, 1, 1, 1]), halves)
        return
    dims = (4, 4) if mode == NONE else (4, 8)
    tables = module(dims, pooling_mode=mode, optimizer=EmbOptimType.EXACT_SGD)
    twins = [torch.nn.Parameter(torch.full((IDS, dim), 0.25)) for dim in dims]
    sgd = torch.optim.SGD(twins, lr=0.5)
    used: tuple[set[int], set[int]] = (set(), set())
    for step, samples in enumerate((7, 1, 97)):
        indices, offsets = batch(samples, step)
        weights = (torch.rand(indices.numel()) + 0.5).requires_grad_() if weighted else None
        given = None if weights is None else weights.detach().clone().requires_grad_()
        out = tables(indices, offsets, given)
        pieces = []
        for feature, table in enumerate((0, 0, 1)):
            starts = offsets[feature * samples : (feature + 1) * samples + 1]
            first, last = int(starts[0]), int(starts[-1])
            vectors = twins[table][indices[first:last]]
            used[table].update(indices[first:last].tolist())
            if mode == NONE:
                pieces.append(vectors)
                continue
            if weights is not None:
                vectors = vectors * weights[first:last, None]
            lengths = starts.diff()
            bag = torch.repeat_interleave(lengths)
            sums = torch.zeros(samples, dims[table]).index_add(0, bag, vectors)
            pieces.append(sums / lengths.clamp(min=1)[:, None] if mode == MEAN else sums)
        expected = torch.cat(pieces, 0 if mode == NONE else 1)
        torch.testing.assert_close(out, expected)
        scale = torch.arange(1, out.shape[1] + 1) / out.numel()
        (out * scale).sum().backward()
        sgd.zero_grad()
        (expected * scale).sum().backward()
        if weights is not None:
            torch.testing.assert_close(given.grad, weights.grad)
        sgd.step()
    for table, name in enumerate(("user", "item")):
        found = rows(tables, name)
        assert set(found) == used[table]
        for key, row in found.items():
            torch.testing.assert_close(row, twins[table][key].detach())


@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_per_sample_weights_get_their_gradient_in_evaluation(mode: DynamicEmbPoolingMode) -> None:
    tables = module((4, 8), pooling_mode=mode)
    indices, offsets = batch(7, 0)
    tables(indices, offsets).sum().backward()
    before = rows(tables, "user")
    weights = torch.rand(indices.numel(), requires_grad=True)
    out = tables.eval()(indices, offsets, weights)
    upstream = torch.randn(out.shape)
    out.backward(upstream)
    assert rows(tables, "user").keys() == before.keys()
    found = [rows(tables, name) for name in ("user", "user", "item")]
    columns = [slice(0, 4), slice(4, 8), slice(8, 16)]
    for feature in range(3):
        for sample in range(7):
            first, last = offsets[feature * 7 + sample : feature * 7 + sample + 2].tolist()
            for i in range(first, last):
                vector = found[feature][int(indices[i])] / (last - first if mode == MEAN else 1)
                torch.testing.assert_close(weights.grad[i], vector @ upstream[sample, columns[feature]])


def test_eval_reads_and_a_half_output_comes_back_as_asked() -> None:
    tables = module(output_dtype=torch.bfloat16).eval()
    out = tables(torch.tensor([5, 6]), torch.tensor([0, 1, 1, 2]))
    assert out.dtype == torch.bfloat16 and out.shape == (1, 16) and not out.any()
    assert len(tables.dynamic_tables["user"].table) == 0
    assert tables(torch.tensor([], dtype=torch.int64), torch.tensor([0])).shape == (0, 16)


def test_the_learning_rate_and_scores_can_be_set() -> None:
    strategies = (DynamicEmbScoreStrategy.CUSTOMIZED, DynamicEmbScoreStrategy.STEP)
    tables = BatchedDynamicEmbeddingTables([options(score_strategy=s) for s in strategies])
    assert tables.table_names == ["t0", "t1"] and tables.get_score() == {"t0": 0, "t1": 1}
    tables.set_score({"t0": 7})
    tables.set_learning_rate(2.0)
    tables(torch.tensor([3, 9]), torch.tensor([0, 1, 2])).sum().backward()
    assert tables.get_score() == {"t0": 7, "t1": 2}
    assert rows(tables, "t0")[3].tolist() == [0.25 - 2.0] * 4
    assert [w.shape for w in tables.split_embedding_weights()] == [(0, 4), (0, 4)]


def test_the_tables_are_dumped_and_loaded_like_those_of_a_model(tmp_path: Path) -> None:
    tables = module(optimizer=EmbOptimType.ADAM)
    indices, offsets = batch(7, 1)
    tables(indices, offsets).sum().backward()
    DynamicEmbDump(str(tmp_path / "dump"), tables, optim=True)
    again = module(optimizer=EmbOptimType.ADAM)
    DynamicEmbLoad(str(tmp_path / "dump"), again, optim=True)
    for twin in (tables, again):
        twin(indices, offsets).sum().backward()
    answer = incremental_dump(again, 0)
    assert answer is not None
    for name in ("user", "item"):
        keys, values = answer[0]["model"][name]
        expected = rows(tables, name)
        assert keys.tolist() == sorted(expected)
        assert all(torch.equal(value, expected[int(key)]) for key, value in zip(keys, values, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table_options": []}, "table_names should be"),
        ({"table_options": [options(), options()], "table_names": ["a", "a"]}, "table_names should be"),
        ({"table_options": [DynamicEmbTableOptions(dim=4)]}, "max_capacity of table_options should be set"),
        ({"table_options": [DynamicEmbTableOptions(max_capacity=128)]}, "dim of table_options should be set"),
        ({"table_options": [options()], "feature_table_map": [0, 1]}, "feature_table_map should"),
        ({"table_options": [options()] * 2, "feature_table_map": [1, 0]}, "feature_table_map should"),
        ({"table_options": [options(4), options(8)], "pooling_mode": NONE}, "dim should be the same"),
        ({"table_options": [options()], "optimizer": EmbOptimType.LAMB}, "optimizer of table"),
        (
            {"table_options": [options(embedding_dtype=torch.float16), options()]},
            "table_options should agree in types",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchedDynamicEmbeddingTables(**arguments)


def test_an_unknown_keyword_warns() -> None:
    with pytest.warns(UserWarning, match="lr"):
        BatchedDynamicEmbeddingTables([options()], lr=0.1)


@pytest.mark.parametrize("offsets", [[], [0, 1, 2], [0, 1, 1, 3], [1, 1, 1, 2], [0, 2, 1, 2]])
def test_wrong_offsets_are_refused_and_change_nothing(offsets: list[int]) -> None:
    tables = module()
    with pytest.raises(ValueError, match="offsets should"):
        tables(torch.tensor([1, 2]), torch.tensor(offsets, dtype=torch.int64))
    assert len(tables.dynamic_tables["user"].table) == 0


@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
def test_a_serving_model_has_the_outputs_of_eval(mode: DynamicEmbPoolingMode, tmp_path: Path) -> None:
    model = torch.nn.Sequential(module((4, 4) if mode == NONE else (4, 8), pooling_mode=mode))
    tables = model[0]
    for step in range(3):
        indices, offsets = batch(7, step)
        tables(indices, offsets).square().sum().backward()
    DynamicEmbDump(str(tmp_path / "d"), model)
    served = embstore.serving.serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    tables.eval()
    indices, offsets = batch(11, 5)
    assert torch.equal(served[0](indices, offsets), tables(indices, offsets))
    weights = torch.rand(indices.numel())
    if mode != NONE:
        assert torch.equal(served[0](indices, offsets, weights), tables(indices, offsets, weights))
        with pytest.raises(ValueError, match="offsets should have samples x 3 features"):
            served[0](indices, offsets[:-1])
