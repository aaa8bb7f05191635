"""Options that decide which rows stay: ttl, bytes, importance, shared rows. Ranks are those of ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faces.dynamicemb import ranks, retention_jobs
from faces.dynamicemb.small_tables import LFU, STEP, Strategy, options, tables, train

from dynamicemb import DynamicEmbEvictStrategy, DynamicEmbTableOptions
from dynamicemb.incremental_dump import get_score, incremental_dump
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

IMPORTANCE = Strategy.IMPORTANCE
KINDS: dict[str, dict[str, Any]] = {
    "ttl in steps": {"score_strategy": STEP, "ttl": 9},
    "importance": {"score_strategy": IMPORTANCE, "half_life": 20, "max_bytes": 20_000, "shared_rows": 2},
    "frequency": {
        "score_strategy": LFU,
        "admission": "frequency",
        "shared_rows": 2,
        "start_from_shared": False,
        "max_bytes": 145_000,  # most of it for counting ids without a row
    },
}


def options_of(kind: str, world: int) -> dict[str, Any]:
    """A rank has as many bytes on any number of ranks."""
    given = KINDS[kind]
    return {**given, "max_bytes": world * given["max_bytes"]} if "max_bytes" in given else given


def everything(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of all ranks together."""
    return {
        "rows": {key: row for result in results for key, row in result["rows"].items()},
        "shared": {number: row for result in results for number, row in result["shared"].items()},
    }


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return repr(ours) == repr(theirs)


@pytest.mark.multirank
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_was_dumped_and_loaded_keeps_the_same_rows(
    kind: str, world: int, tmp_path: Path
) -> None:
    whole = ranks.run(world, retention_jobs.train, options_of(kind, world), 45)
    again = ranks.run(world, retention_jobs.train, options_of(kind, world), 45, 23, str(tmp_path / "dump"))
    assert sum(result["expired"] + result["evictions"] for result in whole) > 20
    for ours, theirs in zip(whole, again, strict=True):
        assert same(everything([ours]), everything([theirs]))


@pytest.mark.multirank
def test_the_same_ids_expire_on_any_number_of_ranks() -> None:
    one, two, four = (
        everything(ranks.run(world, retention_jobs.train, KINDS["ttl in steps"], 45)) for world in (1, 2, 4)
    )
    for other in (two, four):
        assert one["rows"].keys() == other["rows"].keys()
        for key, row in one["rows"].items():
            assert repr(row) == repr(other["rows"][key])


