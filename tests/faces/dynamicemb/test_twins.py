"""Dynamic tables against static TorchRec, an oracle, and themselves on other numbers of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from faces.dynamicemb import jobs, ranks
from faces.dynamicemb.models import CONSTANT, Spec, all_rows, jagged
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tolerances import drift

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]

LR, EPS = 0.05, 0.5
# A key comes up to 32 times in a batch, with gradients up to 3. An answer is the sum of up to 4 rows.
ROWS = {"rtol": 0.0, "atol": drift(LR, 10, 32, eps=EPS, magnitude=3.0)}
ANSWERS = {"rtol": 0.0, "atol": 4 * ROWS["atol"]}
OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR, "eps": EPS},
    "rowwise": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS},
}


def specs(kind: str, options: Any, mean: bool = False) -> list[Spec]:
    """Two tables, the first with two features; bags of different widths."""
    wide = 8 if kind == "ec" else 12
    return [
        Spec("t0", ("f0", "f1"), rows=40, options=options, mean=mean),
        Spec("t1", ("f2",), rows=40, dim=wide, options=options),
    ]


def require_twins(dynamic: list[Any], static: list[Any]) -> None:
    for ours, theirs in zip(dynamic, static, strict=True):
        for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
            assert mine.keys() == other.keys()
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], **ANSWERS)
    stored = all_rows([part["rows"] for part in dynamic])
    for name, of_table in stored.items():
        assert len(of_table) > 30, "the batches should meet nearly every id"
        for part in static:
            first, weights = part["static"][name]
            for key in range(first, first + len(weights)):
                if key in of_table:
                    np.testing.assert_allclose(of_table[key], weights[key - first], **ROWS)
                else:
                    assert (weights[key - first] == CONSTANT.value).all(), "a row nobody asked for moved"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_ten_steps_train_the_rows_of_static_torchrec(kind: str, world: int) -> None:
    for params in OPTIMIZERS.values():
        static = ranks.run(world, jobs.train, kind, specs(kind, None), params)
        require_twins(ranks.run(world, jobs.train, kind, specs(kind, {}), params), static)
        if kind == "ec":
            require_twins(ranks.run(world, jobs.train, kind, specs(kind, {}), params, dedup=True), static)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mean", [False, True])
def test_weighted_and_averaged_bags_are_those_of_static_torchrec(mean: bool, world: int) -> None:
    for weighted in (False, True):
        arguments = {"steps": 3, "weighted": weighted}
        static = ranks.run(world, jobs.train, "ebc", specs("ebc", None, mean), OPTIMIZERS["sgd"], **arguments)
        dynamic = ranks.run(world, jobs.train, "ebc", specs("ebc", {}, mean), OPTIMIZERS["sgd"], **arguments)
        for ours, theirs in zip(dynamic, static, strict=True):
            for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
                for name in mine:  # an empty bag of weights 0 is 0 / 0 there, 0 here
                    torch.testing.assert_close(mine[name], other[name].nan_to_num(0.0), **ANSWERS)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_features_of_different_batch_sizes_are_those_of_static_torchrec(weighted: bool, world: int) -> None:
    static = ranks.run(world, jobs.variable_batch, False, weighted)
    dynamic = ranks.run(world, jobs.variable_batch, True, weighted)
    for ours, theirs in zip(dynamic, static, strict=True):
        assert ours["answers"][0]["f0"].shape == (5, 8)
        for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], **ANSWERS)
    assert all_rows([answer["rows"] for answer in dynamic])["t0"]


ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02, "eps": 1e-6, "weight_decay": 0.1}


def lazy_adam(steps: int) -> dict[int, Any]:
    """Rows of t0 after lazy Adam with decoupled decay, in float64, from the ids of the same batches."""
    rows: dict[int, Any] = {}
    moments: dict[int, Any] = {}
    for step in range(steps):
        batch = jagged(["f0", "f1"], 12, step)
        gradients: dict[int, Any] = {}
        columns = np.arange(1, 9) / 8
        for number, feature in enumerate(["f0", "f1"], start=1):
            for key in batch[feature].values().tolist():
                row = rows.setdefault(key, np.full(8, CONSTANT.value))
                gradient = number * columns * np.cos(row + columns)
                gradients[key] = gradients.get(key, 0.0) + gradient
        for key, gradient in gradients.items():
            m, v = moments.get(key, (np.zeros(8), np.zeros(8)))
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            moments[key] = (m, v)
            m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            rows[key] = rows[key] - 0.02 * (m_hat / (np.sqrt(v_hat) + 1e-6) + 0.1 * rows[key])
    return rows


@pytest.mark.parametrize("world", [1, 2])
def test_adam_is_lazy_and_counts_the_steps_of_the_module(world: int) -> None:
    results = ranks.run(world, jobs.train, "ec", [Spec("t0", ("f0", "f1"))], ADAM)
    expected = lazy_adam(steps=10)
    stored = all_rows([r["rows"] for r in results])["t0"]
    assert stored.keys() == expected.keys()
    for key, row in stored.items():
        np.testing.assert_allclose(row, expected[key], rtol=2e-4, atol=2e-5)


def test_single_vectors_train_the_same_bits_on_one_two_and_four_ranks() -> None:
    for params in (*OPTIMIZERS.values(), ADAM):
        trained = [
            all_rows([r["rows"] for r in ranks.run(world, jobs.train, "ec", specs("ec", {}), params)])
            for world in (1, 2, 4)
        ]
        assert trained[0] == trained[1] == trained[2]


def test_bags_of_one_id_train_the_same_bits_and_longer_ones_to_a_millionth() -> None:
    for longest in (1, 5):
        trained = [
            all_rows(
                [
                    r["rows"]
                    for r in ranks.run(w, jobs.train, "ebc", specs("ebc", {}), longest=longest, steps=4)
                ]
            )
            for w in (1, 2, 4)
        ]
        for other in trained[1:]:
            assert {name: t.keys() for name, t in other.items()} == {
                n: t.keys() for n, t in trained[0].items()
            }
            for name, of_table in other.items():
                for key, row in of_table.items():
                    if longest == 1:
                        assert row == trained[0][name][key]
                    else:
                        np.testing.assert_allclose(row, trained[0][name][key], **ROWS)


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin"])
def test_any_key_has_one_owner_on_three_ranks(dist_type: str) -> None:
    tables = [Spec("t0", ("f0", "f1"), options={"dist_type": dist_type})]
    alone = all_rows([r["rows"] for r in ranks.run(1, jobs.train, "ec", tables, steps=3, extreme=True)])
    parts = [r["rows"] for r in ranks.run(3, jobs.train, "ec", tables, steps=3, extreme=True)]
    together = all_rows(parts)
    assert set(together["t0"]) == set(alone["t0"]) == set(jobs.EXTREME)
    for key, row in together["t0"].items():  # a third is not exact in float32
        np.testing.assert_allclose(row, alone["t0"][key], **ROWS)
    if dist_type == "roundrobin":
        for rank, part in enumerate(parts):
            assert all((key % 2**64) % 3 == rank for key in part["t0"])


def test_different_batch_sizes_without_inverse_indices_are_refused_on_every_rank() -> None:
    for _, message, _ in ranks.errors(2, jobs.variable_batch_without_inverse):
        assert "inverse indices must be provided" in message  # TorchRec says so
