"""Dynamic tables against static TorchRec, against an oracle, and against themselves on other numbers of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from faces.dynamicemb import jobs, ranks
from faces.dynamicemb.models import CONSTANT, Spec, all_rows

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]

EPS = 1e-3  # large enough that the first, tiny sums of squares do not decide
OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": EPS},
    "rowwise": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": EPS},
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
                torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=1e-5)
    stored = all_rows([part["rows"] for part in dynamic])
    for name, of_table in stored.items():
        assert len(of_table) > 30, "the batches should meet nearly every id"
        for part in static:
            first, weights = part["static"][name]
            for key in range(first, first + len(weights)):
                if key in of_table:
                    np.testing.assert_allclose(of_table[key], weights[key - first], rtol=1e-5, atol=1e-5)
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
                    torch.testing.assert_close(
                        mine[name], other[name].nan_to_num(0.0), rtol=1e-5, atol=1e-5
                    )
