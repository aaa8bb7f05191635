"""The pieces of the demo: files that it reads, reuse distances, charts."""

from __future__ import annotations

import re
from collections import OrderedDict

import numpy as np
import pytest

from examples.click_stream import auc
from examples.demo.charts import Line, bar_chart, line_chart, short, ticks
from examples.demo.miss_ratio import NEVER, curve, reuse_distances
from examples.demo.sources import BATCH, Clicks, open_source

LINES = 3201


def ratings():
    rng = np.random.default_rng(5)
    users, items = rng.integers(1, 300, LINES), rng.integers(1, 900, LINES)
    return users, items, rng.integers(1, 6, LINES), rng.integers(1_000_000, 2_000_000, LINES)


@pytest.mark.parametrize("form", ["tab", "csv", "colons", "parquet"])
def test_ratings_are_read_in_the_order_of_time(form, tmp_path):
    columns, path = ratings(), tmp_path / "ratings"
    if form == "parquet":
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.table(dict(zip("abcd", columns))), path)
    else:
        mark = {"tab": "\t", "csv": ",", "colons": "::"}[form]
        head = "userId,movieId,rating,timestamp\n" if form == "csv" else ""
        path.write_text(head + "".join(mark.join(map(str, row)) + "\n" for row in zip(*columns)))
    source = open_source(str(path), 50, seed=0)
    assert (source.names, source.width, source.batch_size, source.steps) == (("user", "item"), 0, 64, 50)
    users, items, stars, times = (column[np.argsort(columns[3], kind="stable")] for column in columns)
    for step in range(50):
        part = slice(64 * step, 64 * step + 64)
        ids, numbers, clicks = source.next()
        np.testing.assert_array_equal(ids, [users[part], items[part]])
        np.testing.assert_array_equal(clicks, stars[part] >= 4)
        assert numbers.shape == (64, 0)


def test_lines_of_criteo_keep_their_categories_as_ids(tmp_path):
    rng = np.random.default_rng(5)
    numbers, categories = rng.integers(-3, 1000, (LINES, 13)), rng.integers(0, 2**32, (LINES, 26))
    shown = [[str(n) if n % 7 else "" for n in row] for row in numbers]
    hexes = [[f"{c:08x}" if c % 5 else "" for c in row] for row in categories]
    labels = rng.integers(0, 2, LINES)
    path = tmp_path / "day_0"
    path.write_text("".join("\t".join([str(y), *n, *c]) + "\n" for y, n, c in zip(labels, shown, hexes)))
    source = open_source(str(path), 50, seed=0)
    ids, got, clicks = source.next()
    np.testing.assert_array_equal(ids.T, np.where(categories % 5, categories, -1)[:64])
    known = np.where(numbers % 7, numbers, 0)
    np.testing.assert_allclose(got, np.log1p(np.maximum(known, 0))[:64], rtol=1e-6)
    np.testing.assert_array_equal(clicks, labels[:64])
    assert (len(source.names), source.width) == (26, 13)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "--data should be a file but is"),
        ("1,2,5,7\n" * 99, "at least 3,200 lines but has: 99"),
        ("a story\nof nothing\n", "--data should hold user, item, rating and timestamp"),
        ("", "--data should hold user, item, rating and timestamp"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(text, reason, tmp_path):
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(SystemExit, match=reason):
        open_source(str(tmp_path / "file"), 50, seed=0)


def test_the_click_stream_is_that_of_the_single_process():
    from examples.click_stream import Stream

    source, stream = Clicks(50, seed=3), Stream(3)
    for _ in range(3):
        ids, numbers, clicks = source.next()
        users, items, clicked = stream.batch()
        np.testing.assert_array_equal(ids, [users, items])
        np.testing.assert_array_equal(clicks, clicked)
        assert numbers.shape == (BATCH, 0)


def test_reuse_distances_count_the_different_ids_in_between():
    ids = np.random.default_rng(1).zipf(1.4, 997) % 60
    for i, distance in enumerate(reuse_distances(ids)):
        before = np.flatnonzero(ids[:i] == ids[i])
        assert distance == (len(set(ids[before[-1] + 1 : i])) if len(before) else NEVER)


def test_the_miss_ratio_is_that_of_a_cache_which_evicts_what_was_used_longest_ago():
    ids = np.random.default_rng(2).zipf(1.2, 5000) % 700
    rows, misses = curve([ids])
    for size, ratio in list(zip(rows.tolist(), misses.tolist()))[::9]:
        cache, missed = OrderedDict(), 0
        for key in ids.tolist():
            missed += key not in cache
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > size:
                cache.popitem(last=False)
        assert ratio == pytest.approx(missed / len(ids), abs=1e-12)


def test_a_sample_of_the_ids_gives_nearly_the_same_curve():
    ids = (np.random.default_rng(3).random(200_000) ** 3 * 20_000).astype(np.int64)
    rows, exact = curve([ids], most=10**9)
    sampled_rows, sampled = curve([ids], most=20_000)
    np.testing.assert_allclose(np.interp(rows, sampled_rows, sampled), exact, atol=0.05)


def test_auc_is_the_share_of_pairs_in_the_right_order():
    rng = np.random.default_rng(4)
    scores, clicks = rng.normal(size=97), rng.random(97) < 0.3
    pairs = scores[clicks][:, None] > scores[~clicks][None]
    assert auc(scores, clicks) == pytest.approx(pairs.mean())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.5613, 0.6498), (3, 3), (0, 289_956), (-5, 5)])
def test_ticks_are_few_round_numbers_inside_the_range(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 7 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in found)


def test_curves_stay_inside_the_picture_and_words_are_escaped():
    line = Line("a < b", [1, 10, 100], [0.0, 5.0, 2.5])
    for log_x in (False, True):
        svg = line_chart([line], label="x & y", x_name="n", log_x=log_x, marks=[(10, "<here>")])
        assert "&lt;here&gt;" in svg and "a &lt; b" in svg and 'aria-label="x &amp; y"' in svg
        path = re.search(r'class="line a" d="M([^"]+)"', svg)[1]
        points = np.array([point.split() for point in path.split("L")], float)
        assert (points >= 0).all() and (points[:, 0] <= 440).all() and (points[:, 1] <= 264).all()
        assert (np.diff(points[:, 0]) > 0).all() and points[1, 1] < points[2, 1] < points[0, 1]


def test_bars_are_as_high_as_their_counts():
    svg = bar_chart([0, 2, 4, 6], [1, 4, 2], label="x", x_name="n")
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.02)
    assert heights[2] == pytest.approx(2 * heights[0], rel=0.02)


def test_an_axis_of_steps_has_no_halves():
    svg = bar_chart([0, 1, 2, 3], [50, 30, 1], label="x", x_name="n")
    assert re.findall(r'text-anchor="middle">([\d.]+)<', svg) == ["0", "1", "2", "3"]


def test_numbers_are_short():
    assert [short(x) for x in (0, 0.25, 999, 1500, 2_000_000)] == ["0", "0.25", "999", "1.5k", "2M"]
