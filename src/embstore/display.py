"""Tables as an editor, a notebook and matplotlib show them.

Table('user', dim=8, dtype=float32, optimizer=Adagrad(lr=0.1), rows=1,234 of at most 1,000,000,
      hit rate 97.2 %, 1.1 MiB, scores ▁▂▂▃▃▅▆█)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from embstore.extras import missing
from embstore.readable import bytes_text, histogram, score_text, share_text, spark_heights, spark_text

if TYPE_CHECKING:
    from embstore.table import Table

SAMPLE_ROWS = 16384  # the first rows of the index: the order of hashes, so as good as random
SPARK_BINS = 12
CELL = 'style="padding: 0.1em 0.7em; text-align: left"'


def _sampled_scores(table: Table) -> Any:
    """Scores of some rows in memory; none where the table is closed or moves its rows just now."""
    try:
        blocks = table.resident(block_rows=SAMPLE_ROWS, with_values=False, with_states=False)
        return next(blocks).scores
    except (RuntimeError, StopIteration):
        return np.empty(0, np.uint64)


def _changed_fields(options: Any) -> str:
    """`Adam(lr=0.001, eps=1e-06)`: the learning rate, and what is not at its default."""
    default = type(options)()
    shown = [
        f"{f.name}={getattr(options, f.name)!r}"
        for f in fields(options)
        if f.name == "lr" or getattr(options, f.name) != getattr(default, f.name)
    ]
    return f"{type(options).__name__}({', '.join(shown)})"


def describe(table: Table) -> str:
    """One line for `repr`."""
    o, stats = table.options, table.stats()
    facts = [
        repr(o.name),
        f"dim={o.dim}",
        f"dtype={o.dtype.name.lower()}",
        f"optimizer={_changed_fields(o.optimizer)}",
        f"rows={stats.size:,} of at most {stats.max_capacity:,}",
    ]
    if stats.hit_rate is not None:
        facts.append(f"hit rate {share_text(stats.hit_rate)}")
    facts.append(bytes_text(stats.bytes))
    bars = spark_text([count for _, _, count in histogram(_sampled_scores(table), SPARK_BINS)])
    if bars:
        facts.append(f"scores {bars}")
    return f"Table({', '.join(facts)})"


def as_html(tables: Iterable[Table], title: str = "") -> str:
    """A row for each table. Plain HTML that takes its colours from the page, light or dark."""
    heads = ("table", "dim", "optimizer", "rows", "at most", "full", "hit rate", "memory", "scores")
    lines = [f"<caption>{escape(title)}</caption>"] if title else []
    lines.append("<tr>" + "".join(f"<th {CELL}>{head}</th>" for head in heads) + "</tr>")
    for table in tables:
        o, stats = table.options, table.stats()
        cells = (
            o.name,
            f"{o.dim} x {o.dtype.name.lower()}",
            type(o.optimizer).__name__,
            f"{stats.size:,}",
            f"{stats.max_capacity:,}",
            share_text(stats.size / stats.max_capacity if stats.max_capacity else None),
            share_text(stats.hit_rate),
            bytes_text(stats.bytes),
        )
        shown = "".join(f"<td {CELL}>{escape(cell)}</td>" for cell in cells)
        lines.append(
            f"<tr>{shown}<td {CELL}>{_bars(histogram(_sampled_scores(table), SPARK_BINS), table)}</td></tr>"
        )
    return '<table class="embstore">' + "".join(lines) + "</table>"


def _score_text_of(table: Table) -> Callable[[int], str]:
    strategy = table.options.score_strategy
    # A clock is not read: that moves it.
    return partial(score_text, strategy=strategy.name.lower(), now=table.score if strategy.ages else 0)


def _bars(ranges: list[tuple[int, int, int]], table: Table) -> str:
    if not ranges:
        return "-"
    of_score = _score_text_of(table)
    heights = spark_heights([count for _, _, count in ranges])
    rects = []
    for i, ((low, high, count), share) in enumerate(zip(ranges, heights)):
        height = max(1.0, 20.0 * share)
        text = f"{of_score(low)} to {of_score(high)}: {count:,} rows"
        rects.append(
            f'<rect x="{6 * i}" y="{20 - height:.1f}" width="5" height="{height:.1f}">'
            f"<title>{escape(text)}</title></rect>"
        )
    width = 6 * len(ranges)
    return f'<svg width="{width}" height="20" fill="currentColor" role="img">{"".join(rects)}</svg>'


def draw(drawn: list[tuple[str, Any, Any, Callable[[int], str]]]) -> Any:
    """Histograms of norms and scores, one line of axes for each (label, norms, scores, text of a score)."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise missing("a plot", "plot", error) from error
    figure, axes = pyplot.subplots(
        len(drawn), 2, figsize=(9, 2.5 * len(drawn)), squeeze=False, layout="constrained"
    )
    for (label, norms, scores, of_score), (left, right) in zip(drawn, axes):
        left.hist(norms, bins=50)
        left.set(title=f"{label}: norms of vectors", ylabel="rows")
        ranges = histogram(scores, 50)
        right.bar(range(len(ranges)), [count for _, _, count in ranges], width=1.0)
        ticks = [0, len(ranges) - 1] if len(ranges) > 1 else list(range(len(ranges)))
        right.set(title=f"{label}: scores")
        right.set_xticks(ticks, [of_score(ranges[at][0]) for at in ticks])
    return axes


def plot(table: Table) -> Any:
    """The axes of `Table.plot`."""
    norms, scores = [], []
    for rows in table.export(with_states=False):
        norms.append(np.linalg.norm(rows.values, axis=1))
        scores.append(rows.scores)
    return draw([(table.name, np.concatenate(norms), np.concatenate(scores), _score_text_of(table))])[0]