@pytest.mark.multirank
@pytest.mark.parametrize("world", [1, 2])
def test_the_ranks_of_a_table_share_its_bytes(world: int) -> None:
    results = ranks.run(world, retention_jobs.train, {"max_bytes": 24_000}, 45)
    assert sum(result["evictions"] for result in results) > 20
    assert 16_000 < sum(result["bytes"] for result in results) <= 24_000
    assert all(result["capacity"] < 512 // world for result in results)
    errors = ranks.errors(world, retention_jobs.train, {"max_bytes": 1000}, 1)
    assert all(
        kind == "ValueError" and f"each of {world} ranks, but is: 1000" in text for kind, text, _ in errors
    )


@pytest.mark.multirank
@pytest.mark.parametrize("world", [1, 2])
def test_aged_counts_have_the_duplicates_that_are_not_sent(world: int) -> None:
    found = [r for r in ranks.run(world, retention_jobs.aged_counts_with_dedup)]
    scores = {key: score for result in found for key, score in result.items()}
    assert scores[5] > scores[7] > scores[6]


def test_importance_keeps_the_rows_that_learn_most() -> None:
    module = tables(options(max_capacity=128, score_strategy=IMPORTANCE))
    for first in range(0, 1000, 10):
        keys = torch.arange(first, first + 10)
        out = module(keys, torch.arange(11))
        (out.sum(1) * torch.where(keys % 10 == 0, 10.0, 0.1)).sum().backward()
    (table,) = module.dynamic_tables.values()
    kept = table.table.rows().keys
    assert len(kept) == 128 and set(range(0, 1000, 10)) <= set(kept.tolist())


@pytest.mark.parametrize("strategy", [LFU, IMPORTANCE])
def test_increments_by_score_hold_every_row_where_scores_grow_with_use(strategy: Strategy) -> None:
    module = tables(options(score_strategy=strategy, half_life=5))
    train(module, 3, 1, 3)
    since = get_score(module)
    assert since is not None and [list(scores.values()) for scores in since.values()] == [[1]]
    found = incremental_dump(module, since)
    assert found is not None
    ((keys, _),) = (tensors for named in found[0].values() for tensors in named.values())
    assert keys.tolist() == [1, 3]


def test_seconds_are_those_since_the_last_training_forward() -> None:
    module = tables(options(ttl=3600))
    (table,) = (dynamic.table for dynamic in module.dynamic_tables.values())
    ages = torch.tensor([3700, 3500]) * 10**9
    table.insert_or_assign([1, 2], torch.ones(2, 4), scores=table.score - ages.numpy())
    train(module, 3)
    assert sorted(table) == [2, 3]


def test_a_new_row_begins_as_its_shared_row_unless_asked_otherwise() -> None:
    starts = []
    for copies in (True, False):
        module = tables(
            options(
                max_capacity=128, score_strategy=LFU, admission="frequency", shared_rows=1,
                start_from_shared=copies,
            )
        )  # fmt: skip
        for _ in range(9):
            train(module, *range(128))
        train(module, 500, 500)  # too few to get a row: the shared row learns
        (table,) = (dynamic.table for dynamic in module.dynamic_tables.values())
        shared = table.shared_rows().values[0].tolist()
        while 500 not in table:
            shared = table.shared_rows().values[0].tolist()
            begin = train(module, *([500] * 64))[0].tolist()
        starts.append([value / 64 for value in begin] == shared)
    assert starts == [True, False]


def test_the_plan_says_how_rows_are_evicted() -> None:
    planned = DynamicEmbTableOptions(score_strategy=IMPORTANCE).planned(
        num_embeddings=1000, dim=4, world=1, dtype=torch.float32
    )
    assert planned.evict_strategy is DynamicEmbEvictStrategy.CUSTOMIZED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttl": 0}, "ttl should be a number of seconds but is: 0"),
        ({"ttl": "1h"}, "ttl should be a number of seconds but is: '1h'"),
        ({"score_strategy": STEP, "ttl": 1.5}, "ttl should be a number of batches .* but is: 1.5"),
        ({"score_strategy": LFU, "ttl": 5}, "ttl needs a score strategy with a clock"),
        ({"max_bytes": 0}, "max_bytes should be None or an integer of at least 1 but is: 0"),
        ({"max_bytes": 1e6}, "max_bytes should be None or an integer"),
        ({"max_bytes": 10**6, "score_strategy": Strategy.NO_EVICTION}, "should be None with NO_EVICTION"),
        ({"half_life": 3}, "half_life should be 0 unless score_strategy is 'lfu' or 'importance' but is: 3"),
        ({"score_strategy": LFU, "half_life": -1}, "half_life should be at least 0"),
        ({"admission": "frequency"}, "admission should be 'frequency' only with score_strategy 'lfu' or"),
        ({"admission": "rare"}, "admission should be one of 'all', 'frequency' but is: 'rare'"),
        ({"shared_rows": -1}, "shared_rows should be between 0 and 65536 but is: -1"),
        ({"start_from_shared": 1}, "start_from_shared should be True or False but is: 1"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_followed_is_refused_when_it_is_given(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicEmbTableOptions(**given)


def test_options_that_were_changed_since_are_checked_by_the_planner() -> None:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    changed = DynamicEmbTableOptions()
    changed.ttl = -3
    config = EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=1000)
    constraints = {"user": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=changed)}
    with pytest.raises(ValueError, match="ttl should be a number of seconds but is: -3"):
        DynamicEmbeddingShardingPlanner([config], constraints=constraints)
