"""What is fuzzed: everything that reads bytes from outside.

A target turns bytes into one use of a reader. It may raise what the documentation of the reader names;
anything else (another exception, a crash, a hang, memory without bound) is a finding.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import embstore
from embstore.checkpoint.converting import OneEmbeddingOptions, convert
from embstore.checkpoint.replaying import open_any
from embstore.formats import parquet, safetensors, sok
from embstore.serving import Reader, wire
from embstore.serving.bases import prepare
from embstore.stores import SsdStore
from embstore.stores.redis.answers import Answers
from embstore.stores.redis.url import parse_redis_url
from embstore.stores.urls import open_store

Errors = tuple[type[Exception], ...]
OF_FILES: Errors = (embstore.CheckpointError, OSError, ValueError)
KEYS = [7, -1, 12, 2**62]


@dataclass(frozen=True)
class Target:
    """`seeds` are valid inputs to start from."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    allowed: Errors

    def try_input(self, data: bytes) -> None:
        """Raises what is a finding, and nothing else."""
        with contextlib.suppress(*self.allowed):
            self.run(data)


# ---- folders: the first byte of an input chooses a file, the rest replaces its contents


class Folder:
    """A folder that was written properly, with one file replaced at a time."""

    def __init__(self, make: Callable[[Path], object], use: Callable[[Path], object]) -> None:
        self._make, self._use = make, use
        self._place: Path | None = None

    @property
    def _valid(self) -> Path:
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="embstore-fuzz-")) / "valid"
            self._make(self._place)
        return self._place

    def _files(self) -> list[Path]:
        return sorted(p.relative_to(self._valid) for p in self._valid.rglob("*") if p.is_file())

    def seeds(self) -> list[bytes]:
        return [bytes([i]) + (self._valid / name).read_bytes() for i, name in enumerate(self._files())]

    def run(self, data: bytes) -> None:
        files = self._files()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(self._valid, copy, symlinks=True)
            (copy / files[(data[0] if data else 0) % len(files)]).write_bytes(data[1:])
            self._use(copy)


def a_table() -> embstore.Table:
    table = embstore.Table(
        "user",
        dim=3,
        optimizer=embstore.Adam(),
        score_strategy="lfu",
        admission_threshold=2,
        init_capacity=128,
    )
    table.find_or_insert(KEYS)
    table.find_or_insert(KEYS)
    return table


def make_dump(layout: str) -> Callable[[Path], None]:
    return lambda path: embstore.dump(path, {"model": {"user": a_table()}}, optim=True, layout=layout)


def make_log(path: Path) -> None:
    table = a_table()
    log = embstore.IncrementLog.create(path, {"model": {"user": table}})
    table.erase([7])
    log.append({"model": {"user": table}})


def read_dump(path: Path) -> None:
    """Opens, verifies and loads."""
    opened = open_any(path)
    for table in opened.tables:
        table.find(KEYS)
    table = a_table()
    embstore.load(path, {"model": {"user": table}}, optim=True)


def read_log(path: Path) -> None:
    log = embstore.IncrementLog(path)
    log.verify()
    log.load({"model": {"user": a_table()}})


def read_served(path: Path) -> None:
    with Reader(path, cache=path.with_name("cache")) as reader:
        reader.find("user", KEYS)


def make_converted(to: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        source = path.with_name("source")
        make_dump("v1a")(source)
        convert(source, path, to, one_embedding=OneEmbeddingOptions(snapshot="s"))

    return make


def read_converted(path: Path) -> None:
    options = OneEmbeddingOptions(dim=3, optimizer="Adam", snapshot="s")
    convert(path, path.with_name("out"), "v2", one_embedding=options)


def make_base(path: Path) -> None:
    source = path.with_name("base-source")
    make_dump("v1a")(source)
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


def read_json_body(data: bytes) -> None:
    from embstore.serving.server import Refused, _ids

    with contextlib.suppress(Refused):
        _ids(data, max_ids=1000)


def make_options(data: bytes) -> None:
    options = json.loads(data)
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
    name: str, make: Callable[[Path], object], use: Callable[[Path], object], allowed: Errors
) -> Target:
    folder = Folder(make, use)
    return Target(name, folder.seeds, folder.run, allowed)


TARGETS = {
    target.name: target
    for target in (
        _folder("dump-v1a", make_dump("v1a"), read_dump, OF_FILES),
        _folder("dump-v2", make_dump("v2"), read_dump, OF_FILES),
        _folder("log", make_log, read_log, OF_FILES),
        _folder("served-dump", make_dump("v1a"), read_served, OF_FILES),
        _folder("served-base", make_base, read_served, OF_FILES),
        _folder("sok", make_converted("sok"), read_sok, OF_FILES),
        _folder("sok-to-dump", make_converted("sok"), read_converted, OF_FILES),
        _folder("one_embedding-to-dump", make_converted("one_embedding"), read_converted, OF_FILES),
        _folder("ssd-store", make_store, read_store, (OSError, RuntimeError, ValueError)),
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
            wire.unpack_request,
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
            wire.unpack_response,
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
