"""Commands that write dumps: merge, reshard, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embstore.arrays import as_integer
from embstore.checkpoint import converting, rewriting
from embstore.checkpoint.reading import is_log
from embstore.cli.app import Bars, DumpPath, Json, LogPath, Target, app, plural, print_json, refusals
from embstore.readable import bytes_text


def _written(target: Path, as_json: bool) -> None:
    """What there is now."""
    files = [p for p in target.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    if as_json:
        print_json({"path": str(target), "files": len(files), "bytes": size})
    else:
        typer.echo(f"{target}: {bytes_text(size)} in {plural(len(files), 'file')}")


@app.command()
def merge(log: LogPath, target: Target, as_json: Json = False) -> None:
    """Write a dump of the newest state of a log: its base and all increments."""
    with refusals(as_json):
        if not is_log(log):
            raise ValueError(f"log should be the folder of an increment log but is: {log}")
        with Bars("merging") as report:
            rewriting.merge(log, target, progress=report)
        _written(target, as_json)


@app.command()
def reshard(
    path: DumpPath,
    target: Target,
    world: Annotated[int, typer.Option(help="number of ranks")],
    as_json: Json = False,
) -> None:
    """Write the same rows for another number of ranks."""
    with refusals(as_json):
        as_integer(world, 1, 65536, "--world")
        with Bars("resharding") as report:
            rewriting.reshard(path, target, world, progress=report)
        _written(target, as_json)


@app.command()
def convert(
    path: DumpPath,
    target: Target,
    to: Annotated[str, typer.Option(help=f"one of {', '.join(converting.FORMATS)}")],
    snapshot: Annotated[str | None, typer.Option(help="name of a OneEmbedding snapshot")] = None,
    dim: Annotated[int | None, typer.Option(help="width of the vectors in OneEmbedding rows")] = None,
    optimizer: Annotated[str, typer.Option(help="optimizer whose state OneEmbedding rows hold")] = "SGD",
    as_json: Json = False,
) -> None:
    """Convert between layouts of dumps and files of other tools."""
    with refusals(as_json):
        with Bars("converting") as report:
            rewriting.convert(
                path, target, to, progress=report, snapshot=snapshot, dim=dim, optimizer=optimizer
            )
        _written(target, as_json)
