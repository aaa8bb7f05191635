"""Lookups over HTTP: JSON for people, a binary form for programs, and what an operator watches.

    POST /v1/lookup        {"tables": {"user": [7, "-1"]}}
    POST /v1/lookup.bin    the binary form of embstore.serving.wire
    GET  /healthz  /readyz  /metrics  /docs

Needs the extra `serve`: pip install 'embstore[serve]'
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from embstore.extras import missing
from embstore.metrics import watch_reader
from embstore.serving.reader import Reader, State
from embstore.serving.wire import Ids, WireError, pack_response, unpack_request

try:
    import prometheus_client
    import swagger_ui_bundle
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.openapi.docs import get_swagger_ui_html
    from fastapi.responses import HTMLResponse, JSONResponse
    from fastapi.staticfiles import StaticFiles
    from pydantic import BaseModel, Field
    from starlette.types import Message, Receive, Scope, Send
except ImportError as error:
    raise missing("serving over HTTP", "serve", error) from error

BINARY = "application/octet-stream"
_IN_THE_LOOP_IDS = 16384  # a lookup of so many ids takes less than handing it to a thread and back
_BINARY_BYTES = 8  # of memory for each float of an answer: the array and the body
_JSON_BYTES = 64  # the same with its Python objects


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits of a server.

    token            lookups and metrics need `Authorization: Bearer TOKEN`; "" asks for none
    max_body_bytes   a larger body is refused with 413
    max_ids          of one request; more are refused with 413
    max_answer_bytes of memory for one answer; a request that needs more is refused with 413
    timeout_seconds  for receiving a whole body; a slower client gets 408
    max_age_seconds  /readyz fails when the state is older; 0: it never does
    """

    token: str = field(default="", repr=False)
    max_body_bytes: int = 16 << 20
    max_ids: int = 1_000_000
    max_answer_bytes: int = 1 << 30
    timeout_seconds: float = 10.0
    max_age_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_ids", "max_answer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 1 but is: {getattr(self, name)}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds should be above 0 but is: {self.timeout_seconds}")


Id = Annotated[int | str, Field(description="an integer, or its decimal digits as a string", examples=[7])]


class LookupBody(BaseModel):
    """Ids by table. A table is named as in training, or collection/table where names repeat."""

    tables: dict[str, list[Id]] = Field(examples=[{"user": [7, "-9223372036854775808"]}])


class Refused(Exception):
    """A request that is answered with a status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Limits:
    """Reads every body whole, within its limits, before the application sees the request."""

    def __init__(self, app: Any, options: ServerOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        try:
            self._authorize(scope["path"], headers)
            body = await asyncio.wait_for(self._body(headers, receive), self._options.timeout_seconds)
        except Refused as refused:
            await JSONResponse({"detail": str(refused)}, refused.status)(scope, receive, send)
            return
        except asyncio.TimeoutError:
            reason = f"the body did not arrive within {self._options.timeout_seconds:g} seconds"
            await JSONResponse({"detail": reason}, 408, {"connection": "close"})(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    def _authorize(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._options.token or not path.startswith(("/v1/", "/metrics")):
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._options.token.encode()):
            raise Refused(401, "the header 'Authorization: Bearer TOKEN' is missing or wrong")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._options.max_body_bytes
        reason = f"the body should have at most {limit} bytes"
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise Refused(413, reason)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Refused(400, "the client went away")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise Refused(413, reason)
            if not message.get("more_body"):
                return b"".join(parts)


class ServerMetrics:
    """What Prometheus reads."""

    def __init__(self, reader: Reader) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "embstore_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.ids = prometheus_client.Counter(
            "embstore_lookup_ids", "Ids that were looked up.", ["table"], registry=registry
        )
        self.missing = prometheus_client.Counter(
            "embstore_lookup_missing_ids", "Ids without a row.", ["table"], registry=registry
        )
        self.seconds = prometheus_client.Histogram(
            "embstore_lookup_seconds", "Time of a lookup, without the network.", registry=registry,
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2, 1.0),
        )  # fmt: skip
        watch_reader(reader, registry)


def _ids(body: bytes, max_ids: int) -> dict[str, Ids]:
    """The ids of a `LookupBody`. It stops at the first mistake: pydantic would describe each of a million, in
    a hundred times the memory of the body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"the body should be JSON: {error}") from error
    tables = document.get("tables") if isinstance(document, dict) else None
    if not isinstance(tables, dict) or not all(isinstance(ids, list) for ids in tables.values()):
        raise Refused(422, 'the body should be {"tables": {name: [id, ...], ...}}')
    _require_few(sum(map(len, tables.values())), max_ids)
    found = {}
    for table, ids in tables.items():
        for i in ids:
            if not isinstance(i, (int, str)) or isinstance(i, bool):
                raise Refused(
                    422, f"an id of {table!r} should be an integer or a string but is: {str(i)[:80]}"
                )
        try:
            found[table] = np.array([int(i) for i in ids], np.int64)
        except (ValueError, OverflowError) as error:
            reason = str(error)[:200]
            raise Refused(422, f"ids of {table!r} should be integers of 64 bits: {reason}") from error
    return found


