"""The promises of SECURITY.md that no other test covers; the table there names all of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import redis_server

import embstore
from embstore.checkpoint.converting import convert
from embstore.checkpoint.remote import RemoteFolder
from embstore.serving import Reader, wire
from embstore.stores import SsdStore
from embstore.stores.urls import open_store, tiers

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import fuzz_targets as targets

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "dump-v1a": (targets.make_dump("v1a", targets.COUNTED), targets.read_dump(targets.COUNTED)),
    "dump-v2": (targets.make_dump("v2", targets.COUNTED), targets.read_dump(targets.COUNTED)),
    "log": (targets.make_log, targets.read_log),
    "served dump": (targets.make_dump("v1a", targets.COUNTED), targets.read_served),
    "served base": (targets.make_base, targets.read_served),
    "sok": (targets.make_converted("sok"), targets.read_sok),
    "sok to dump": (targets.make_converted("sok"), targets.read_converted),
    "one_embedding": (targets.make_converted("one_embedding"), targets.read_converted),
    "ssd": (targets.make_store, targets.read_store),
}
REFUSALS = (embstore.CheckpointError, OSError, RuntimeError, ValueError)


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


# ---- no code from data

CODE = """
import contextlib, pickle, shutil, sys
from pathlib import Path
from trust.fuzz_targets import TARGETS
from trust import fuzz_targets
from test_security import FOLDERS, REFUSALS, files_of

class Canary:
    def __reduce__(self):
        return (Path.touch, (Path(sys.argv[1]) / "canary",))

seen = []
FORBIDDEN = ("pickle.find_class", "exec", "subprocess.Popen")
FORBIDDEN += ("os.system", "os.exec", "os.posix_spawn", "os.fork")
data = pickle.dumps(Canary())
work = Path(sys.argv[1])
prepared = {}
for name, (make, read) in FOLDERS.items():
    whole = work / name / "whole"
    whole.parent.mkdir()
    make(whole)
    read(whole)  # imports what it needs
    prepared[name] = whole
for name in ("parquet", "safetensors"):
    for seed in TARGETS[name].seeds():
        TARGETS[name].try_input(seed)
sys.addaudithook(lambda event, args: event in FORBIDDEN and seen.append((event, str(args)[:200])))
for name, whole in prepared.items():
    for file in [None, *files_of(whole)]:
        copy = work / name / "copy"
        shutil.copytree(whole, copy)
        if file is not None:
            (copy / file).write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            FOLDERS[name][1](copy)
        for left in (copy, work / name / "cache", work / name / "out"):
            shutil.rmtree(left, ignore_errors=True)
for name in ("parquet", "safetensors", "http-body"):
    TARGETS[name].try_input(data)
