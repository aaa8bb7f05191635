"""Commands that look into dumps: inspect, verify, get, top, diff, advise, stats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from embstore.arrays import as_integer
from embstore.checkpoint import advising
from embstore.checkpoint.replaying import open_any
from embstore.cli.app import (
    DIFFERENT,
    Bars,
    DumpPath,
    Json,
    OneTable,
    OtherDump,
    app,
    matches,
    plural,
    print_card,
    print_columns,
    print_json,
    refusals,
    refused,
    say,
    selected,
    working,
)
from embstore.display import draw
from embstore.formats.columns import Columns
from embstore.readable import bytes_text, float_text, histogram, score_text
from embstore.rows import Rows

BAR = 24  # columns of the longest


@app.command()
def inspect(path: DumpPath, as_json: Json = False) -> None:
    """List the tables: rows, dims, bytes, and a histogram of the scores."""
    with refusals(as_json), working("reading"):
        rows: list[dict[str, Any]] = []
        for table in open_any(path).tables:
            spec = table.spec
            rows.append(
                {
                    "table": table.label,
                    "rows": table.rows,
                    "shared_rows": spec.shared_rows if spec else 0,
                    "dim": table.dim,
                    "dtype": spec.dtype if spec else "float32",
                    "optimizer": spec.optimizer["name"] if spec else "?",
                    "states": ", ".join(table.state_names) or "-",
                    "scores": spec.score_strategy if spec else "yes" if table.has_scores else "-",
                    "score": spec.score if spec else 0,
                    "layout": table.layout,
                    "world": table.world,
                    "bytes": table.bytes,
                    "histogram": histogram(table.scores) if table.has_scores else [],
                }
            )
    if as_json:
        return print_json(rows)
    for row in rows:
        _print_table(row)


def _print_table(row: dict[str, Any]) -> None:
    known = row["optimizer"] != "?"
    print_card(
        row["table"],
        {
            "rows": f"{row['rows']:,}"
            + (f" and {row['shared_rows']:,} shared" if row["shared_rows"] else ""),
            "vectors": f"{row['dim']} x {row['dtype']}",
            "optimizer": (row["optimizer"] if known else "not known")
            + ("" if row["states"] == "-" else f" with states {row['states']}"),
            "layout": row["layout"] + (f" of {plural(row['world'], 'rank')}" if row["world"] else ""),
            "size": bytes_text(row["bytes"]),
            "scores": {"-": "none", "yes": "of a strategy that is not known"}.get(
                row["scores"], row["scores"]
            ),
        },
    )
    _print_histogram(row["histogram"], partial(score_text, strategy=row["scores"], now=row["score"]))


def _print_histogram(ranges: list[tuple[int, int, int]], text: Callable[..., str]) -> None:
    """A bar for each range of scores, behind its lowest."""
    if not ranges:
        return
    most = max(count for _, _, count in ranges)
    lows = _told_apart([low for low, _, _ in ranges], text)
    counts = [f"{count:,}" for _, _, count in ranges]
    for low, count, (_, _, n) in zip(lows, counts, ranges):
        line = f"    from {low:>{max(map(len, lows))}}  {count:>{max(map(len, counts))}}  "
        typer.echo((line + "█" * (BAR * n // most)).rstrip())


def _told_apart(scores: list[int], text: Callable[..., str]) -> list[str]:
    """Scores as texts; times with as many digits as it takes to see that they differ."""
    for digits in (0, 3, 6, 9):
        texts = [text(score, digits) for score in scores]
        if len(set(texts)) == len(scores):
            break
    return texts


@app.command()
def verify(path: DumpPath, as_json: Json = False) -> None:
    """Check every file against its checksum in the manifest; for a log, every entry."""
    with refusals(as_json):
        stored = open_any(path)
        with Bars("verifying") as report:
            checked = stored.verify(report)
        unchecked = [t.label for dump in stored.entries for t in dump.tables if not t.files()]
    if as_json:
        return print_json({"bytes": checked, "without_checksums": unchecked})
    typer.echo(f"ok: {bytes_text(checked)} read, all checksums match")
    for label in unchecked:
        say(f"{label}: has no manifest, only its sizes were checked", "yellow")


# A negative key looks like an option, and is none.
@app.command(context_settings={"ignore_unknown_options": True})
def get(
    path: DumpPath,
    keys: Annotated[list[str], typer.Argument(metavar="KEYS", help="int64 keys", show_default=False)],
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """Print the vectors and scores of keys. Exit code 1 if a key is in no table."""
    with refusals(as_json):
        wanted = [_as_key(text) for text in keys]
        rows, found, texts = [], set(), {}
        with working("reading"):
            for stored in selected(open_any(path).tables, table):
                texts[stored.label] = _score_text_of(stored)
                for key, at in zip(wanted, stored.locate(wanted).tolist()):
                    if at >= 0:
                        found.add(key)
                        score = int(stored.scores[at])
                        vector = stored.values[at].tolist()
                        rows.append({"table": stored.label, "key": key, "score": score, "vector": vector})
    if as_json:
        print_json(rows)
    before = None
    for row in [] if as_json else rows:
        vector = " ".join(float_text(x) for x in row["vector"])
        facts = {"key": str(row["key"]), "score": texts[row["table"]](row["score"]), "vector": vector}
        print_card("" if row["table"] == before else row["table"], facts)
        before = row["table"]
    missing = [key for key in wanted if key not in found]
    if missing:
        raise refused("missing", " ".join(map(str, missing)), DIFFERENT, as_json)


def _score_text_of(stored: Columns) -> Callable[..., str]:
    """How scores of a table are shown."""
    spec = stored.spec
    return partial(score_text, strategy=spec.score_strategy, now=spec.score) if spec else score_text


def _as_key(text: str) -> int:
    try:
        key = int(text)
    except ValueError:
        what = "there is no such option" if text.startswith("-") else "keys should be integers but one is"
        raise ValueError(f"{what}: {text}") from None
    return as_integer(key, -(2**63), 2**63 - 1, "key")


@app.command()
def top(
    path: DumpPath,
    by: Annotated[str, typer.Option(help="score or norm")] = "score",
    n: Annotated[int, typer.Option("-n", help="how many per table")] = 10,
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """Print the keys with the largest scores, or with the longest vectors."""
    with refusals(as_json), working("reading"):
        if by not in ("score", "norm"):
            raise ValueError(f"--by should be score or norm but is: {by!r}")
        as_integer(n, 1, 2**63 - 1, "-n")
        tables = selected(open_any(path).tables, table)
        found = {t.label: _largest(t, by, n) for t in tables}
        texts = {t.label: _score_text_of(t) for t in tables}
    if as_json:
        return print_json([{"table": label, **row} for label, rows in found.items() for row in rows])
    for label, rows in found.items():
        typer.echo(label)
        shown = [[str(r["key"]), texts[label](r["score"]), float_text(r["norm"])] for r in rows]
        print_columns(["key", "score", "norm"], shown)


def _largest(stored: Columns, by: str, n: int) -> list[dict[str, Any]]:
    norms = np.sqrt(np.einsum("ij,ij->i", stored.values, stored.values, dtype=np.float64))
    order = np.lexsort((stored.keys, stored.scores if by == "score" else norms))[::-1][:n]
    return [
        {"key": int(stored.keys[i]), "score": int(stored.scores[i]), "norm": float(norms[i])} for i in order
    ]


@app.command()
def diff(
    first: DumpPath,
    second: OtherDump,
    tolerance: Annotated[float, typer.Option(help="ignore differences up to this value")] = 0.0,
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """Compare two dumps: keys of only one, rows that differ. Exit code 1 if any."""
    with refusals(as_json), working("comparing"):
        if not tolerance >= 0:
            raise ValueError(f"--tolerance should be at least 0 but is: {tolerance}")
        a, b = open_any(first).tables, open_any(second).tables
        selected([*a, *b], table)  # in one of them at least
        names = {(t.collection, t.name): t for t in a if matches(t, table)}
        others = {(t.collection, t.name): t for t in b if matches(t, table)}
        rows: list[dict[str, Any]] = []
        for name in sorted(names.keys() | others.keys()):
            found = _difference(names.get(name), others.get(name), tolerance)
            rows.append({"table": "/".join(name), **found})
    differ = [
        any(row[c] for c in ("only_first", "only_second", "vectors", "scores", "shared")) for row in rows
    ]
    if as_json:
        print_json(rows)
    else:
        for row, differs in zip(rows, differ):
            _print_difference(row, differs)
    if any(differ):
        raise typer.Exit(DIFFERENT)


def _print_difference(row: dict[str, Any], differs: bool) -> None:
    if not differs:
        typer.echo(f"{row['table']}\n  the same")
        return
    print_card(
        row["table"],
        {
            "only in the first": plural(row["only_first"], "key"),
            "only in the second": plural(row["only_second"], "key"),
            "vectors differ": plural(row["vectors"], "row")
            + (f", by at most {float_text(row['largest'])}" if row["vectors"] else ""),
            "scores differ": plural(row["scores"], "row"),
            **({"shared rows differ": plural(row["shared"], "row")} if row["shared"] else {}),
        },
    )


def _difference(a: Columns | None, b: Columns | None, tolerance: float) -> dict[str, Any]:
    if a is None or b is None:
        return {
            "only_first": a.rows if a else 0,
            "only_second": b.rows if b else 0,
            "vectors": 0,
            "scores": 0,
            "shared": 0,
            "largest": 0.0,
        }
    at = b.locate(a.keys)
    both = at >= 0
    if a.dim != b.dim:
        raise ValueError(f"dim of {a.label} is {a.dim} in one dump but {b.dim} in the other")
    gap = np.abs(a.values[both] - b.values[at[both]]).max(axis=1, initial=0.0)
    return {
        "only_first": int((~both).sum()),
        "only_second": b.rows - int(both.sum()),
        "vectors": int((gap > tolerance).sum()),
        "scores": int((a.scores[both] != b.scores[at[both]]).sum()),
        "shared": _shared_difference(a.shared, b.shared, tolerance),
        "largest": float(gap.max(initial=0.0)),
    }


def _shared_difference(a: Rows | None, b: Rows | None, tolerance: float) -> int:
    """How many shared rows only one table has, or differ."""
    first, second = ({} if rows is None else dict(zip(rows.keys.tolist(), rows.values)) for rows in (a, b))
    both = first.keys() & second.keys()
    differ = sum(bool(np.abs(first[n] - second[n]).max(initial=0.0) > tolerance) for n in both)
    return differ + len(first.keys() ^ second.keys())


@app.command()
def advise(path: DumpPath, table: OneTable = "", as_json: Json = False) -> None:
    """Show hit rates by capacity, as far as a dump or the increments of a log tell."""
    with refusals(as_json), working("reading"):
        stored = open_any(path)
        stored.tables = selected(stored.tables, table)
        found = list(advising.advise(stored))
    if as_json:
        print_json([advice.as_dict() for advice in found])
    else:
        typer.echo("\n\n".join(map(str, found)))


@app.command()
def stats(
    path: DumpPath,
    plot: Annotated[Path | None, typer.Option(help="a PNG of norms and scores")] = None,
    as_json: Json = False,
) -> None:
    """Print mean, spread and norms of the vectors of each table."""
    with refusals(as_json), working("reading"):
        rows: list[dict[str, Any]] = []
        drawn = []
        for table in open_any(path).tables:
            norms = np.linalg.norm(table.values, axis=1) if table.rows else np.zeros(0)
            drawn.append((table.label, norms, table.scores, _score_text_of(table)))
            rows.append(
                {
                    "table": table.label,
                    "rows": table.rows,
                    "mean": float(table.values.mean()) if table.rows else 0.0,
                    "std": float(table.values.std()) if table.rows else 0.0,
                    "norm_median": float(np.median(norms)) if table.rows else 0.0,
                    "norm_max": float(norms.max(initial=0.0)),
                    "not_finite": int((~np.isfinite(table.values)).any(axis=1).sum()),
                }
            )
        if plot:
            _save(drawn, plot)
    if as_json:
        return print_json(rows)
    for row in rows:
        print_card(
            row["table"],
            {
                "rows": f"{row['rows']:,}",
                "components": f"mean {float_text(row['mean'])}, std {float_text(row['std'])}",
                "norms": f"median {float_text(row['norm_median'])}, largest {float_text(row['norm_max'])}",
                "not finite": plural(row["not_finite"], "row"),
            },
        )


def _save(drawn: list[tuple[str, Any, Any, Callable[[int], str]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    draw(drawn)[0][0].figure.savefig(path, dpi=100)
