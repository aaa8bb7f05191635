"""Tables in checkpoints of torch and in `Table.state`: all comes back, or a warning says what does not."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from checkpoint.tables import keys_of, make, require_same, train

import embstore
from embstore.checkpoint.torch_checkpoint import TablesState


def through_torch(table: embstore.Table, back: embstore.Table) -> None:
    state = TablesState({"model": {"user": table}}).state_dict()
    TablesState({"model": {"user": back}}).load_state_dict(state)


def through_state(table: embstore.Table, back: embstore.Table) -> None:
    back.load_state(table.state())


def through_pickle(table: embstore.Table, back: embstore.Table) -> None:
    back.exchange(pickle.loads(pickle.dumps(table)))


@pytest.mark.parametrize("copy", [through_torch, through_state, through_pickle], ids=lambda f: f.__name__)
def test_training_goes_on_to_the_bit_with_seed_and_admission_counters(copy: Any) -> None:
    def counting(seed: int) -> embstore.Table:
        return make(admission_threshold=3, seed=seed)

    table, back = counting(3), counting(99)
    train(table, 2)  # every key was met, none often enough
    copy(table, back)
    assert back.options.seed == 3
    for one in (table, back):
        train(one, 5, first=2)
    assert len(table) > 0
    require_same(table, back)
    np.testing.assert_array_equal(table.admission_counters(), back.admission_counters())


@pytest.mark.parametrize("copy", [through_torch, through_state], ids=lambda f: f.__name__)
def test_counters_for_another_threshold_are_left_with_a_warning(copy: Any) -> None:
    table, back = make(admission_threshold=2), make(admission_threshold=5)
    train(table, 1)
    with pytest.warns(UserWarning, match="admission counters of table '.*user' are not loaded"):
        copy(table, back)


def test_rows_that_find_no_room_are_counted_and_the_highest_scores_stay() -> None:
    large = make()
    scores = np.random.default_rng(1).permutation(1000) + 1
    large.insert_or_assign(np.arange(1000), np.repeat(scores[:, None], 5, 1), scores=scores)
    small = make(init_capacity=128, max_capacity=128, check_mode="ignore")
    with pytest.warns(UserWarning, match="'user' has no room for 872 of 1000 rows"):
        through_torch(large, small)
    assert sorted(small.rows().scores.tolist()) == list(range(873, 1001))
    assert small.stats().refusals == 0


def test_a_checkpoint_of_another_dtype_or_strategy_loads_and_one_that_does_not_fit_changes_nothing() -> None:
    table = make()
    train(table, 2)
    half = make(dtype="bfloat16", score_strategy="lfu")
    with pytest.warns(UserWarning, match="start fresh.*'step'.*'lfu'"):
        through_torch(table, half)
    assert (half.rows().scores == 1).all()
    np.testing.assert_array_equal(half.rows().states, table.rows().states)
    for other in (make(dim=6), make(optimizer=embstore.Adagrad())):
        other.insert_or_assign([5], np.ones((1, other.dim)))
        with pytest.raises(embstore.CheckpointError, match="of table 'model/user' is"):
            through_torch(table, other)
        assert other.rows().keys.tolist() == [5]


@pytest.mark.parametrize("field", ["keys", "values", "states", "scores", "spec"])
@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_checkpoint_that_lacks_a_tensor_or_rows_is_refused(field: str, damage: str) -> None:
    table, back = make(), make()
    table.insert_or_assign(keys_of(0), np.ones((97, 5)))
    back.insert_or_assign([5], np.ones((1, 5)))
    state = TablesState({"model": {"user": table}}).state_dict()
    (key,) = [key for key in state if key.endswith(f".{field}")]
    state[key] = state[key][:-1]
    if damage == "gone":
        del state[key]
    with pytest.raises(embstore.CheckpointError, match="'model/user'"):
        TablesState({"model": {"user": back}}).load_state_dict(state)
    assert back.rows().keys.tolist() == [5]
