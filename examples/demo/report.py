"""report.html: what the demo measured, as one page without scripts and without anything from elsewhere."""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np

from examples.demo.charts import Line, bar_chart, legend, line_chart, percent, two_places, whole
from examples.demo.miss_ratio import Curve

NAMES = {"dynamic": "dynamic", "hashing": "hashing trick", "all": "room for all"}
KINDS = {"dynamic": "a", "hashing": "b", "all": "c"}

STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f6f8fa; --rule: #d1d9e0; --ink: #1f2328;
  --soft: #59636e; --a: #0969da; --b: #bc4c00; --c: #1a7f37; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --card: #151b23; --rule: #3d444d; --ink: #f0f6fc; --soft: #9198a1;
    --a: #58a6ff; --b: #f0883e; --c: #56d364; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 48px; max-width: 1040px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0; } p { margin: 4px 0; }
.soft, figcaption { color: var(--soft); font-size: 14px; }
table { border-collapse: collapse; margin: 20px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px; text-align: right; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
.proofs { list-style: none; padding: 0; margin: 20px 0; }
.proofs li::before { content: "✓ "; color: var(--c); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figure > svg { width: 100%; display: block; margin: 8px 0 4px; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); fill: none; }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; } svg rect { fill: var(--a); }
svg .a { stroke: var(--a); }
svg .b { stroke: var(--b); stroke-dasharray: 7 3; }
svg .c { stroke: var(--c); stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 14px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; } svg.key { width: 24px; height: 8px; }
code { font-size: 14px; overflow-wrap: anywhere; }
@media (max-width: 500px) { svg text { font-size: 15px; } th, td { padding: 5px 8px; } }
"""


@dataclass(frozen=True)
class Result:
    """A model of the comparison: its AUC on the last half of the first part, its rows and its memory."""

    auc: float
    rows: int
    bytes: int


def memory(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _figure(title: str, chart: str, caption: str, lines: list[Line] | None = None) -> str:
    keys = legend(lines) if lines and len(lines) > 1 else ""
    return f"<figure><h2>{title}</h2>{keys}{chart}<figcaption>{caption}</figcaption></figure>"


def _over_time(metrics: list[dict], steps: int) -> list[str]:
    restart = [(steps, "restart")]
    xs = [m["step"] for m in metrics]
    first = [m for m in metrics if m["step"] <= steps]

    def lines(name: str) -> Line:
        points = [(m["step"], m["auc"][name]) for m in metrics if name in m["auc"]]
        return Line(NAMES[name], [x for x, _ in points], [y for _, y in points], KINDS[name])

    aucs = [lines(name) for name in NAMES]
    growth = [
        Line("dynamic", xs, [m["rows"] for m in metrics], "a"),
        Line("room for all", [m["step"] for m in first], [m["rows_all"] for m in first], "c"),
    ]
    hits = [Line("hit rate", xs, [m["hit_rate"] for m in metrics])]
    evicted = [Line("evicted", xs, [m["evictions"] for m in metrics], "b")]
    return [
        _figure(
            "AUC over time",
            line_chart(aucs, label="AUC over steps", x_name="step", y_format=two_places, marks=restart),
            "Each batch is predicted before it is learned. Only dynamic trains on after the restart.",
            aucs,
        ),
        _figure(
            "Growth",
            line_chart(growth, label="rows over steps", x_name="step", from_zero=True, marks=restart),
            "Rows of all tables on all ranks. A full table evicts what was used longest ago.",
            growth,
        ),
        _figure(
            "Hit rate",
            line_chart(hits, label="hit rate over steps", x_name="step", y_format=percent, marks=restart),
            "Lookups in training that found a row.",
        ),
        _figure(
            "Evictions",
            line_chart(evicted, label="evictions over steps", x_name="step", from_zero=True, marks=restart),
            "Rows evicted so far.",
        ),
    ]


def page(
    facts: dict,
    metrics: list[dict],
    results: dict[str, Result],
    last_use: np.ndarray,
    misses: Curve,
    proof: dict,
    command: str,
    seconds: float,
) -> str:
    """The whole page."""
    unused = facts["steps"] - last_use  # whole numbers, so bars have a whole width
    width = int(unused.max()) // 40 + 1
    counts, edges = np.histogram(unused, bins=np.arange(0, unused.max() + width + 1, width))
    curve = [Line("miss ratio", misses[0].tolist(), misses[1].tolist())]
    rows = "".join(
        f"<tr><td>{NAMES[name]}</td><td>{r.auc:.4f}</td><td>{r.rows:,}</td><td>{memory(r.bytes)}</td></tr>"
        for name, r in results.items()
    )
    speed = np.median([m["samples_per_second"] for m in metrics])
    figures = [
        *_over_time(metrics, facts["steps"]),
        _figure(
            "Scores",
            bar_chart(
                edges.tolist(), counts.tolist(), label="rows by score", x_name="steps since the last use"
            ),
            "Rows of the dump by their score, the step of their last use.",
        ),
        _figure(
            "Miss-ratio curve",
            line_chart(
                curve,
                label="miss ratio over rows",
                x_name="rows of each table",
                x_format=whole,
                y_format=percent,
                from_zero=True,
                marks=[(facts["capacity"], f"here: {facts['capacity']:,}")],
                log_x=True,
            ),
            "Lookups that a table of this size misses, first ones included (sampled reuse distances).",
        ),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>embstore demo</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<h1>embstore demo</h1>
<p class="soft">{len(facts["names"])} tables on {facts["world"]} ranks, sharded by TorchRec;
{facts["capacity"]:,} rows each, batches of {facts["batch"]:,}. {speed:,.0f} samples/s in training,
{seconds:.0f} s in all.<br><code>{html.escape(command)}</code></p>
<table>
<tr><th></th><th>AUC</th><th>rows</th><th>memory</th></tr>
{rows}
</table>
<p class="soft">AUC of steps {facts["steps"] // 2 + 1} to {facts["steps"]}: each batch is predicted before
it is learned.</p>
<ul class="proofs">
<li>Restarted from the dump in new processes: the same rows, bit for bit.</li>
<li>{proof["equal"]:,} of {proof["trained"]:,} served vectors equal the trained ones, bit for bit.</li>
</ul>
<div class="grid">
{"".join(figures)}
</div>
</body>
</html>
"""
