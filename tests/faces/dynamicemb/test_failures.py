"""One rank fails in training, evaluation, construction or planning: all raise, and none is left waiting."""

from __future__ import annotations

import pytest
from faces.dynamicemb import failure_jobs as jobs
from faces.dynamicemb import ranks

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(200)]

REASON = "the disk of this rank is gone"


def require_named(answers: list[tuple[str, str]]) -> None:
    for rank, (kind, message) in enumerate(answers):
        assert kind == "OSError" and REASON in message, message
        assert ("on rank 1" in message) == (rank != jobs.FAILING)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("kind", "dedup"), [("ec", False), ("ec", True), ("ebc", False)])
def test_a_store_that_fails_on_one_rank_raises_on_all_and_training_can_go_on(
    kind: str, dedup: bool, training: bool
) -> None:
    results = ranks.run(3, jobs.fail_in_a_step, kind, dedup, training)
    require_named([result["answer"] for result in results])
    assert all(result["same"] for result in results)


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_a_store_that_cannot_be_opened_on_one_rank_raises_on_all_and_closes_the_others(kind: str) -> None:
    results = ranks.run(3, jobs.fail_in_construction, kind)
    require_named([result["answer"] for result in results])
    assert [result["closed"] for result in results] == [1, 0, 1]


def test_a_plan_that_rank_0_cannot_make_raises_on_all() -> None:
    answers = ranks.run(2, jobs.fail_in_planning)
    assert answers == [("MemoryError", "no plan fits"), ("MemoryError", "no plan fits (on rank 0)")]


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_a_rank_that_fails_before_the_exchange_ends_the_wait_of_the_others(kind: str) -> None:
    answers = ranks.run(2, jobs.stay_away, kind, group_timeout=2.0)
    assert answers[0][0] == answers[1][0] and answers[1][1] in answers[0][1], answers
    assert "on rank 1" in answers[0][1]