assert not (work / "canary").exists()
pickle.loads(data)
assert (work / "canary").exists()  # it would have sung
assert seen and all(event == "pickle.find_class" for event, _ in seen), seen
print(len(seen), "calls")
"""


@pytest.mark.slow
def test_reading_any_file_executes_nothing_in_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'trust'}"}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    # The only calls are those of the canary that the test itself let sing.
    assert int(done.stdout.split()[0]) <= 2


# ---- names and links stay in their folder

NAMES = ("../up", "/etc/abs", "..", ".", "a/../../b", ".hidden", "a\nb", "x" * 300)


def test_names_of_tables_make_no_file_outside_of_the_folder(tmp_path):
    inner = tmp_path / "a" / "b" / "c"
    inner.mkdir(parents=True)
    tables = {}
    for name in NAMES:
        tables[name] = embstore.Table(name, dim=2)
        tables[name].find_or_insert([7])
    for layout in ("v1a", "v2"):
        embstore.dump(inner / layout, {"../m": tables}, layout=layout)
        assert set(embstore.open_dump(inner / layout)["../m"]) == set(NAMES)
    embstore.IncrementLog.create(inner / "log", {"../m": tables})
    for to in ("safetensors", "parquet"):
        convert(inner / "v1a", inner / to, to)
    for name in NAMES:
        open_store(f"ssd://{inner}/ssd", table=name[:200], tensor_bytes=[8]).close()
    outside = [p for p in tmp_path.rglob("*") if inner not in (p, *p.parents) and p not in inner.parents]
    assert outside == []
    assert sorted(p.name for p in inner.iterdir()) == ["log", "parquet", "safetensors", "ssd", "v1a", "v2"]


@pytest.mark.parametrize("name", ["../s", "a/b", "..", ".s", "", "a\0b"])
def test_a_snapshot_of_a_store_is_a_name_in_its_folder(tmp_path, name):
    with SsdStore(tmp_path / "ssd", row_bytes=8) as store:
        for call in (store.snapshot, store.load_snapshot, store.delete_snapshot):
            with pytest.raises(ValueError, match="file name"):
                call(name)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore")
def test_a_link_instead_of_a_file_is_refused_though_its_bytes_are_right(tmp_path, name):
    make, read = FOLDERS[name]
    make(tmp_path / "whole")
    files = files_of(tmp_path / "whole")
    read(tmp_path / "whole")
    for file in files:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        (copy / file).unlink()
        (copy / file).symlink_to(tmp_path / "whole" / file)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # of the reader that served the whole
        if file.name == "LOCK":  # readers do not open it
            read(copy)
        else:
            with pytest.raises(REFUSALS):
                read(copy)
        for left in (copy, tmp_path / "out"):
            shutil.rmtree(left, ignore_errors=True)


@pytest.mark.parametrize("file", ["values/value-000000000000", "keys/key-000000000000", "LOCK", "FORMAT"])
def test_a_store_writes_through_no_link(tmp_path, file):
    path = tmp_path / "ssd"
    targets.make_store(path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"do not touch" * 1000)
    if file == "FORMAT":
        (path / "KEY_SIZE").unlink()  # it is written again
        (path / "FORMAT.unfinished").symlink_to(secret)
    else:
        (path / file).unlink()
        (path / file).symlink_to(secret)
    with pytest.raises((OSError, RuntimeError)), SsdStore(path, row_bytes=24) as store:
        store.put(np.arange(5000), np.ones((5000, 6), np.float32))
        store.snapshot("t")
    assert secret.read_bytes() == b"do not touch" * 1000


def test_an_upload_sends_no_file_that_a_link_leads_to(tmp_path):
    targets.make_dump("v1a", targets.COUNTED)(tmp_path / "d")
    (tmp_path / "secret").write_bytes(b"my secret")
    link = next((tmp_path / "d").rglob("user_values"))
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    (tmp_path / "remote").mkdir()
    with pytest.raises(embstore.CheckpointError, match="link"):
        RemoteFolder(f"file://{tmp_path}/remote").upload(tmp_path / "d")
    assert not any(b"my secret" in p.read_bytes() for p in (tmp_path / "remote").rglob("*") if p.is_file())


# ---- passwords

PASSWORD = "pw-of-the-store-8417"


@pytest.mark.parametrize("call", ["open", "load", "log", "reader", "dump"])
def test_an_error_about_a_url_names_neither_user_nor_password_nor_query(tmp_path, call, monkeypatch):
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    # A file system whose URLs have credentials, as those of sftp and ftp.
    real = MemoryFileSystem._strip_protocol
    plain = staticmethod(lambda path: real(re.sub(r"ann.*@|\?.*", "", path)))
    monkeypatch.setattr(MemoryFileSystem, "_strip_protocol", plain)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"memory://ann:{PASSWORD}@host/monday?key={PASSWORD}"
    table = embstore.Table("user", dim=2)
    tables = {"m": {"user": table}}
    if call == "dump":
        embstore.dump(url, tables)
    calls = {
        "open": lambda: embstore.open_dump(url),
        "load": lambda: embstore.load(url, tables),
        "log": lambda: embstore.IncrementLog(url).load(tables),
        "reader": lambda: Reader(url, cache=tmp_path / "cache"),
        "dump": lambda: embstore.dump(url, tables),
    }
    with pytest.raises(OSError) as caught:
        calls[call]()
    RemoteFolder(url).remove()
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    told = " ".join(f"{error} {error!r}" for error in chain)
    assert "memory://host/monday" in told
    assert PASSWORD not in told and "ann" not in told


def test_a_token_is_not_in_the_repr_of_its_options():
    pytest.importorskip("fastapi")
    from embstore.serving.server import ServerOptions

    assert PASSWORD not in repr(ServerOptions(token=PASSWORD))


@pytest.mark.multirank
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
def test_the_password_of_a_store_is_in_no_dump_repr_log_or_process_title(tmp_path, caplog):
    server = redis_server.RedisServer(tmp_path / "redis", "--requirepass", PASSWORD).start()
    try:
        url = f"redis://default:{PASSWORD}@{server.where}/"
        options = embstore.TableOptions(name="user", dim=2, max_capacity=128, optimizer=embstore.Adam())
        store = tiers(url, upper_rows=64)(options, 0)
        table = embstore.Table(options, store=store)
        tables = {"m": {"user": table}}
        with caplog.at_level(0):
            for first in range(0, 600, 100):
                table.find_or_insert(np.arange(first, first + 100))
            embstore.dump(tmp_path / "d", tables, optim=True)
            log = embstore.IncrementLog.create(tmp_path / "log", tables)
            publisher = log.append_every(tables, steps=1, compact_after=1)
            titles = ""
            for step in range(3):
                table.find_or_insert([step])
                publisher.step()
                titles += "".join(title_of(child) for child in children())
            publisher.close()
        table.close()
    finally:
        server.stop()
    for path in [*(tmp_path / "d").rglob("*"), *(tmp_path / "log").rglob("*")]:
        assert path.is_dir() or PASSWORD.encode() not in path.read_bytes(), path
    for text in (repr(store), repr(table), str(table.options), str(tables), caplog.text, titles):
        assert PASSWORD not in text


def children() -> list[str]:
    found = Path(f"/proc/self/task/{os.getpid()}/children")
    return found.read_text().split() if found.exists() else []


def title_of(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text() if "redis" not in process else ""
    except OSError:
        return ""


# ---- temporary files


@pytest.mark.filterwarnings("ignore")
def test_copies_and_spools_are_for_this_user_alone(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    import tempfile

    modes: list[tuple[str, int]] = []
    cache, spool = tmp_path / "cache", tmp_path / "tmp"
    spool.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(spool))
    real = tempfile.mkdtemp

    def watched(*args, **kwargs):
        made = real(*args, **kwargs)
        modes.append((made, stat.S_IMODE(os.stat(made).st_mode)))
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    before = os.umask(0)
    try:
        table = targets.a_table(targets.COUNTED)
        tables = {"m": {"user": table}}
        url = f"memory://{tmp_path.name}"
        embstore.dump(f"{url}/d", tables)
        embstore.open_dump(f"{url}/d")
        log = embstore.IncrementLog.create(f"{url}/log", tables)
        table.find_or_insert([99])
        log.append(tables)
        Reader(f"{url}/log").close()
        Reader(f"{url}/d").close()
    finally:
        os.umask(before)
    assert modes and all(mode == 0o700 for _, mode in modes)
    kinds = sorted(p.name for p in (cache / "embstore").iterdir())
    assert kinds == ["logs", "remote", "serving"]
    for kind in kinds:
        assert stat.S_IMODE((cache / "embstore" / kind).stat().st_mode) == 0o700, kind
    assert list(spool.iterdir()) == []


# ---- plug-ins


def test_a_url_loads_no_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    for name in ("strange", "strange.so", "libstrange.so"):
        (tmp_path / name).write_bytes(b"\x7fELF")
    before = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for url in ("strange://host", "libstrange.so://host", f"{tmp_path}/strange.so://x", "./strange://x"):
        with pytest.raises(ValueError, match="scheme of url"):
            open_store(url, table="t", tensor_bytes=[8])
    after = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert not [name for name in after - before if ".so" in name]


# ---- the server's memory


def refused(app, body: bytes, route: str = "/v1/lookup") -> tuple[int, bytes]:
    """Status and body of a POST, without a network."""
    sent: list[dict] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": route, "raw_path": route.encode(), "query_string": b""},
        **{"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"},
        **{"server": ("x", 80), "client": ("y", 1), "root_path": "", "asgi": {"version": "3.0"}},
    }
    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], content


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    pytest.importorskip("fastapi")
    from embstore.serving.server import ServerOptions, create_app

    folder = tmp_path_factory.mktemp("served")
    table = embstore.Table("user", dim=50)
    table.find_or_insert([7])
    embstore.dump(folder / "d", {"m": {"user": table}})
    return create_app(Reader(folder / "d", cache=folder / "cache"), ServerOptions(max_answer_bytes=1_000_000))


@pytest.mark.parametrize(
    "body",
    [
        b'{"tables": {"user": [' + b",".join([b"null"] * 100_000) + b"]}}",
        b'{"tables": {' + b",".join(b'"%d":0' % i for i in range(50_000)) + b"}}",
        b'{"tables": {"user": [' + b",".join([b'"x"'] * 100_000) + b"]}}",
        b'{"tables": ' + b"[" * 100_000,
    ],
)
def test_a_hundred_thousand_mistakes_cost_the_memory_of_a_body_and_a_line(app, body):
    tracemalloc.start()
    try:
        status, answer = refused(app, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status == 422 and len(answer) < 1000
    assert peak < 40 * len(body)


def test_an_answer_that_would_be_too_large_is_refused_before_it_is_made(app):
    few, many = [7] * 300, [7] * 5000
    status, answer = refused(app, json.dumps({"tables": {"user": few}}).encode())
    assert status == 200 and len(json.loads(answer)["tables"]["user"]["vectors"]) == 300
    assert refused(app, json.dumps({"tables": {"user": many}}).encode())[0] == 413
    status, answer = refused(app, wire.pack_request({"user": np.array(many)}), "/v1/lookup.bin")
    assert status == 413 and b"at most 1000000 bytes" in answer
    assert refused(app, wire.pack_request({"user": np.array(few)}), "/v1/lookup.bin")[0] == 200