def _require_few(ids: int, max_ids: int) -> None:
    if ids > max_ids:
        raise Refused(413, f"a request should have at most {max_ids} ids but has: {ids}")


def _json_vectors(vectors: Any) -> list[Any]:
    """Lists of numbers; NaN and infinity, which JSON does not have, are null."""
    if np.isfinite(vectors).all():
        return list(vectors.tolist())
    return [[x if np.isfinite(x) else None for x in row] for row in vectors.tolist()]


class Lookups:
    """Lookups within the limits, counted."""

    def __init__(self, reader: Reader, options: ServerOptions) -> None:
        self.reader = reader
        self.options = options
        self.metrics = ServerMetrics(reader)

    async def find(self, ids: dict[str, Ids], float_bytes: int) -> tuple[State, list[tuple[Any, Any]]]:
        """`float_bytes`: of memory for each float of the answer."""
        total = sum(len(of) for of in ids.values())
        _require_few(total, self.options.max_ids)
        state = self.reader.state
        for table in ids:
            if table not in state.names:
                raise Refused(
                    404, f"table should be one of {', '.join(sorted(state.names))} but is: {table!r}"
                )
        needed = sum(len(of) * state.dim(table) for table, of in ids.items()) * float_bytes
        if needed > self.options.max_answer_bytes:
            raise Refused(
                413,
                f"an answer should need at most {self.options.max_answer_bytes} bytes but needs: {needed}",
            )
        start = time.perf_counter()

        def work() -> list[tuple[Any, Any]]:
            return [state.find(table, of) for table, of in ids.items()]

        tables = work() if total <= _IN_THE_LOOP_IDS else await run_in_threadpool(work)
        self.metrics.seconds.observe(time.perf_counter() - start)
        for (table, of), (_, found) in zip(ids.items(), tables):
            self.metrics.ids.labels(table).inc(len(of))
            self.metrics.missing.labels(table).inc(len(of) - int(found.sum()))
        return state, tables


