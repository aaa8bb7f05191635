"""Dynamic tables that are kept whole on one rank each, against the same tables on one rank and row-wise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faces.dynamicemb import dump_jobs, failure_jobs, jobs, ranks
from faces.dynamicemb.models import Spec, all_rows
from faces.dynamicemb.test_twins import ADAM, ANSWERS, OPTIMIZERS

from dynamicemb.planner import DynamicEmbParameterConstraints
from dynamicemb.planner.placement import place_tables

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]


def specs(kind: str, sharding: str = "table_wise", mean: bool = False) -> list[Spec]:
    """Three tables, so that a fourth rank has none; the first with two features."""
    dims = (8, 8, 8) if kind == "ec" else (8, 12, 3)
    features = (("f0", "f2"), ("f1",), ("f3",))
    return [
        Spec(f"t{i}", names, rows=40, dim=dim, mean=mean and i == 0, sharding=sharding)
        for i, (names, dim) in enumerate(zip(features, dims, strict=True))
    ]


def trained(world: int, *arguments: Any, **keywords: Any) -> tuple[list[Any], dict[str, Any]]:
    results = ranks.run(world, jobs.train, *arguments, steps=4, **keywords)
    return [r["rows"] for r in results], all_rows([r["rows"] for r in results])


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_whole_tables_train_the_bits_of_one_rank(kind: str) -> None:
    for params in (OPTIMIZERS["rowwise"], ADAM):
        _, alone = trained(1, kind, specs(kind), params, longest=5)
        for world in (2, 4):
            parts, together = trained(world, kind, specs(kind), params, longest=5)
            assert together == alone
            for name in alone:
                assert sorted(len(part[name]) for part in parts)[:-1] == [0] * (world - 1)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_and_averaged_bags_of_whole_tables_are_those_of_one_rank(weighted: bool, mean: bool) -> None:
    arguments: Any = ("ebc", specs("ebc", mean=mean), OPTIMIZERS["sgd"])
    _, alone = trained(1, *arguments, weighted=weighted)
    assert trained(2, *arguments, weighted=weighted)[1] == alone


def test_duplicates_may_be_dropped_before_they_travel() -> None:
    assert trained(2, "ec", specs("ec"), dedup=True)[1].keys() == {"t0", "t1", "t2"}
    one, two = trained(1, "ec", specs("ec"))[1], trained(2, "ec", specs("ec"), dedup=True)[1]
    for name, of_table in one.items():
        assert of_table.keys() == two[name].keys()
        for key, row in of_table.items():
            np.testing.assert_allclose(two[name][key], row, **ANSWERS)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_whole_spread_and_static_tables_live_in_one_collection(kind: str) -> None:
    dim = 8
    mixed = [
        Spec("t0", ("f0",), rows=40, dim=dim, sharding="table_wise"),
        Spec("t1", ("f1",), rows=40, dim=dim),
        Spec("t2", ("f2",), rows=40, dim=dim, options=None, sharding="table_wise"),
        Spec("t3", ("f3", "f0"), rows=40, dim=dim, sharding="table_wise"),
    ]
    _, together = trained(2, kind, mixed, OPTIMIZERS["sgd"])
    _, alone = trained(1, kind, mixed, OPTIMIZERS["sgd"])
    for name, of_table in alone.items():
        assert of_table.keys() == together[name].keys()
        for key, row in of_table.items():
            np.testing.assert_allclose(together[name][key], row, **ANSWERS)
    assert together["t0"] == alone["t0"] and together["t3"] == alone["t3"]


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_batches_of_any_sizes_reach_whole_tables(kind: str) -> None:
    alone = all_rows([r["rows"] for r in ranks.run(1, jobs.uneven, kind)])
    results = ranks.run(3, jobs.uneven, kind, sharding="table_wise")
    assert all(shape[0] == 0 for shape in results[0]["shapes"])
    together = all_rows([r["rows"] for r in results])
    for name, of_table in alone.items():
        assert of_table.keys() == together[name].keys()
        for key, row in of_table.items():  # a third is not exact in float32
            assert together[name][key] == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize(("before", "after"), [("table_wise", "row_wise"), ("row_wise", "table_wise")])
def test_dumps_move_between_whole_and_spread_tables(tmp_path: Path, before: str, after: str) -> None:
    """Adam: the number of steps has to arrive too, also of tables that rank 0 has no row of."""
    path = str(tmp_path / "dump")
    dumped = ranks.run(2, dump_jobs.dump, path, "ec", specs("ec", before), ADAM)
    loaded = ranks.run(4, dump_jobs.load, path, "ec", specs("ec", after), ADAM)
    for when in ("rows", "after"):
        assert all_rows([r[when] for r in loaded]) == all_rows([r[when] for r in dumped])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_an_owner_that_fails_raises_on_all_ranks_and_training_can_go_on(kind: str, training: bool) -> None:
    results = ranks.run(3, failure_jobs.fail_in_a_step, kind, False, training, sharding="table_wise")
    for rank, result in enumerate(results):
        name, message = result["answer"]
        assert name == "OSError" and "the disk of this rank is gone" in message, message
        assert ("on rank 1" in message) == (rank != failure_jobs.FAILING)
        assert result["same"]


def _config(name: str, dim: int, features: int = 1) -> Any:
    return SimpleNamespace(
        name=name, embedding_dim=dim, feature_names=[f"{name}{i}" for i in range(features)]
    )


def _constraint(*types: str, **keywords: Any) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(sharding_types=list(types) or None, use_dynamicemb=True, **keywords)


def test_the_most_expensive_table_goes_first_to_the_rank_with_the_least_work() -> None:
    configs = [
        _config("a", 8),
        _config("b", 32),
        _config("c", 8, features=2),
        _config("d", 16),
        _config("e", 8),
    ]
    constraints = {c.name: _constraint("table_wise") for c in configs}
    constraints["e"] = _constraint("table_wise", pooling_factors=[100.0])
    assert place_tables(configs, constraints, 2) == {"e": 0, "b": 1, "c": 1, "d": 1, "a": 1}
    assert place_tables(configs, constraints, 1) == dict.fromkeys("ebcda", 0)


def test_tables_that_may_be_either_are_whole_where_every_rank_gets_one() -> None:
    configs = [_config("a", 8), _config("b", 8)]
    either = {c.name: _constraint("row_wise", "table_wise") for c in configs}
    assert place_tables(configs, either, 2) == {"a": 0, "b": 1}
    assert place_tables(configs, either, 3) == {}
    assert place_tables(configs, {"a": _constraint(), "b": _constraint("row_wise")}, 2) == {}
    with pytest.raises(ValueError, match="sharding_types of dynamic table 'a' should be .* but are"):
        place_tables(configs, {**either, "a": _constraint("column_wise")}, 2)


def test_whole_tables_with_shared_rows_are_refused() -> None:
    shared = [Spec("t0", ("f0",), sharding="table_wise", options={"shared_rows": 2})]
    for _, message, _ in ranks.errors(2, jobs.train, "ebc", shared):
        assert "shared_rows of table-wise table 't0' should be 0 but is: 2" in message
