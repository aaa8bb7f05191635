"""The commands of `embstore`. A log is read as if its state had been dumped: base and increments.

    embstore inspect /data/monday            embstore diff /data/monday /data/tuesday
    embstore verify /data/monday             embstore convert /data/monday out --to v2
    embstore get /data/monday 7 -- -1        embstore merge /data/log out
    embstore serve /data/log --port 8200     embstore doctor

Exit codes: 0 all is well, 1 a difference was found or a key is missing, 2 wrong use (also: not a dump),
3 the dump is damaged.
"""

from __future__ import annotations

import json
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid

import embstore
from embstore.arrays import as_integer
from embstore.checkpoint import converting
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.merging import rewrite
from embstore.checkpoint.reading import is_log
from embstore.checkpoint.replaying import open_any
from embstore.cli import WRONG_USE, doctor, missing_extra
from embstore.formats.columns import Columns

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Look into dumps; check, rewrite and serve them."
)
out, errors = Console(), Console(stderr=True)

DIFFERENT, DAMAGED = 1, 3
T = TypeVar("T")

DumpPath = Annotated[
    Path, typer.Argument(help="the folder of a dump, of one of its collections, or of a log")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
OneTable = Annotated[str, typer.Option("--table", help="only tables of this name, or collection/name")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"embstore {embstore.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options before the command."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors become one line and an exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}", "yellow")
            yield
    except CheckpointError as error:
        _say(f"damaged: {error}")
        raise typer.Exit(DAMAGED) from error
    except ImportError as error:
        text = missing_extra(error)
        if text is None:
            raise
        _say(f"error: {text}")
        raise typer.Exit(WRONG_USE) from error
    except MemoryError as error:
        _say(f"error: not enough memory: {error}")
        raise typer.Exit(WRONG_USE) from error
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        raise typer.Exit(WRONG_USE) from error


def _say(text: str, style: str = "red") -> None:
    errors.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _matches(table: Columns, wanted: str) -> bool:
    return wanted in ("", table.name, table.label)


def _selected(tables: list[Columns], wanted: str) -> list[Columns]:
    found = [table for table in tables if _matches(table, wanted)]
    if not found:
        known = ", ".join(sorted({table.label for table in tables}))
        raise ValueError(f"--table should be one of {known} but is: {wanted!r}")
    return found


def _show(rows: list[dict[str, Any]], as_json: bool, title: str = "") -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    grid = Grid(title=title or None)
    for name in rows[0] if rows else []:
        grid.add_column(name, justify="right" if isinstance(rows[0][name], (int, float)) else "left")
    for row in rows:
        grid.add_row(*(f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()))
    out.print(grid)


def _with_progress(work: Callable[[Callable[[int, int], None]], T], what: str) -> T:
    """Shows a bar once a work has taken a second."""
    start = time.monotonic()
    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def report(done: int, total: int) -> None:
            if time.monotonic() - start > 1:
                bar.update(task, completed=done, total=total, visible=True)

        return work(report)


def _histogram(scores: Any, bins: int = 8) -> list[list[int]]:
    """(lowest score, highest score, rows) of at most `bins` ranges of equal width."""
    if len(scores) == 0:
        return []
    low, high = int(scores.min()), int(scores.max())
    edges = [low + (high + 1 - low) * i // bins for i in range(bins + 1)]
    counts = [
        [a, b - 1, int(((scores >= np.uint64(a)) & (scores <= np.uint64(b - 1))).sum())]
        for a, b in zip(edges, edges[1:])
        if b > a
    ]
    return counts


@app.command()
def inspect(path: DumpPath, as_json: Json = False) -> None:
    """Tables with their counts, dims, bytes and a histogram of the scores."""
    with _refusals():
        rows: list[dict[str, Any]] = []
        for table in open_any(path).tables:
            spec = table.spec
            rows.append(
                {
                    "table": table.label,
                    "rows": table.rows,
                    "dim": table.dim,
                    "dtype": spec.dtype if spec else "float32",
                    "optimizer": spec.optimizer["name"] if spec else "?",
                    "states": ", ".join(table.state_names) or "-",
                    "scores": spec.score_strategy if spec else "yes" if table.has_scores else "-",
                    "layout": table.layout,
                    "world": table.world,
                    "bytes": table.bytes,
                    "histogram": _histogram(table.scores) if table.has_scores else [],
                }
            )
        if as_json:
            return _show(rows, True)
        histograms = {row["table"]: row.pop("histogram") for row in rows}
        _show(rows, False)
        for label, histogram in histograms.items():
            most = max((count for _, _, count in histogram), default=0)
            for low, high, count in histogram:
                out.print(
                    f"{label}  {low:>20} .. {high:<20} {count:>12,} {'█' * (30 * count // max(most, 1))}"
                )


@app.command()
def verify(path: DumpPath, as_json: Json = False) -> None:
    """Reads every file and compares its checksum with the manifest; of a log, all its entries."""
    with _refusals():
        dumps = open_any(path).entries

        def check(report: Callable[[int, int], None]) -> int:
            total = 0
            for number, dump in enumerate(dumps):
                total += dump.verify()
                report(number + 1, len(dumps))
            return total

        checked = _with_progress(check, "verifying")
        unchecked = [t.label for dump in dumps for t in dump.tables if not t.files()]
        if as_json:
            typer.echo(json.dumps({"bytes": checked, "without_checksums": unchecked}))
        else:
            out.print(f"{checked:,} bytes are right", highlight=False, soft_wrap=True)
            for label in unchecked:
                out.print(f"{label}: has no manifest, only its sizes were checked", style="yellow")


@app.command()
def get(
    path: DumpPath,
    keys: Annotated[list[int], typer.Argument(help="keys; put -- before negative ones")],
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """Vectors and scores of keys. Exit code 1 when one is missing everywhere."""
    with _refusals():
        for key in keys:
            as_integer(key, -(2**63), 2**63 - 1, "key")
        rows, found = [], set()
        for stored in _selected(open_any(path).tables, table):
            for key, at in zip(keys, stored.locate(keys).tolist()):
                if at >= 0:
                    found.add(key)
                    score = int(stored.scores[at])
                    vector = stored.values[at].tolist()
                    rows.append({"table": stored.label, "key": key, "score": score, "vector": vector})
        if as_json:
            _show(rows, True)
        else:
            for row in rows:
                vector = " ".join(f"{x:.6g}" for x in row["vector"])
                out.print(
                    f"{row['table']}  {row['key']}  score {row['score']}  [{vector}]",
                    markup=False,
                    soft_wrap=True,
                )
        missing = [key for key in keys if key not in found]
        if missing:
            errors.print(f"missing: {' '.join(map(str, missing))}", highlight=False)
            raise typer.Exit(DIFFERENT)


@app.command()
def top(
    path: DumpPath,
    by: Annotated[str, typer.Option(help="score or norm")] = "score",
    n: Annotated[int, typer.Option("-n", help="how many of each table")] = 10,
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """The keys with the largest scores, or vectors."""
    with _refusals():
        if by not in ("score", "norm"):
            raise ValueError(f"--by should be score or norm but is: {by!r}")
        as_integer(n, 1, 2**63 - 1, "-n")
        rows: list[dict[str, Any]] = []
        for stored in _selected(open_any(path).tables, table):
            norms = np.sqrt(np.einsum("ij,ij->i", stored.values, stored.values, dtype=np.float64))
            order = np.lexsort((stored.keys, stored.scores if by == "score" else norms))[::-1][:n]
            rows += [
                {
                    "table": stored.label,
                    "key": int(stored.keys[i]),
                    "score": int(stored.scores[i]),
                    "norm": float(norms[i]),
                }
                for i in order
            ]
        _show(rows, as_json)


@app.command()
def diff(
    first: DumpPath,
    second: DumpPath,
    tolerance: Annotated[float, typer.Option(help="ignore differences up to this value")] = 0.0,
    table: OneTable = "",
    as_json: Json = False,
) -> None:
    """Keys that only one dump has, and rows that differ. Exit code 1 when there are any."""
    with _refusals():
        if not tolerance >= 0:
            raise ValueError(f"--tolerance should be at least 0 but is: {tolerance}")
        a, b = open_any(first).tables, open_any(second).tables
        _selected([*a, *b], table)  # in one of them at least
        names = {(t.collection, t.name): t for t in a if _matches(t, table)}
        others = {(t.collection, t.name): t for t in b if _matches(t, table)}
        rows = []
        for name in sorted(names.keys() | others.keys()):
            rows.append(
                {"table": "/".join(name), **_difference(names.get(name), others.get(name), tolerance)}
            )
        _show(rows, as_json)
        if any(row[c] for row in rows for c in ("only_first", "only_second", "vectors", "scores")):
            raise typer.Exit(DIFFERENT)


def _difference(a: Columns | None, b: Columns | None, tolerance: float) -> dict[str, Any]:
    if a is None or b is None:
        return {
            "only_first": a.rows if a else 0,
            "only_second": b.rows if b else 0,
            "vectors": 0,
            "scores": 0,
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
        "largest": float(gap.max(initial=0.0)),
    }


@app.command()
def merge(
    log: DumpPath,
    target: Annotated[Path, typer.Argument(help="the dump to write; not there yet")],
) -> None:
    """A dump of what a log says: its base and all increments after it."""
    with _refusals():
        if not is_log(log):
            raise ValueError(f"log should be the folder of an increment log but is: {log}")
        stored = open_any(log)
        stored.verify()
        base, *increments = stored.entries
        _with_progress(lambda report: rewrite(base, increments, target, progress=report), "merging")
        out.print(f"{target}: base and {len(increments)} increments", highlight=False)


@app.command()
def reshard(
    path: DumpPath,
    target: Annotated[Path, typer.Argument(help="the dump to write; not there yet")],
    world: Annotated[int, typer.Option(help="for how many ranks")],
) -> None:
    """The same rows, ordered (v1a) or in files (v2) for another number of ranks."""
    with _refusals():
        as_integer(world, 1, 65536, "--world")
        stored = open_any(path)
        stored.verify()
        base, *increments = stored.entries
        _with_progress(
            lambda report: rewrite(base, increments, target, world=world, progress=report), "resharding"
        )
        out.print(f"{target}: for {world} ranks", highlight=False)


@app.command()
def convert(
    path: DumpPath,
    target: Annotated[Path, typer.Argument(help="what to write; not there yet")],
    to: Annotated[str, typer.Option(help=f"one of {', '.join(converting.FORMATS)}")],
    snapshot: Annotated[str | None, typer.Option(help="name of a snapshot of OneEmbedding")] = None,
    dim: Annotated[int | None, typer.Option(help="of vectors in rows of OneEmbedding")] = None,
    optimizer: Annotated[str, typer.Option(help="of the state in rows of OneEmbedding")] = "SGD",
) -> None:
    """Between the layouts of dumps, and from or to safetensors, Parquet, SOK and OneEmbedding."""
    with _refusals():
        options = converting.OneEmbeddingOptions(snapshot, dim, optimizer)
        _with_progress(lambda report: converting.convert(path, target, to, report, options), "converting")
        out.print(f"{target}: {to}", highlight=False)


@app.command()
def serve(
    path: Annotated[Path, typer.Argument(help="the folder of a dump, a log or a prepared base")],
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port to listen on")] = 8200,
    workers: Annotated[int, typer.Option(help="processes; they share the memory of the rows")] = 1,
    dtype: Annotated[str, typer.Option(help="of rows: float32, float16, bfloat16 or int8")] = "float32",
    token_file: Annotated[Path | None, typer.Option(help="holds the token that clients send")] = None,
    as_json: Json = False,
) -> None:
    """Answers lookups over HTTP until SIGINT or SIGTERM; follows a log as it grows."""
    with _refusals():
        from embstore.serving import server

        as_integer(port, 1, 65535, "--port")
        as_integer(workers, 1, 1024, "--workers")
        token = None if token_file is None else str(token_file)

        def listen() -> None:
            _require_free(host, port)
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            started = {"path": str(path), "url": url, "workers": workers, "dtype": dtype}
            text = json.dumps(started) if as_json else f"serving {path}\n{url}  (Ctrl-C stops)"
            typer.echo(text)

        server.serve(
            path, host=host, port=port, workers=workers, dtype=dtype, token_file=token, before_start=listen
        )


def _require_free(host: str, port: int) -> None:
    """A port that is taken, or a host that is not ours, is one line here and a traceback in a worker."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port} cannot be used: {error.strerror}") from error


@app.command("doctor")
def show_doctor(as_json: Json = False) -> None:
    """Versions, instruction set, threads, memory, disk, extras, and the speed of a lookup."""
    with _refusals():
        facts = doctor.examine()
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(doctor.lines(facts)))


@app.command()
def stats(
    path: DumpPath,
    plot: Annotated[Path | None, typer.Option(help="a PNG of norms and scores")] = None,
    as_json: Json = False,
) -> None:
    """Mean, spread and norms of the vectors of each table."""
    with _refusals():
        rows, drawn = [], []
        for table in open_any(path).tables:
            norms = np.linalg.norm(table.values, axis=1) if table.rows else np.zeros(0)
            drawn.append((table.label, norms, table.scores))
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
        _show(rows, as_json)
        if plot:
            _plot(drawn, plot)


def _plot(drawn: list[tuple[str, Any, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(drawn), 2, figsize=(9, 2.5 * len(drawn)), squeeze=False)
    for (label, norms, scores), (left, right) in zip(drawn, axes):
        left.hist(norms, bins=50)
        left.set(title=f"{label}: norms", ylabel="rows")
        right.hist(scores.astype(np.float64), bins=50)
        right.set(title=f"{label}: scores")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
