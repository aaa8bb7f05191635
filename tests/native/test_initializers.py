"""Every initializer of the declared list: its values, its errors, and that a row is a pure function of
(seed, table, key)."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from native_tables import small_table

import embstore
from embstore.initializers import Initializer


@dataclass
class Sample:
    """An initializer, what holds of many of its values, and keywords that its class should refuse."""

    ours: Initializer
    holds: Any
    errors: list[tuple[dict[str, Any], str]] = field(default_factory=list)


def within(low, high, mean, std):
    def holds(values, keys):
        assert values.min() >= low and values.max() <= high
        assert abs(values.mean() - mean) < 0.02 and abs(values.std() - std) < 0.02

    return holds


def debug_holds(values, keys):
    expected = (keys.astype(np.uint64) % np.uint64(100000)).astype(np.float32)
    np.testing.assert_array_equal(values, np.repeat(expected[:, None], values.shape[1], 1))


NAN, INF = math.nan, math.inf
SAMPLES = [
    Sample(
        embstore.Constant(0.25),
        within(0.25, 0.25, 0.25, 0.0),
        [
            ({"value": NAN}, "value"),
            ({"value": INF}, "value"),
            ({"value": "1"}, "value"),
            ({"value": True}, "value"),
        ],
    ),
    Sample(
        embstore.Uniform(-1.0, 2.0),
        within(-1.0, 2.0, 0.5, math.sqrt(9 / 12)),
        [({"lower": 2.0, "upper": 1.0}, "lower"), ({"lower": NAN}, "lower"), ({"upper": INF}, "upper")],
    ),
    Sample(
        embstore.Normal(0.5, 1.0),
        within(-8, 8, 0.5, 1.0),
        [({"std": -1.0}, "std"), ({"mean": NAN}, "mean"), ({"std": INF}, "std")],
    ),
    Sample(
        embstore.TruncatedNormal(0.0, 1.0, -1.0, 1.0),
        within(-1.0, 1.0, 0.0, 0.5396),
        [({"std": 0.0}, "std"), ({"lower": 1.0, "upper": 1.0}, "lower"), ({"upper": NAN}, "upper")],
    ),
    Sample(embstore.Debug(), debug_holds),
]
IDS = [type(s.ours).__name__ for s in SAMPLES]
KEYS = np.concatenate([[0, -1, -(2**63), 2**63 - 1], np.arange(5000) * 7919]).astype(np.int64)


def test_every_initializer_has_a_sample():
    assert {type(s.ours) for s in SAMPLES} == set(Initializer.__subclasses__())


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_values_are_distributed_as_they_should(sample):
    table = small_table(8, initializer=sample.ours, max_capacity=8192)
    values = table.find_or_insert(KEYS)
    sample.holds(values, KEYS)
    np.testing.assert_array_equal(values, table.initial_values(KEYS))


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_row_does_not_depend_on_order_batches_threads_or_other_keys(sample, dtype):
    def make():
        return small_table(7, initializer=sample.ours, max_capacity=8192, dtype=dtype, seed=5)

    first = make()
    embstore.set_num_threads(1)
    expected = first.find_or_insert(KEYS)
    second = make()
    embstore.set_num_threads(4)
    shuffled = np.random.default_rng(0).permutation(KEYS)
    for part in np.array_split(shuffled, 13):
        second.find_or_insert(part)
    assert second.find(KEYS)[0].tobytes() == expected.tobytes()
    assert first.initial_values(KEYS).tobytes() == expected.tobytes()  # also in the dtype of the rows
    first.erase(KEYS[:100])
    assert first.find_or_insert(KEYS).tobytes() == expected.tobytes()


def test_seed_and_name_separate_the_streams():
    def values(**keywords):
        return small_table(4, initializer=embstore.Uniform(), **keywords).find_or_insert([1, 2, 3]).tobytes()

    assert values() == values()
    assert len({values(), values(seed=1), values(seed=-1), values(name="other")}) == 4


@pytest.mark.parametrize(
    ("kind", "keywords", "names"),
    [(type(s.ours), keywords, names) for s in SAMPLES for keywords, names in s.errors],
)
def test_a_bad_argument_is_named(kind, keywords, names):
    with pytest.raises(ValueError, match=names):
        kind(**keywords)


def test_a_number_that_float32_does_not_hold_is_refused():
    with pytest.raises(ValueError, match="finite"):
        small_table(2, initializer=embstore.Constant(1e300))
