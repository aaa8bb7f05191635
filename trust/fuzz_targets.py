"""What is fuzzed: everything that reads bytes from outside.

A target turns bytes into one use of a reader. It may raise what the documentation of the reader names;
anything else (another exception, a crash, a hang, memory without bound) is a finding.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import embstore
from embstore.checkpoint.converting import OneEmbeddingOptions, convert
from embstore.checkpoint.merging import rewrite
from embstore.checkpoint.replaying import open_any
from embstore.formats import parquet, safetensors, sok
from embstore.formats.columns import DESCRIPTION, SHARED
from embstore.key_counts import KeyCounts
from embstore.serving import Reader, wire
from embstore.serving.bases import prepare
from embstore.stores import SsdStore
from embstore.stores.redis.answers import Answers
from embstore.stores.redis.url import parse_redis_url
from embstore.stores.urls import open_store
from trust.fuzz_folders import CHUNK, EDITS, Folder, edited, edits

Errors = tuple[type[Exception], ...]
OF_FILES: Errors = (embstore.CheckpointError, OSError)
KEYS = [7, -1, 12, 2**62]


@dataclass(frozen=True)
class Target:
    """`seeds` are valid inputs to start from; `of_edits` that inputs have the form of fuzz_folders."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    allowed: Errors
    of_edits: bool = False

    def try_input(self, data: bytes) -> None:
        """Raises what is a finding, and nothing else."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.run(data)
        except self.allowed as error:
            if isinstance(error, (UnicodeError, RecursionError)):  # kinds of ValueError and RuntimeError
                raise


# ---- folders

# Between them, tables with every kind of file there is.
COUNTED = {"score_strategy": "step", "evict_least_used": True, "admission_threshold": 2, "shared_rows": 2}
FREQUENT = {"score_strategy": "lfu", "admission": "frequency", "shared_rows": 3, "max_capacity": 128}
ORIGINAL = {"score_strategy": "timestamp"}


def a_table(options: dict[str, Any]) -> embstore.Table:
    table = embstore.Table("user", dim=3, optimizer=embstore.Adam(), init_capacity=128, **options)
    if options is COUNTED:
        table.exact_counts = KeyCounts()
    return table


def a_full_table(options: dict[str, Any]) -> embstore.Table:
    table = a_table(options)
    table.find_or_insert(KEYS)
    table.find_or_insert(KEYS)
    if table.exact_counts is not None:
        table.exact_counts.replace(np.array([3, 5]), np.array([1, 2]))
    return table


def make_dump(layout: str, options: dict[str, Any], world: int = 1) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        tables = {"model": {"user": a_full_table(options)}}
        if world == 1:
            embstore.dump(path, tables, optim=True, layout=layout)
            return
        source = path.with_name("source")
        embstore.dump(source, tables, optim=True)
        rewrite(embstore.open_dump(source), [], path, layout=layout, world=world)

    return make


def make_original(layout: str) -> Callable[[Path], None]:
    """As of the original package, whose dumps have no manifest, so no checksum."""

    def make(path: Path) -> None:
        make_dump(layout, ORIGINAL)(path)
        (path / "model" / "embstore.json").unlink()

    return make


def make_log(path: Path) -> None:
    tables = {"model": {"user": a_full_table(FREQUENT)}}
    log = embstore.IncrementLog.create(path, tables)
    tables["model"]["user"].erase([7])
    tables["model"]["user"].find_or_insert([5, 6])
    log.append(tables)


def read_dump(options: dict[str, Any]) -> Callable[[Path], None]:
    """Opens, verifies and loads."""

    def read(path: Path) -> None:
        opened = open_any(path)
        opened.verify()
        for table in opened.tables:
            table.find(KEYS)
        embstore.load(path, {"model": {"user": a_table(options)}}, optim=True)

    return read


def read_log(path: Path) -> None:
    log = embstore.IncrementLog(path)
    log.verify()
    log.load({"model": {"user": a_table(FREQUENT)}})


def read_served(path: Path) -> None:
    with Reader(path, cache=path.with_name("cache"), missing="initial") as reader:
        for table in ("user", "model/user"):
            with contextlib.suppress(KeyError):  # renamed
                reader.find(table, [*KEYS, 5, 6])
                reader.state.bags(table, KEYS, [0, 1, 4])


def make_converted(to: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        source = path.with_name("source")
        make_dump("v1a", {"score_strategy": "lfu"})(source)
        convert(source, path, to, one_embedding=OneEmbeddingOptions(snapshot="s"))

    return make


def read_converted(path: Path) -> None:
    options = OneEmbeddingOptions(dim=3, optimizer="Adam", snapshot="s")
    convert(path, path.with_name("out"), "v2", one_embedding=options)


IN_STORES = tuple(f"{name}-000000000001" for name in ("values/value", "keys/key", "meta/meta")) + (
    "snapshots/s/index-000000000001",
    "snapshots/t/LIST",
    f"snapshots/t/index{CHUNK}",
)


def make_base(path: Path) -> None:
    source = path.with_name("base-source")
    make_dump("v1a", COUNTED)(source)
    prepare(source, path)


def read_sok(path: Path) -> None:
    reader = sok.DumpReader(path)
    for name in reader.tables():
        reader.table(name).block(0, 100)


def make_store(path: Path) -> None:
    with SsdStore(path, row_bytes=24) as store:
        store.put(KEYS, np.ones((len(KEYS), 6), np.float32))
        store.snapshot("s")


def read_store(path: Path) -> None:
    with SsdStore(path, row_bytes=24, create=False) as store:
        for name in store.snapshots():
            store.load_snapshot(name)
            store.get(KEYS)
            list(store.scan())


def one_file(suffix: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            make_converted(suffix)(Path(folder) / "out")
            return [next((Path(folder) / "out").rglob(f"*.{suffix}")).read_bytes()]

    return seeds


def read_one_file(module: object, suffix: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"user.{suffix}"
            file.write_bytes(data)
            module.read(file).spec_and_rows(file)  # type: ignore[attr-defined]

    return run


# A file of columns around its metadata: an input edits its parts, see fuzz_folders.
SHAPES = {
    "key": ["<i8", 1],
    "vector": ["<f4", 3],
    "score": ["<u8", 1],
    "m": ["<f4", 3],
    "v": ["<f4", 3],
}


@cache
def _parts() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        make_dump("v1a", COUNTED)(Path(folder) / "source")
        convert(Path(folder) / "source", Path(folder) / "out", "safetensors")
        metadata = safetensors.read(Path(folder) / "out" / "model" / "user.safetensors").metadata
    parts = {name: np.ones(len(KEYS) * width, dtype).tobytes() for name, (dtype, width) in SHAPES.items()}
    return parts | {
        "key": np.array(KEYS).tobytes(),
        DESCRIPTION: metadata[DESCRIPTION].encode(),
        SHARED: b64decode(metadata[SHARED]),
        "shapes": json.dumps(SHAPES).encode(),
    }


def columns_seeds() -> list[bytes]:
    places = range(len(_parts()))
    return [bytes([EDITS + kind, i, 0, 7, 1, 49]) for kind in (0, 1) for i in places]


def _columns(parts: dict[str, bytes]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of the shapes that the input wants. Raises what numpy does for one that is none."""
    found = {}
    for name, (dtype, width) in json.loads(parts["shapes"]).items():
        kind = np.dtype(dtype)
        raw = parts.get(name, b"")
        column = np.frombuffer(raw, kind, len(raw) // kind.itemsize)
        if not 0 <= width <= 8:
            raise ValueError(f"columns are at most 8 wide here but one is: {width}")
        found[name] = column if width == 1 else column[: len(column) // width * width].reshape(-1, width)
    return found


def _write_columns(file: Path, parts: dict[str, bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet
    from safetensors.numpy import save_file

    columns = _columns(parts)
    description = parts[DESCRIPTION].decode(errors="replace")
    metadata = {DESCRIPTION: description, SHARED: b64encode(parts[SHARED]).decode()}
    if file.suffix == parquet.SUFFIX:
        arrays = [
            pa.array(c) if c.ndim == 1 else pa.FixedSizeListArray.from_arrays(c.ravel(), c.shape[1])
            for c in columns.values()
        ]
        table = pa.table(arrays, names=list(columns)).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, file)
        return
    names = {"key": "keys", "vector": "values", "score": "scores"}
    save_file({names.get(n, f"state.{n}"): c.copy() for n, c in columns.items()}, file, metadata)


def read_columns(data: bytes) -> None:
    module = (parquet, safetensors)[data[0] % 2 if data else 0]
    parts = dict(_parts())
    names = list(parts)
    for number, place, what in edits(data[1:]):
        name = names[number % len(names)]
        parts[name] = edited(parts[name], place, what)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"user{module.SUFFIX}"
        try:
            _write_columns(file, parts)
        except Exception:  # no such file can be written
            return
        table = module.read(file)
        spec, _ = table.spec_and_rows(file)
        table.shared(file, spec)


# ---- bytes that come over a wire, and text


def read_replies(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data[:65536])
        there.shutdown(socket.SHUT_WR)
        here.settimeout(10)
        answers = Answers(lambda: here, RuntimeError)
        for _ in range(8):
            answers.next()


def read_request(data: bytes) -> None:
    ids = wire.unpack_request(data)
    assert wire.pack_request(ids) == data


def read_response(data: bytes) -> None:
    state, taken_ns, tables = wire.unpack_response(data)
    again = wire.pack_response(state, taken_ns, tables)
    assert again == data


def read_json_body(data: bytes) -> None:
    from embstore.serving.server import Refused, _ids

    with contextlib.suppress(Refused):
        _ids(data, max_ids=1000)


def make_options(data: bytes) -> None:
    try:
        options = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(options, dict) and all(isinstance(name, str) for name in options):
        # Capacities are not limited by the type; a real table of that size is the caller's wish.
        embstore.TableOptions(**{"name": "t", "dim": 4, **options})


def open_url(data: bytes) -> None:
    url = data.decode(errors="replace")
    if "ssd" in url.lower() or "redis" in url.lower():  # would make folders, or look for servers
        parse_redis_url(url)
        return
    open_store(url, table="t", tensor_bytes=[8])


def _folder(
    name: str,
    make: Callable[[Path], object],
    use: Callable[[Path], object],
    allowed: Errors = OF_FILES,
    spare: tuple[str, ...] = (),
) -> Target:
    folder = Folder(make, use, spare)
    return Target(name, folder.seeds, folder.run, allowed, of_edits=True)


TARGETS = {
    target.name: target
    for target in (
        _folder("dump-v1a", make_dump("v1a", COUNTED), read_dump(COUNTED)),
        _folder("dump-v2", make_dump("v2", FREQUENT, world=2), read_dump(FREQUENT)),
        _folder("original-v1a", make_original("v1a"), read_dump(ORIGINAL)),
        _folder("original-v2", make_original("v2"), read_dump(ORIGINAL)),
        _folder("log", make_log, read_log),
        _folder("dump-to-dump", make_dump("v2", COUNTED, world=2), read_converted),
        _folder("log-to-dump", make_log, read_converted),
        _folder("served-dump", make_dump("v1a", COUNTED), read_served),
        _folder("served-log", make_log, read_served),
        _folder("served-base", make_base, read_served),
        _folder("sok", make_converted("sok"), read_sok),
        _folder("sok-to-dump", make_converted("sok"), read_converted),
        _folder(
            "one_embedding-to-dump", make_converted("one_embedding"), read_converted, (*OF_FILES, ValueError)
        ),
        _folder("ssd-store", make_store, read_store, (OSError, RuntimeError, ValueError), IN_STORES),
        Target("columns", columns_seeds, read_columns, OF_FILES, of_edits=True),
        Target("parquet", one_file("parquet"), read_one_file(parquet, "parquet"), OF_FILES),
        Target("safetensors", one_file("safetensors"), read_one_file(safetensors, "safetensors"), OF_FILES),
        Target(
            "redis-replies",
            lambda: [
                b"+OK\r\n:7\r\n$3\r\nabc\r\n*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n",
                b"-ERR no\r\n$-1\r\n*-1\r\n",
            ],
            read_replies,
            (OSError, RuntimeError),
        ),
        Target(
            "http-body",
            lambda: [wire.pack_request({"user": np.array(KEYS), "a/b": np.array([1])})],
            read_request,
            (wire.WireError,),
        ),
        Target(
            "http-json",
            lambda: [
                b'{"tables": {"user": [7, -1, "9223372036854775807"], "a/b": []}}',
                b'{"tables": {"user": [true, 1.5, null, 1e99, "x"]}}',
            ],
            read_json_body,
            (),
        ),
        Target(
            "http-response",
            lambda: [wire.pack_response(1, 2, [(np.ones((2, 3), np.float32), np.array([True, False]))])],
            read_response,
            (wire.WireError,),
        ),
        Target(
            "options",
            lambda: [
                b'{"max_capacity": 1024, "score_strategy": "lfu", "dtype": "float16", "seed": 3}',
                b'{"init_capacity": 128, "bucket_capacity": 128, "max_load_factor": 0.5, "name": "u"}',
            ],
            make_options,
            (ValueError, TypeError),
        ),
        Target(
            "urls",
            lambda: [
                b"redis://u:p@h:1,[::1]:2/3?prefix=a&&timeout=500ms&layout=packed",
                b"rediss://h?sentinel=m&sentinel_user=a&verify=0",
                b"memory://name",
                b"my-ps://host",
            ],
            open_url,
            (ValueError,),
        ),
    )
}
