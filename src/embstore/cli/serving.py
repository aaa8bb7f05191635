"""Commands for operators: serve, doctor."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from embstore.arrays import as_integer
from embstore.cli import doctor
from embstore.cli.app import Json, app, refusals, working


@app.command()
def serve(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="the folder or URL of a dump, a log or a prepared base")
    ],
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port to listen on")] = 8200,
    workers: Annotated[int, typer.Option(help="processes; they share the memory of the rows")] = 1,
    dtype: Annotated[str, typer.Option(help="of rows: float32, float16, bfloat16 or int8")] = "float32",
    token_file: Annotated[Path | None, typer.Option(help="holds the token that clients send")] = None,
    as_json: Json = False,
) -> None:
    """Answer lookups over HTTP until SIGINT or SIGTERM; follow a log as it grows."""
    with refusals(as_json), ExitStack() as opening:
        from embstore.checkpoint.remote import shown_url
        from embstore.serving import server

        as_integer(port, 1, 65535, "--port")
        as_integer(workers, 1, 1024, "--workers")
        token = None if token_file is None else str(token_file)

        opening.enter_context(working("opening"))

        def listen() -> None:
            opening.close()
            _require_free(host, port)
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            started = {"path": shown_url(path), "url": url, "workers": workers, "dtype": dtype}
            text = json.dumps(started) if as_json else f"serving {shown_url(path)}\n{url}  (Ctrl-C stops)"
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
    """Show versions, instruction set, threads, memory, disk, extras, lookup speed."""
    with refusals(as_json), working("measuring"):
        facts = doctor.examine()
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(doctor.lines(facts)))
