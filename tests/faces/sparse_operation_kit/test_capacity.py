"""A hybrid variable with a bound, and the rows that changed since a moment."""

from datetime import datetime, timezone

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit as sok

CAPACITY = 128  # one bucket, so that the least recently used of all rows is the one that goes


def bounded(**options):
    options = {"max_capacity": CAPACITY, "init_capacity": CAPACITY, "initializer": "ones", **options}
    return sok.DynamicVariable(dimension=3, **options)


def test_the_least_recently_used_rows_give_way_with_their_states():
    variable, wrapper = bounded(), sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    read = lambda keys: tf.nn.embedding_lookup(variable, tf.constant(keys, tf.int64))  # noqa: E731
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(read(np.arange(CAPACITY)))
    wrapper.apply_gradients([(tape.gradient(loss, variable), variable)])
    read(np.arange(50))  # used again: 50 to 127 are the oldest
    vectors, keys, values = sok.sparse_read_and_evict(variable, np.arange(1000, 1078))
    np.testing.assert_array_equal(vectors, np.ones((78, 3)))
    np.testing.assert_array_equal(np.sort(keys), np.arange(50, 128))
    np.testing.assert_allclose(values, np.full((78, 3), 0.9), rtol=1e-5)
    np.testing.assert_array_equal(variable.indices, [*range(50), *range(1000, 1078)])
    # A key that comes back starts fresh.
    np.testing.assert_array_equal(read([60]), [[1, 1, 1]])
    np.testing.assert_array_equal(wrapper.get_slot(variable, "m").sparse_read([60]), [[0, 0, 0]])


def test_nothing_is_reported_when_nothing_had_to_go():
    variable = bounded()
    _, keys, values = sok.sparse_read_and_evict(variable, [[1, 2], [3, 1]])
    assert keys.shape == (0,) and values.shape == (0, 3)
    sok.sparse_read_and_evict(variable, np.arange(1000, 1000 + CAPACITY))
    _, keys, _ = tf.function(lambda: sok.sparse_read_and_evict(variable, tf.constant([7])))()
    assert len(keys) == 1


@pytest.mark.parametrize("capacity", [16, 128, 1024])
def test_there_are_never_more_rows_than_max_capacity_not_even_when_one_batch_brings_more(capacity):
    variable = sok.DynamicVariable(dimension=3, max_capacity=capacity, initializer="ones")
    for begin in (0, 100_000):
        out = tf.nn.embedding_lookup(variable, np.arange(begin, begin + 5 * capacity + 7)).numpy()
        assert int(variable.size[0]) <= capacity
        # What has a place reads its initial value, what was refused reads zeros.
        assert set(np.unique(out)) <= {0.0, 1.0} and (out.sum(axis=1) == 3).sum() <= capacity


def test_evictions_can_only_be_read_from_a_hybrid_variable():
    for variable in (sok.DynamicVariable(dimension=1, var_type="hbm"), sok.Variable([[1.0]])):
        with pytest.raises(TypeError, match="hybrid"):
            sok.sparse_read_and_evict(variable, [1])


def now():
    return datetime.now(timezone.utc)


@pytest.mark.parametrize("var_type", ["hybrid", "hbm"])
def test_an_increment_holds_exactly_what_was_looked_up_assigned_or_updated_since(var_type):
    rng = np.random.default_rng(0)
    variable = sok.DynamicVariable(dimension=3, var_type=var_type)
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    for _ in range(4):
        keys = rng.integers(-500, 500, 97)
        moment = now()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, keys))
        gradient = tape.gradient(loss, variable)
        between = now()
        wrapper.apply_gradients([(gradient, variable)])
        for since in (moment, between):  # the update counts by itself
            (found,), (values,) = sok.incremental_model_dump([variable], since)
            np.testing.assert_array_equal(found, np.unique(keys))
            np.testing.assert_array_equal(values, variable.table.find(found)[0])
    moment = now()
    sok.assign(variable, [9999], np.ones((1, 3)))
    sok.lookup_sparse(variable, tf.ragged.constant([[3, 4]], dtype=tf.int64), training=False)
    (found,), _ = sok.incremental_model_dump(variable, moment)
    np.testing.assert_array_equal(found, [9999])
    (found,), (values,) = sok.incremental_model_dump(variable, now())
    assert found.shape == (0,) and values.shape == (0, 3)


def test_each_variable_may_have_its_own_moment():
    one, two = sok.DynamicVariable(dimension=1), sok.DynamicVariable(dimension=2)
    early = now()
    for variable in (one, two):
        sok.assign(variable, [1], np.ones((1, variable.dimension)))
    keys, values = sok.incremental_model_dump([one, two], [early, now()])
    assert [len(k) for k in keys] == [1, 0] and [v.shape[1] for v in values] == [1, 2]


def test_a_moment_needs_a_time_zone_and_a_dynamic_variable():
    variable = sok.DynamicVariable(dimension=1)
    with pytest.raises(ValueError, match="time zone"):
        sok.incremental_model_dump([variable], datetime.now())
    with pytest.raises(ValueError, match="time_threshold"):
        sok.incremental_model_dump([variable], 12.5)
    with pytest.raises(ValueError, match="time_threshold"):
        sok.incremental_model_dump([variable], [now(), now()])
    with pytest.raises(ValueError, match="dynamic"):
        sok.incremental_model_dump([sok.Variable([[1.0]])], now())
