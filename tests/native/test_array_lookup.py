"""embstore.lookup: lookups and updates of several tables in one call, numpy in and out."""

import numpy as np
import pytest

import embstore
from embstore.lookup import Access, Pooling, Request, Update, apply_gradients, look_up


def tables():
    rng = np.random.default_rng(0)
    made = []
    for dim in (1, 7):
        table = embstore.Table(f"t{dim}", dim=dim, initializer=embstore.Constant(0.5))
        table.insert_or_assign(np.arange(97), rng.normal(size=(97, dim)).astype(np.float32))
        made.append(table)
    return made


def test_requests_of_several_tables_read_what_each_table_reads():
    one, seven = tables()
    keys, offsets = np.array([3, -5, 3, 96, 0]), [0, 2, 2, 5]
    requests = [
        Request(one, keys),
        Request(seven, keys, Pooling.SUM, offsets),
        Request(seven, keys, Pooling.MEAN, np.array(offsets)),  # the same table once more
        Request(one, np.zeros(0, np.int64)),
    ]
    found = look_up(requests, Access.TRAIN)
    rows = seven.find(keys)[0]
    assert one.contains([-5])[0] and (rows[1] == 0.5).all()
    np.testing.assert_array_equal(found[0], one.find(keys)[0])
    sums = np.stack([rows[:2].sum(0), np.zeros(7), rows[2:].sum(0)])
    np.testing.assert_allclose(found[1], sums, rtol=1e-6)
    np.testing.assert_allclose(found[2], sums / [[2], [1], [3]], rtol=1e-6)
    assert found[3].shape == (0, 1)


def test_a_read_makes_no_rows():
    one, seven = tables()
    (zero,) = look_up([Request(one, [-1])], Access.READ_ZERO)
    (initial,) = look_up([Request(seven, [-1])], Access.READ_INITIAL)
    np.testing.assert_array_equal(zero, [[0.0]])
    np.testing.assert_array_equal(initial, np.full((1, 7), 0.5))
    assert len(one) == len(seven) == 97


@pytest.mark.parametrize(
    ("request_of", "error", "named"),
    [
        (lambda t: Request(t, [1.5]), TypeError, "keys"),
        (lambda t: Request(t, [1], Pooling.SUM), ValueError, "offsets"),
        (lambda t: Request(t, [1], offsets=[0, 1]), ValueError, "offsets"),
        (lambda t: Request(t, [1], Pooling.SUM, []), ValueError, "offsets"),
        (lambda t: Request(t, [1], Pooling.SUM, [0, 2]), ValueError, "offsets"),
        (lambda t: Request(t, [1], Pooling.SUM, [0.0, 1.0]), TypeError, "offsets"),
    ],
)
def test_bad_requests_are_refused_and_make_no_rows(request_of, error, named):
    table = embstore.Table("t", dim=2)
    with pytest.raises(error, match=named):
        look_up([request_of(table)], Access.TRAIN)
    assert len(table) == 0


def adam_tables():
    rule = embstore.Adam(lr=0.1)
    made = [embstore.Table(f"t{dim}", dim=dim, optimizer=rule) for dim in (1, 7)]
    for table in made:
        table.find_or_insert(np.arange(97))
    return made


def test_updates_of_several_tables_are_what_each_table_does():
    rng = np.random.default_rng(1)
    keys, offsets = np.array([3, -5, 3, 96, 0]), [0, 2, 2, 5]
    single = rng.normal(size=(5, 1)).astype(np.float32)
    of_bags = rng.normal(size=(3, 7)).astype(np.float32)
    together, apart = adam_tables(), adam_tables()
    for _ in range(2):
        apply_gradients([Update(together[0], keys, single), Update(together[1], keys, of_bags, offsets)])
        apart[0].apply_gradients(keys, single)
        apart[1].apply_gradients(keys, of_bags[[0, 0, 2, 2, 2]])
    for one, other in zip(together, apart):
        assert one.optimizer_step == other.optimizer_step == 2
        found, expected = one.rows(), other.rows()
        np.testing.assert_array_equal(found.keys, expected.keys)  # -5 got no row
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.states, expected.states)


def test_a_table_that_comes_twice_moves_twice_within_a_step():
    (together, _), (apart, _) = adam_tables(), adam_tables()
    apply_gradients([Update(together, [1], [[1.0]]), Update(together, [1], [[2.0]])])
    assert together.optimizer_step == 1
    apart.apply_gradients([1], [[1.0]])
    apart.optimizer_step = 0
    apart.apply_gradients([1], [[2.0]])
    np.testing.assert_array_equal(together.rows().values, apart.rows().values)


@pytest.mark.parametrize(
    ("update_of", "error", "named"),
    [
        (lambda t: Update(t, [1.5], [[1.0]]), TypeError, "keys"),
        (lambda t: Update(t, [1], [[1.0, 2.0]]), ValueError, "gradients"),
        (lambda t: Update(t, [1], [[1.0]], []), ValueError, "offsets"),
        (lambda t: Update(t, [1], [[1.0]], [0, 2]), ValueError, "offsets"),
        (lambda t: Update(t, [1, 2], [[1.0]], [0, 1, 2]), ValueError, "gradients"),
    ],
)
def test_a_bad_update_is_refused_and_moves_no_row_of_any_table(update_of, error, named):
    one, seven = adam_tables()
    before = seven.rows().values
    with pytest.raises(error, match=named):
        apply_gradients([Update(seven, [1], np.ones((1, 7))), update_of(one)])
    np.testing.assert_array_equal(seven.rows().values, before)
    assert one.optimizer_step == seven.optimizer_step == 0
