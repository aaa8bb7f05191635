"""The application: what every command shares. Results go to stdout, everything else to stderr.

With --json a result is one JSON value on stdout, and an error one JSON object on stderr:

    {"error": {"kind": "damaged", "message": "...", "exit_code": 3}}
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import embstore
from embstore.checkpoint.errors import CheckpointError, NotADumpError
from embstore.checkpoint.remote import RemoteFolder, is_remote, local_copy
from embstore.cli import WRONG_USE, missing_extra
from embstore.formats.columns import Columns
from embstore.progress import Bar, Progress, bar

app = typer.Typer(no_args_is_help=True, help="Inspect, check, convert and serve dumps of embedding tables.")
errors = Console(stderr=True)

DIFFERENT, DAMAGED = 1, 3
PATIENCE_SECONDS = 1.0  # work that takes longer shows that it goes on
WIDTH = 80

Target = Annotated[Path, typer.Argument(metavar="TARGET", help="the folder to write; must not exist")]
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


# ---- errors


@contextmanager
def refusals(as_json: bool = False) -> Iterator[None]:
    """Errors become one line, or one JSON object, and an exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _warn(str(message), as_json)
            yield
    except NotADumpError as error:
        raise refused("not a dump", str(error), WRONG_USE, as_json) from error
    except CheckpointError as error:
        raise refused("damaged", str(error), DAMAGED, as_json) from error
    except ImportError as error:
        text = missing_extra(error)
        if text is None:
            raise
        raise refused("missing package", text, WRONG_USE, as_json) from error
    except MemoryError as error:
        raise refused("no memory", f"not enough memory: {error}", WRONG_USE, as_json) from error
    except (ValueError, OSError) as error:
        raise refused("wrong use", str(error), WRONG_USE, as_json) from error


def _local(text: str) -> Path:
    """The folder of a dump or a log. One at a URL is downloaded to the cache of this host first."""
    if not is_remote(text):
        return Path(text)
    with refusals():
        remote = RemoteFolder(text)
        if (published := remote.current()) is not None:
            with local_copy(remote, published) as folder:
                return folder
        log = embstore.IncrementLog(text)
        log.refresh()
        return log.path


DumpPath = Annotated[
    Path,
    typer.Argument(
        parser=_local,
        metavar="PATH",
        help="the folder or URL of a dump or of a log, or the folder of one of its collections",
    ),
]

LogPath = Annotated[Path, typer.Argument(parser=_local, metavar="PATH", help="the folder or URL of a log")]
OtherDump = Annotated[Path, typer.Argument(parser=_local, metavar="OTHER", help="what to compare it with")]


def refused(kind: str, message: str, code: int, as_json: bool) -> typer.Exit:
    """Tells what is wrong; to be raised."""
    if as_json:
        print(error_json(kind, message, code), file=sys.stderr)
    else:
        say(f"{kind if code != WRONG_USE else 'error'}: {message}")
    return typer.Exit(code)


def error_json(kind: str, message: str, code: int) -> str:
    return json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}})


def _warn(message: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"warning": message}), file=sys.stderr)
    else:
        say(f"warning: {message}", "yellow")


def say(text: str, style: str = "red") -> None:
    """One line on stderr."""
    errors.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


# ---- results


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1))


def width() -> int:
    """Columns to fill: those of the terminal, but no more than 80."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def print_card(title: str, facts: dict[str, str]) -> None:
    """A title, and below it a name and a value on each line; long values are wrapped between words."""
    typer.echo(title)
    names = max(map(len, facts), default=0)
    for name, value in facts.items():
        lines = textwrap.wrap(value, width() - names - 4, break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        for i, line in enumerate(lines):
            typer.echo(f"  {'' if i else name:<{names}}  {line}")


def print_columns(heads: list[str], rows: list[list[str]]) -> None:
    """Values below their heads, right-aligned; nothing is cut."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, *rows):
        typer.echo("  " + "  ".join(f"{value:>{w}}" for value, w in zip(row, widths)))


def plural(n: int, one: str, many: str = "") -> str:
    """ "1 row", "2,345 rows"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# ---- tables


def matches(table: Columns, wanted: str) -> bool:
    return wanted in ("", table.name, table.label)


def selected(tables: list[Columns], wanted: str) -> list[Columns]:
    found = [table for table in tables if matches(table, wanted)]
    if not found:
        known = ", ".join(sorted({table.label for table in tables}))
        raise ValueError(f"--table should be one of {known} but is: {wanted!r}")
    return found


# ---- progress


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal that work of unknown length goes on, once it has taken a second."""
    if not errors.is_terminal:
        yield
        return
    status = errors.status(f"{what} ...")
    timer = threading.Timer(PATIENCE_SECONDS, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


class Bars:
    """A progress function whose bar shows on a terminal once a work has taken a second, also while the work
    has nothing to report, such as when it waits for the disk."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Bar | None = None
        self._last = (0, 0)
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)

    def __enter__(self) -> Progress:
        self._timer.start()
        return self._report

    def _show(self) -> None:
        layout = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}, {remaining} left"
        with self._lock:
            self._bar = bar(self._what, "B", bar_format=layout, disable=None, leave=False, ncols=width())
            self._bar.report(*self._last)

    def _report(self, done: int, total: int) -> None:
        with self._lock:
            self._last = (done, total)
            if self._bar is not None:
                self._bar.report(done, total)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._bar is not None:
            self._bar.close()
