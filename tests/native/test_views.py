"""What editors, notebooks and dataframes see of a table."""

import numpy as np
import pytest
import torch

import embstore
from embstore.readable import bytes_text, float_text, histogram, score_text, spark_text

EXTREMES = [7, -1, 0, 2**63 - 1, -(2**63)]


def filled(rows=1023, dim=3, **options):
    table = embstore.Table("user", dim=dim, optimizer=embstore.Adam(lr=0.5), **options)
    table.find_or_insert(np.arange(rows))
    return table


def test_keys_are_found_counted_and_listed_as_in_a_dict():
    table = embstore.Table("user", dim=2)
    assert list(table) == [] and 7 not in table
    table.find_or_insert(EXTREMES)
    assert len(table) == 5 and sorted(table) == sorted(EXTREMES)
    assert all(key in table for key in EXTREMES) and 8 not in table
    assert all(type(key) is int for key in table)
    with pytest.raises(TypeError, match="integers"):
        assert "alice" in table


def test_iteration_lists_the_keys_of_its_beginning_while_the_table_changes():
    table = filled()
    seen = []
    for key in table:
        seen.append(key)
        table.find_or_insert([key + 5000])
    assert sorted(seen) == list(range(1023)) and len(table) == 2046


def test_repr_says_how_full_the_table_is_and_how_often_it_hits():
    table = filled(rows=300, max_capacity=1024)
    assert "hit rate 0.0 %" in repr(table)
    table.find_or_insert(np.arange(300))
    text = repr(table)
    assert text.startswith("Table('user', dim=3, dtype=float32, optimizer=Adam(lr=0.5), ")
    assert "rows=300 of at most 1,024" in text and "hit rate 50.0 %" in text
    assert "scores " in text and bytes_text(table.stats().bytes) in text
    table.close()
    assert "rows=0" in repr(table)
    assert "hit rate" not in repr(embstore.Table("new", dim=1))


def test_html_shows_a_row_for_each_table_and_escapes_names():
    table = embstore.Table("<b>&", dim=2)
    table.find_or_insert([1, 2])
    html = table._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>" not in html
    assert html.count("<tr>") == 2 and "<svg" in html
    options = [embstore.TableOptions(name=n, dim=2) for n in ("user", "item")]
    module = embstore.EmbeddingCollection(options)
    assert module._repr_html_().count("<tr>") == 3 and "EmbeddingCollection" in module._repr_html_()
    assert "Table('item', dim=2" in repr(torch.nn.Sequential(module))


def test_arrow_and_pandas_hold_the_rows_with_their_states():
    pytest.importorskip("pandas")
    table = filled(97)
    rows = table.rows()
    arrow = table.to_arrow(states=True)
    assert arrow.column_names == ["key", "vector", "score", "m", "v"]
    np.testing.assert_array_equal(arrow["key"], rows.keys)
    np.testing.assert_array_equal(np.stack(arrow["vector"].to_pylist()).astype(np.float32), rows.values)
    np.testing.assert_array_equal(np.stack(arrow["v"].to_pylist()), rows.states[:, 3:6])
    frame = table.to_pandas()
    assert list(frame.columns) == ["score", "vector_0", "vector_1", "vector_2"] and frame.index.name == "key"
    np.testing.assert_array_equal(frame.loc[96].to_numpy()[1:], rows.values[96])
    np.testing.assert_array_equal(frame["score"], rows.scores)
    assert list(table.to_pandas(states=True).columns)[4:] == [f"{s}_{i}" for s in "mv" for i in range(3)]
    empty = embstore.Table("none", dim=2)
    assert len(empty.to_pandas()) == 0 and empty.to_arrow().num_rows == 0


def test_an_arrow_table_written_as_parquet_describes_its_table(tmp_path):
    from pyarrow import parquet

    from embstore.formats import parquet as reader

    table = filled(7)
    parquet.write_table(table.to_arrow(states=True), tmp_path / "user.parquet")
    spec, rows = reader.read(tmp_path / "user.parquet").spec_and_rows(tmp_path / "user.parquet")
    assert spec.optimizer["name"] == "Adam" and spec.name == "user"
    np.testing.assert_array_equal(rows.values, table.rows().values)


def test_a_plot_counts_every_row(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for rows in (0, 1, 1023):
        norms, scores = filled(rows).plot()
        for axes in (norms, scores):
            assert sum(bar.get_height() for bar in axes.patches) == rows
        pyplot.close(norms.figure)


def test_numbers_are_short():
    texts = [bytes_text(n) for n in (0, 1023, 1024, 1536, 2**20 - 1, 2**30, 5 * 2**50)]
    assert texts == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "5,120.0 TiB"]
    assert [float_text(x) for x in (0.0, 1 / 3, 1e-9, 123456.0)] == ["0", "0.3333", "1e-09", "1.235e+05"]
    assert score_text(7) == "7" and score_text(2**64 - 1) == str(2**64 - 1)
    assert score_text(1_763_357_891 * 10**9) == "2025-11-17 05:38:11"
    assert spark_text([0, 1, 4, 8]) == "▁▄▇█" and spark_text([]) == "" and spark_text([0]) == "▁"
    scores = np.array([0, 2**64 - 1, 5], np.uint64)
    ranges = histogram(scores, 3)
    assert [count for _, _, count in ranges] == [2, 0, 1] and ranges[-1][1] == 2**64 - 1
