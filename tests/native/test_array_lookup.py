"""embstore.lookup: several tables in one call, numpy in and out."""

import numpy as np
import pytest

import embstore
from embstore.lookup import Access, Pooling, Request, look_up


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
