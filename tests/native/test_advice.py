"""`Table.advise`: what it says about other capacities is what tables of those capacities do."""

import json

import numpy as np
import pytest
from native_tables import as_dict, random_keys

import embstore
from embstore.advice import Advice, Point, notes_on


def stream(batches, n=512, ids=20_000, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        yield (ids ** rng.random(n)).astype(np.int64) * 7919 - 12345


def table_of(capacity, **options):
    options = {"score_strategy": "step", "bucket_capacity": 16, "max_capacity": capacity, **options}
    return embstore.Table("t", dim=2, **options)


def found_by(table, batches):
    """The share of occurrences whose id had a row when its batch came."""
    found = uses = 0
    for keys in batches:
        found += int(table.contains(keys).sum())
        uses += len(keys)
        table.find_or_insert(keys)
    return found / uses


def test_the_curve_by_recency_is_what_tables_of_other_sizes_find():
    observed = table_of(2048)
    observed.sample_misses()
    for keys in stream(200):
        observed.find_or_insert(keys)
    points = {point.rows: point for point in observed.advise().points}
    assert sorted(points) == [256, 512, 1024, 2048, 4096, 8192, 16384]
    for rows in (1024, 2048, 4096, 16384):
        assert points[rows].by_recency == pytest.approx(found_by(table_of(rows), stream(200)), abs=0.03)


def test_the_curve_by_frequency_is_what_the_most_used_ids_find():
    observed = table_of(512)
    observed.sample_misses()
    keys = np.concatenate(list(stream(50, ids=3000)))
    for batch in np.split(keys, 50):
        observed.find_or_insert(batch)
    counts = np.sort(np.unique(keys, return_counts=True)[1])[::-1] - 1  # the first use finds nothing
    for point in observed.advise().points:
        assert point.by_frequency == pytest.approx(counts[: point.rows].sum() / len(keys), abs=1e-9)


def test_it_tells_how_many_evicted_ids_came_back():
    table = table_of(256, eviction_log="keys")
    table.sample_misses()
    evicted, returned = set(), 0
    for keys in stream(60, n=97, ids=2000):
        ids = set(keys.tolist())
        returned += len(evicted & ids)
        evicted -= ids
        table.find_or_insert(keys)
        evicted |= set(table.evictions().keys.tolist())
    advice = table.advise()
    assert advice.evicted == table.stats().evictions > 100
    assert advice.returned == returned > 100
    assert any("come back" in note for note in advice.notes)


def test_a_sample_that_misses_the_most_frequent_ids_is_near_the_truth_too():
    rng = np.random.default_rng(0)
    batches = [rng.zipf(1.1, 4096) % 200_000 for _ in range(200)]
    observed = table_of(4096)
    observed.sample_misses()
    for keys in batches:
        observed.find_or_insert(keys)
    counts = np.sort(np.unique(np.concatenate(batches), return_counts=True)[1])[::-1] - 1
    advice = observed.advise()
    assert "1 in 128 ids" in advice.based_on or "1 in 256 ids" in advice.based_on
    for point in advice.points:
        truth = counts[: point.rows].sum() / (200 * 4096)
        assert point.by_frequency == pytest.approx(truth, abs=0.03)


def test_a_sample_of_many_ids_is_near_the_truth_and_changes_no_row():
    watched, plain = (table_of(65536, optimizer=embstore.Adagrad(lr=0.1)) for _ in range(2))
    watched.sample_misses()
    batches = list(stream(40, n=4001, ids=200_000))
    for table in (watched, plain):
        for keys in batches:
            table.find_or_insert(keys)
    assert as_dict(watched) == as_dict(plain)
    sample = watched.miss_sample()
    assert sample.rate < 1 and len(sample.counts) <= 8192
    assert sample.ids == pytest.approx(len(np.unique(np.concatenate(batches))), rel=0.05)
    assert sample.uses == pytest.approx(40 * 4001, rel=0.15)


def test_the_sample_is_the_same_for_any_number_of_threads():
    def sampled(threads):
        embstore.set_num_threads(threads)
        table = table_of(4096)
        table.sample_misses()
        for step in range(10):
            table.find_or_insert(random_keys(9973, 20_000, step))
        sample = table.miss_sample()
        return sample.uses, sample.distances.tobytes(), sample.counts.tobytes()

    before = embstore.get_num_threads()
    try:
        assert sampled(1) == sampled(2) == sampled(4)
    finally:
        embstore.set_num_threads(before)


def test_reading_is_no_use():
    torch = pytest.importorskip("torch")
    embedding = embstore.Embedding(2)
    embedding.table.sample_misses()
    embedding(torch.arange(7))
    embedding.eval()
    embedding(torch.arange(100))
    assert embedding.table.miss_sample().uses == 7


def test_sampling_starts_afresh_and_stops():
    table = table_of(256)
    table.sample_misses()
    table.find_or_insert([1, 2, 3])
    table.sample_misses()
    assert table.advise().ids == 0
    table.sample_misses(False)
    with pytest.raises(RuntimeError, match="not sampled: call sample_misses"):
        table.advise()


def test_a_table_without_a_bound_is_advised_by_its_rows():
    table = embstore.Table("t", dim=2)
    table.sample_misses()
    table.find_or_insert(np.arange(1000))
    table.find_or_insert(np.arange(1000))
    advice = table.advise()
    assert advice.capacity == 1000 and advice.hit_rate == 0.5
    assert max(p.rows for p in advice.points) <= 2000
    assert [p.by_recency for p in advice.points if p.rows == 1000] == [pytest.approx(0.5, abs=0.06)]


def test_advice_prints_within_80_columns_and_as_json():
    points = tuple(Point(10**k, 10 ** (k + 2), 0.1 * k, None if k == 3 else 0.5) for k in range(1, 13))
    advice = Advice("user", 10**12, 10**4, 0.713, "reuse distances", 5, 100, 38, points, ("a note",))
    lines = str(advice).splitlines()
    assert max(map(len, lines)) <= 80
    assert "->          10,000  976.6 KiB       40.0 %         50.0 %" in lines
    assert "evicted: about 100 rows; of these 38.0 % were asked for again" in lines
    assert json.loads(json.dumps(advice.as_dict()))["points"][2]["by_frequency"] is None


def test_notes_speak_to_what_the_table_keeps():
    def notes(recency, frequency, keeps_frequent):
        return notes_on([Point(10, 100, recency, frequency)], 10, 100, 50, keeps_frequent)

    more_used = "keeping the most used ids would find more than keeping the last used ones"
    assert notes(0.5, 0.7, False) == (
        more_used,
        "many evicted ids come back: the table is too small, or evicts the wrong ones",
    )
    assert notes(0.5, 0.7, True) == ("many evicted ids come back: the table is too small",)
    assert notes(0.7, 0.5, True)[0].startswith("keeping the last used ids would find more")
    assert more_used not in notes(0.7, 0.5, False)
