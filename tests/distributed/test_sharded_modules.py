"""Modules whose rows are spread over ranks: the losses and rows of a static table trained on all batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import sharded_jobs as jobs
from distributed import unequal_jobs
from faces.dynamicemb import ranks

import embstore

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]


def whole(parts: list[dict[str, embstore.Rows]]) -> dict[str, embstore.Rows]:
    """The rows of all ranks together, by table, sorted by key."""
    tables = {}
    for name in parts[0]:
        rows = embstore.Rows.concatenate([part[name] for part in parts])
        order = np.argsort(rows.keys, kind="stable")
        tables[name] = embstore.Rows(
            rows.keys[order], rows.values[order], rows.states[order], rows.scores[order]
        )
    return tables


def require_same(ours: list[dict[str, embstore.Rows]], theirs: list[dict[str, embstore.Rows]]) -> None:
    one, two = whole(ours), whole(theirs)
    assert one.keys() == two.keys()
    for name in one:
        for field in ("keys", "values", "states"):
            np.testing.assert_array_equal(
                getattr(one[name], field), getattr(two[name], field), err_msg=f"{name} {field}"
            )


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("kind", jobs.KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_have_the_losses_of_a_static_table_trained_on_the_batches_of_all(
    world: int, kind: str, rule: str
) -> None:
    ranks.run(world, jobs.twins, kind, rule, 7)


@pytest.mark.parametrize("kind", ["embedding", "bag sum", "collection", "bag collection"])
def test_the_rows_do_not_depend_on_the_number_of_ranks_to_the_bit(kind: str) -> None:
    for world in (2, 4):
        alone = ranks.run(1, jobs.train, kind, "adam", 6, divide=world)
        several = ranks.run(world, jobs.train, kind, "adam", 6)
        require_same([rows for _, rows, _ in alone], [rows for _, rows, _ in several])
        assert all(steps == alone[0][2] for _, _, steps in several)
        assert all(len(rows["a"]) for _, rows, _ in several)


@pytest.mark.parametrize("restart", [False, True])
def test_shared_rows_do_not_depend_on_the_number_of_ranks_that_divides_theirs(
    tmp_path: Path, restart: bool
) -> None:
    found = []
    for world in (1, 2, 4):
        folder = str(tmp_path / str(world)) if restart else None
        answers = ranks.run(world, jobs.crowded, 4, 8, folder)
        own = whole([{"a": rows} for rows, _ in answers])["a"]
        shared = whole([{"a": rows} for _, rows in answers])["a"]
        found.append([getattr(r, f).tobytes() for r in (own, shared) for f in ("keys", "values", "states")])
        assert shared.keys.tolist() == [0, 1, 2, 3] and len(own.keys)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("world", [1, 2])
def test_a_module_that_evicts_has_the_same_bits_for_any_number_of_threads_and_after_restarts(
    tmp_path: Path, world: int
) -> None:
    first = ranks.run(world, jobs.evicting, 40, 1)
    for threads in (2, 4):
        assert ranks.run(world, jobs.evicting, 40, threads) == first
    for restart in ("dump", "log"):
        assert ranks.run(world, jobs.evicting, 40, 2, restart, str(tmp_path / restart)) == first


def test_a_rank_keeps_the_rows_that_a_process_with_its_ids_alone_keeps() -> None:
    alone = [ranks.run(1, jobs.evicting, 40, 1, only=rank)[0] for rank in (0, 1)]
    assert ranks.run(2, jobs.evicting, 40, 1) == alone


def test_the_same_ids_expire_on_any_number_of_ranks() -> None:
    last_use = {int(jobs.IDS[i]): step for step in range(12) for i in jobs.batch_of(step, "u")[0][:6]}
    found = []
    for world in (1, 2, 4):
        answers = ranks.run(world, jobs.expiring, 4, 12)
        own = whole([{"a": rows} for rows, _ in answers])["a"]
        assert own.keys.tolist() == sorted(key for key, step in last_use.items() if 11 - step <= 3)
        found.append(
            [sum(n for _, n in answers), *(getattr(own, f).tobytes() for f in ("values", "states", "scores"))]
        )
    assert found[0] == found[1] == found[2] and found[0][0] > 5


@pytest.mark.parametrize("patient", [False, True])
def test_max_norm_counts_the_rows_of_all_ranks(patient: bool) -> None:
    alone = ranks.run(1, jobs.clipped, 2, patient)
    several = ranks.run(2, jobs.clipped, 1, patient)
    one, two = (whole([rows for _, rows, _ in answers]) for answers in (alone, several))
    for name in one:
        np.testing.assert_allclose(two[name].values, one[name].values, rtol=1e-5, atol=1e-6)
    free = whole([rows for _, rows, _ in ranks.run(2, jobs.train, "collection", "sgd", 4)])
    assert not np.allclose(free["a"].values, two["a"].values, atol=1e-3)


def test_gradients_that_wait_for_step_give_the_rows_of_an_update_in_backward() -> None:
    now, later = (
        ranks.run(2, jobs.train, "collection", "adagrad", 4, update_in_backward=u) for u in (True, False)
    )
    require_same([rows for _, rows, _ in now], [rows for _, rows, _ in later])


@pytest.mark.parametrize("training", [True, False])
def test_per_sample_weights_get_their_gradient_on_every_rank(training: bool) -> None:
    for ours, theirs in ranks.run(2, jobs.weight_gradients, training):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patient", [False, True], ids=["optimizer", "step(scale)"])
def test_a_scaler_skips_the_step_of_all_ranks_when_the_gradients_of_one_are_not_finite(patient: bool) -> None:
    answers = ranks.run(2, jobs.scaler, patient)
    for told, scale, _ in answers:
        moved = [m for m, _ in told]
        if patient:
            assert moved == [True, True, False, True, True, False, True]
        else:
            assert scale == 2.0**8  # halved twice
    for _, _, rows in answers:
        assert np.isfinite(rows.values).all()


@pytest.mark.parametrize("patient", [False, True], ids=["in backward", "with the optimizer"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_model_under_data_parallel_has_the_losses_of_a_static_one(rule: str, patient: bool) -> None:
    for world in (2, 3):
        ranks.run(world, jobs.data_parallel, rule, patient)


def test_vectors_have_the_dtype_of_the_table_or_the_one_asked_for() -> None:
    for dtype, asked, vectors in ranks.run(2, jobs.half_precision):
        assert (dtype, asked) == (torch.bfloat16, torch.float64) and vectors.abs().sum() > 0


def test_ranks_may_have_different_features_and_every_table_that_is_used_makes_its_step() -> None:
    assert ranks.run(3, unequal_jobs.missing_features) == [{"a": 3, "b": 3}] * 3


def test_rows_without_a_gradient_on_any_rank_do_not_move() -> None:
    ranks.run(2, unequal_jobs.unused_outputs)


FAILURES = {
    "construction": ("ValueError", "dim should be"),
    "options": ("ValueError", "a sharded module should be the same on every rank"),
    "rows of others": ("ValueError", "should be owned by rank 1 of 3"),
    "dtype": ("TypeError", "ids should be integers"),
    "offsets": ("ValueError", "offsets should rise from 0 to 24"),
    "feature": ("ValueError", "features should be among"),
    "no feature": ("ValueError", "should have a feature"),
    "mode": ("ValueError", "should be the same on every rank but differ between"),
    "closed": ("RuntimeError", "closed"),
    "refused": ("RefusedKeysError", "refused"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_one_rank_that_fails_raises_on_all_and_all_train_on(what: str) -> None:
    for kind, message in ranks.run(3, unequal_jobs.failing_then_training, what):
        assert (kind, FAILURES[what][1] in message) == (FAILURES[what][0], True), message


def test_a_rank_that_does_not_come_is_named() -> None:
    first, absentee = ranks.run(2, unequal_jobs.absent, group_timeout=3)
    assert first[0] == "RankError" and "rank 1" in first[1] and absentee is None


def test_a_failed_update_of_one_rank_is_told_to_the_others_in_their_next_step() -> None:
    for rank, (kind, message) in enumerate(ranks.run(2, unequal_jobs.failing_update, group_timeout=3)):
        assert kind == "OSError" and "No space left on device" in message
        assert ("on rank 1" in message) == (rank == 0)


def test_a_second_backward_raises_or_adds_as_in_a_module_alone() -> None:
    for kind, message, _ in ranks.errors(2, unequal_jobs.twice, False):
        assert kind == "RuntimeError" and "can be backpropagated once" in message
    assert all(step == 1 for step, _ in ranks.run(2, unequal_jobs.twice, True))


def test_torch_compile_leaves_the_exchange_out_of_its_graph_and_says_so_where_it_must_not() -> None:
    assert ranks.run(2, jobs.compiled, False) == [True, True]
    for _, message, _ in ranks.errors(2, jobs.compiled, True):
        assert "a sharded module of embstore exchanges rows with other ranks" in message


def test_copies_and_state_dicts_are_of_a_rank_and_pickles_are_refused() -> None:
    for kind, message in ranks.run(2, jobs.copies):
        assert kind == "TypeError" and "embstore.dump" in message


def test_a_state_dict_of_another_number_of_ranks_is_refused_with_the_way_to_go(tmp_path: Path) -> None:
    ranks.run(2, jobs.save_state, str(tmp_path))
    for world in (1, 3):
        for kind, message, _ in ranks.errors(world, jobs.load_state, str(tmp_path)):
            assert kind == "ValueError" and "rank 0 of 2" in message and "embstore.load" in message


def test_dumps_and_logs_load_at_any_number_of_ranks_and_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    end = ranks.run(2, jobs.dump, str(tmp_path), 3)
    for world, divide in ((1, 2), (2, 1)):
        answers = ranks.run(world, jobs.resume, str(tmp_path), 3, divide)
        require_same([resumed for resumed, _ in answers], end)
        require_same([logged for _, logged in answers], end)
    require_same([logged for _, logged in ranks.run(4, jobs.resume, str(tmp_path), 3, 1)], end)


def test_rows_may_be_spread_over_some_of_the_ranks() -> None:
    for message in ranks.run(4, jobs.subgroup):
        assert "make it with sharded=True" in message


def test_a_group_of_one_rank_keeps_all_rows() -> None:
    assert ranks.run(2, jobs.alone_in_a_group) == [len(jobs.IDS)] * 2


def test_ranks_start_with_the_seeds_of_rank_0() -> None:
    first, *others = ranks.run(3, jobs.seeds)
    assert others == [first, first] and first[0] != first[1]


def arguments() -> dict[str, Any]:
    return {"sharded without a group": {"sharded": True}, "device rows": {"sharded": True, "device_rows": 9}}


@pytest.mark.parametrize("which", arguments())
def test_a_sharded_module_needs_a_process_group_and_no_device_rows(which: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"init_process_group|device_rows should be 0"):
        embstore.Embedding(3, **arguments()[which])