def create_app(reader: Reader, options: ServerOptions | None = None) -> FastAPI:
    """The application that serves a reader. It follows the reader's log while it runs."""
    options = options or ServerOptions()
    lookups = Lookups(reader, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reader.start(warn_age_seconds=options.max_age_seconds or None)
        yield
        reader.close()

    app = FastAPI(title="embstore", docs_url=None, redoc_url=None, lifespan=lifespan, version="1")
    app.openapi_version = "3.0.3"  # what the bundled Swagger UI reads
    app.add_middleware(Limits, options=options)
    assets = Path(swagger_ui_bundle.swagger_ui_path)
    app.mount("/assets", StaticFiles(directory=assets), name="assets")

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        lookups.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    @app.exception_handler(Refused)
    async def refuse(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    schema = {"application/json": {"schema": LookupBody.model_json_schema()}}

    @app.post(
        "/v1/lookup",
        summary="Vectors by id, JSON",
        tags=["lookup"],
        openapi_extra={"requestBody": {"content": schema, "required": True}},
    )
    async def lookup(request: Request) -> Response:
        """Vectors of ids of several tables, all from one state."""
        ids = _ids(await request.body(), options.max_ids)
        state, tables = await lookups.find(ids, _JSON_BYTES)
        answer = {
            "state": state.number,
            "taken_ns": state.taken_ns,
            "tables": {
                table: {"vectors": _json_vectors(vectors), "found": found.tolist()}
                for table, (vectors, found) in zip(ids, tables)
            },
        }
        return Response(json.dumps(answer), media_type="application/json")

    @app.post(
        "/v1/lookup.bin",
        summary="Vectors by id, binary",
        tags=["lookup"],
        openapi_extra={"requestBody": {"content": {BINARY: {}}, "required": True}},
    )
    async def lookup_binary(request: Request) -> Response:
        """The same in the binary form: see embstore.serving.wire."""
        try:
            ids = unpack_request(await request.body())
        except WireError as error:
            raise Refused(422, str(error)) from error
        state, tables = await lookups.find(ids, _BINARY_BYTES)
        return Response(pack_response(state.number, state.taken_ns, tables), media_type=BINARY)

    @app.get("/healthz", summary="Is the process alive?", tags=["operation"])
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", summary="State, its age, and whether it is followed", tags=["operation"])
    async def ready() -> JSONResponse:
        """The state that is served and its age; 503 when the log cannot be followed or is too old."""
        failing, age = reader.error, reader.age_seconds
        too_old = bool(options.max_age_seconds) and age > options.max_age_seconds
        answer = {
            "state": reader.state.number,
            "age_seconds": round(age, 3),
            "error": str(failing) if failing else None,
        }
        return JSONResponse(answer, 503 if failing or too_old else 200)

    @app.get("/metrics", summary="Prometheus metrics", tags=["operation"])
    async def metrics() -> Response:
        """Prometheus text format."""
        text = prometheus_client.generate_latest(lookups.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="embstore",
            swagger_js_url="/assets/swagger-ui-bundle.js",
            swagger_css_url="/assets/swagger-ui.css",
            swagger_favicon_url="/assets/favicon-32x32.png",
        )

    return app


# ---- running

_SETTINGS = "EMBSTORE_SERVE_SETTINGS"


def _token(file: str | None) -> str:
    """The token in a file; "" without one. An empty file would open the server to everybody."""
    if file is None:
        return ""
    token = Path(file).read_text().strip()
    if not token:
        raise ValueError(f"token_file should hold a token but is empty: {file}")
    return token


def app_from_environment() -> FastAPI:
    """What each worker of `serve` runs; the settings come through the environment, as workers are spawned."""
    settings = json.loads(os.environ[_SETTINGS])
    token = _token(settings.pop("token_file"))
    reader = Reader(settings.pop("path"), dtype=settings.pop("dtype"), cache=settings.pop("cache"))
    return create_app(reader, ServerOptions(token=token, **settings))


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8200,
    workers: int = 1,
    dtype: str = "float32",
    cache: str | None = None,
    token_file: str | None = None,
    before_start: Callable[[], None] | None = None,
    **limits: Any,
) -> None:
    """Serves a dump, a prepared base or an increment log until SIGINT or SIGTERM.

    `limits` are fields of `ServerOptions`. Several workers map the same files, so they share the memory of
    the rows. Each worker has its own metrics. `before_start` is called when the arguments and the files are
    known to be good, just before workers start.

    Raises FileNotFoundError when there is nothing at `path` or no `token_file`, CheckpointError when the dump
    is damaged, ValueError for a limit, dtype or token that cannot be used.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise missing("serving over HTTP", "serve", error) from error

    # A mistake shows here, once, before workers start.
    ServerOptions(token=_token(token_file), **limits)
    Reader(path, dtype=dtype, cache=cache)
    if before_start is not None:
        before_start()
    settings = {"path": os.fspath(path), "dtype": dtype, "cache": cache, "token_file": token_file, **limits}
    os.environ[_SETTINGS] = json.dumps(settings)
    uvicorn.run(
        "embstore.serving.server:app_from_environment", factory=True, host=host, port=port,
        workers=workers, log_level="warning", timeout_graceful_shutdown=10, access_log=False,
    )  # fmt: skip
