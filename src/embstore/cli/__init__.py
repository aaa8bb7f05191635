"""The command `embstore`: looks into dumps and logs, checks, rewrites and serves them."""

from __future__ import annotations

import sys

# Packages that commands need, and the extra of embstore that installs them.
EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "tqdm": "cli",
    "pyarrow": "files",
    "safetensors": "files",
    "matplotlib": "plot",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "swagger_ui_bundle": "serve",
}
WRONG_USE = 2


def missing_extra(error: ImportError) -> str | None:
    """What to install when a package of an extra is missing; None for other packages."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"this needs {package}: pip install 'embstore[{EXTRAS[package]}]'"


def main() -> None:
    """The console script."""
    as_json = "--json" in sys.argv
    try:
        from embstore.cli.app import error_json
        from embstore.cli.commands import app
    except ImportError as error:
        text = missing_extra(error)
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(WRONG_USE) from None
    if not as_json:
        app()
    # Mistakes in the command line itself, such as an unknown option, are JSON for programs too.
    try:
        raise SystemExit(app(standalone_mode=False))
    except Exception as error:
        # Of click, or of the copy that newer versions of typer bring along.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        print(error_json("wrong use", say(), WRONG_USE), file=sys.stderr)
        raise SystemExit(WRONG_USE) from None
