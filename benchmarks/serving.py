"""What serving costs: lookups beside a trainer that publishes, readers that share memory, the HTTP server.

serve-lookup    1,000 ids x dim 64 in one thread while increments arrive from another process: median against
                50 us, p99 against 200 us; zipf(1.05) ids, and uniform ones for information
serve-redis     the same lookups against MGET of Redis over loopback, the same rows as strings
serve-fresh     1M changed rows of dim 32: from the call of append until another process answers with them,
                against 1 s
serve-append-hold  1M changed rows of dim 32 appended in the background: the longest a training step is held,
                against 5 ms: the longest step beside appends less the longest without, and the longest call
                of step()
serve-metrics   a training step with tables watched and a step timer, against one without; wanted above 0.99
serve-open      a dump of 5 GB, page cache warm: from nothing to the first lookup, against 1 s; the first time
                on a host, when the index is built, and later
serve-memory    private memory of 4 readers and the shared pages once, against one reader; wanted below 1.1
serve-http      vectors of dim 64 a second through the binary form, 2 workers, clients on the same machine,
                against 1 M
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import embstore
from embstore.serving import Reader
from embstore.serving.wire import pack_request

from .ids import scatter, zipf_rows
from .parameter_server import server as redis_server
from .registry import Row, Run, register
from .timing import Side, interleave, set_threads

IDS, DIM = 1000, 64


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="build"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def filled(rows: int, dim: int = DIM) -> embstore.Table:
    table = embstore.Table("user", dim=dim, optimizer=embstore.SGD(lr=0.1), init_capacity=rows)
    for begin in range(0, rows, 1 << 18):
        table.find_or_insert(scatter(np.arange(begin, min(begin + (1 << 18), rows))).numpy())
    return table


def microseconds(reader: Reader, batches: np.ndarray) -> np.ndarray:
    times = []
    for ids in batches:
        begin = time.perf_counter()
        reader.find("user", ids)
        times.append(time.perf_counter() - begin)
    return np.array(times) * 1e6


TRAINER = """
import sys, time
import numpy as np
import embstore
from benchmarks.ids import scatter
from benchmarks.serving import DIM, filled
rows = int(sys.argv[2])
embstore.set_num_threads(1)
table, rng = filled(rows), np.random.default_rng(4)
tables = {"m": {"user": table}}
log = embstore.IncrementLog.create(sys.argv[1], tables)
print("ready", flush=True)
while True:
    time.sleep(0.2)
    keys = scatter(rng.integers(0, rows, 20_000)).numpy()
    table.apply_gradients(keys, np.ones((len(keys), DIM), np.float32))
    if log.append(tables) % 40 == 0:
        log.compact()
"""


@register("serve-lookup")
def lookup(run: Run) -> Iterator[Row]:
    rows = min(run.sizes.rows, 2_000_000)
    rng = np.random.default_rng(1)
    with folder() as path:
        command = [sys.executable, "-c", TRAINER, str(path / "log"), str(rows)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        embstore.set_num_threads(1)
        with Reader(path / "log", cache=path / "cache") as reader:
            reader.start()
            count = 10 * IDS if run.sizes.rows < 10**6 else 4000 * IDS
            for name, drawn in (
                ("zipf", zipf_rows(rows, count, rng)),
                ("uniform", rng.integers(0, rows, count)),
            ):
                times = microseconds(reader, scatter(drawn).numpy().reshape(-1, IDS))
                for share, limit in ((50, 50.0), (99, 200.0)):
                    wanted = 1.0 if name == "zipf" else None
                    found = float(np.percentile(times, share))
                    work = f"1,000 ids x dim 64, {name}, increments arriving, p{share}"
                    yield Row(work, f"{limit:g} us", 1, limit / found, wanted, None, f"{found:.0f} us")
            assert reader.error is None and reader.state.number > 0
        trainer.kill()
        trainer.communicate()


@register("serve-redis")
def against_redis(run: Run) -> Iterator[Row]:
    import redis

    rows = min(run.sizes.rows, 500_000)
    rng = np.random.default_rng(2)
    with folder() as path, redis_server() as port:
        table = filled(rows)
        embstore.dump(path / "d", {"m": {"user": table}})
        reader = Reader(path / "d", cache=path / "cache")
        client = redis.Redis(port=port)
        keys = scatter(np.arange(rows)).numpy()
        for begin in range(0, rows, 10_000):
            some = keys[begin : begin + 10_000]
            client.mset({k.tobytes(): v.tobytes() for k, v in zip(some, table.find(some)[0])})
        embstore.set_num_threads(1)
        ours, theirs = [], []
        for ids in keys[zipf_rows(rows, 300 * IDS, rng)].reshape(-1, IDS):
            begin = time.perf_counter()
            vectors, _ = reader.find("user", ids)
            ours.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            found = np.frombuffer(b"".join(client.mget([k.tobytes() for k in ids])), np.float32)
            theirs.append(time.perf_counter() - begin)
            assert np.array_equal(found.reshape(IDS, DIM), vectors)
        a, b = float(np.median(ours)), float(np.median(theirs))
        detail = f"{a * 1e6:.0f} us against {b * 1e6:.0f} us"
        yield Row("1,000 ids x dim 64, zipf", "Redis MGET, loopback", 1, b / a, 20.0, None, detail)


FOLLOWER = """
import sys, time, numpy as np
from embstore.serving import Reader
reader = Reader(sys.argv[1], cache=sys.argv[2])
keys = np.load(sys.argv[3], mmap_mode="r")
print("ready", flush=True)
while not reader.follow():
    time.sleep(0.005)
vectors, found = reader.find("user", keys)
assert found.all() and (vectors == 7.0).all()
print(time.time(), flush=True)
"""


@register("serve-fresh")
def fresh(run: Run) -> Iterator[Row]:
    changed = 10_000 if run.sizes.rows < 10**6 else 1_000_000
    with folder() as path:
        table = filled(2 * changed, 32)
        tables = {"m": {"user": table}}
        log = embstore.IncrementLog.create(path / "log", tables, optim=False)
        keys = scatter(np.arange(changed)).numpy()
        np.save(path / "keys.npy", keys)
        times = []
        for _ in range(3):
            arguments = [str(path / "log"), str(path / "cache"), str(path / "keys.npy")]
            follower = subprocess.Popen(
                [sys.executable, "-c", FOLLOWER, *arguments], stdout=subprocess.PIPE, text=True
            )
            assert follower.stdout is not None and follower.stdout.readline() == "ready\n"
            table.insert_or_assign(keys, np.full((changed, 32), 7.0, np.float32))
            begin = time.time()
            log.append(tables)
            times.append(float(follower.stdout.readline()) - begin)
            follower.wait(60)
        found = float(np.median(times))
        work = f"{changed:,} changed rows visible in another process"
        yield Row(work, "1 s", 2, 1 / found, 1.0, None, f"{found:.2f} s from the call of append")


@register("serve-append-hold")
def append_hold(run: Run) -> Iterator[Row]:
    changed, batch = (10_000, 4096) if run.sizes.rows < 10**6 else (1_000_000, 16_384)
    rng = np.random.default_rng(6)
    embstore.set_num_threads(1)
    with folder() as path:
        table = filled(2 * changed, 32)
        tables = {"m": {"user": table}}
        log = embstore.IncrementLog.create(path / "log", tables, optim=False)
        gradients = np.ones((batch, 32), np.float32)
        # All of them change between two appends, and many change again while they are being written.
        batches = [scatter(rng.permutation(changed)[:batch]).numpy() for _ in range(64)]
        touched = scatter(np.arange(changed)).numpy()

        def step(number: int) -> float:
            begin = time.perf_counter()
            keys = batches[number % 64]
            table.find_or_insert(keys)
            table.apply_gradients(keys, gradients)
            return time.perf_counter() - begin

        def steps(count: int, after: Callable[[], float]) -> tuple[np.ndarray, np.ndarray]:
            times, calls = [], []
            for number in range(count):
                times.append(step(number))
                calls.append(after())
            return np.array(times), np.array(calls)

        steps(64, lambda: 0.0)
        alone, _ = steps(400, lambda: 0.0)
        beside, calls = [], []
        with log.append_every(tables, steps=1) as publisher:

            def publish() -> float:
                begin = time.perf_counter()
                publisher.step()
                return time.perf_counter() - begin

            for _ in range(4):
                before = log.applied
                for begin in range(0, changed, batch):
                    keys = touched[begin : begin + batch]
                    table.apply_gradients(keys, gradients[: len(keys)])
                while log.applied <= before + 1:
                    times, of = steps(10, publish)
                    beside.append(times)
                    calls.append(of)
        times, called = np.concatenate(beside) * 1e3, np.concatenate(calls) * 1e3
        alone *= 1e3
        held = max(float(times.max() - alone.max()), float(called.max()), 1e-3)
        detail = (
            f"held {held:.2f} ms: longest step {times.max():.1f} ms, p50 {np.median(times):.1f}; "
            f"alone {alone.max():.1f} ms, p50 {np.median(alone):.1f}; longest call of step() "
            f"{called.max():.2f} ms; {len(times)} steps, {log.applied} increments"
        )
        yield Row(f"a step of {batch:,} ids beside appends of {changed:,} rows", "5 ms", 1, 5 / held, 1.0,
                  None, detail)  # fmt: skip


@register("serve-metrics")
def metrics_cost(run: Run) -> Iterator[Row]:
    import prometheus_client

    rows, batch = min(run.sizes.rows, 1_000_000), 16_384
    rng = np.random.default_rng(7)
    registry = prometheus_client.CollectorRegistry()
    table = filled(rows, 32)  # one for both sides: two of them differ by more than what is measured
    embstore.metrics.watch({"user": table}, registry)
    timer = embstore.metrics.StepTimer(registry)
    batches = [scatter(zipf_rows(rows, batch, rng)).numpy() for _ in range(16)]
    gradients = np.ones((batch, 32), np.float32)

    def train(number: int) -> None:
        table.find_or_insert(batches[number % 16])
        table.apply_gradients(batches[number % 16], gradients)

    def watched(number: int) -> None:
        with timer:
            train(number)
        if number % 200 == 0:  # somebody asks, far more often than every 15 seconds
            prometheus_client.generate_latest(registry)

    for count in run.threads:
        set_threads(count)
        without, with_ = interleave([Side(train), Side(watched)], run.sizes.rounds, 1, settle_seconds=0.0)
        detail = f"{with_ * 1e3:.3f} ms against {without * 1e3:.3f} ms"
        yield Row(f"a step of {batch:,} ids, watched", "the same, not watched", count, without / with_, 0.99,
                  None, detail)  # fmt: skip


@register("serve-open")
def open_large(run: Run) -> Iterator[Row]:
    rows = 100_000 if run.sizes.rows < 10**6 else 19_000_000
    with folder() as path:
        table = filled(rows)
        embstore.dump(path / "d", {"m": {"user": table}})
        del table
        for file in (path / "d").rglob("*_values"):
            file.read_bytes() if rows < 10**6 else subprocess.run(["cat", file], stdout=subprocess.DEVNULL)
        code = (
            "import sys, time; begin = time.perf_counter()\n"
            "from embstore.serving import Reader\n"
            "Reader(sys.argv[1], cache=sys.argv[2]).find('user', [1])\n"
            "print(time.perf_counter() - begin)"
        )
        size = sum(f.stat().st_size for f in (path / "d").rglob("*")) / 1e9
        for when in ("the first time on a host", "later"):
            command = [sys.executable, "-c", code, str(path / "d"), str(path / "cache")]
            found = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            work = f"a dump of {size:.1f} GB answers its first lookup, {when}"
            yield Row(work, "1 s", 2, 1 / found, 1.0, None, f"{found:.2f} s, imports included")


SITTER = """
import sys, numpy as np
from embstore.serving import Reader
reader = Reader(sys.argv[1], cache=sys.argv[2])
keys = np.load(sys.argv[3], mmap_mode="r")
for begin in range(0, len(keys), 10_000):
    reader.find("user", keys[begin : begin + 10_000])
print("ready", flush=True)
sys.stdin.read()
"""


def private_and_shared_bytes(pid: int) -> tuple[int, int]:
    """Memory of a process that no other has, and its pages of mapped files."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    anonymous = fields["Anonymous"]
    return anonymous, fields["Rss"] - anonymous


@register("serve-memory")
def memory(run: Run) -> Iterator[Row]:
    rows = min(run.sizes.rows, 4_000_000)
    with folder() as path:
        table = filled(rows)
        embstore.dump(path / "d", {"m": {"user": table}})
        np.save(path / "keys.npy", scatter(np.arange(rows)).numpy())
        arguments = [str(path / "d"), str(path / "cache"), str(path / "keys.npy")]
        readers = []
        for _ in range(4):
            reader = subprocess.Popen(
                [sys.executable, "-c", SITTER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
            readers.append(reader)
        found = [private_and_shared_bytes(reader.pid) for reader in readers]
        for reader in readers:
            reader.communicate(timeout=60)
        shared = max(of for _, of in found)
        one, four = found[0][0] + shared, sum(private for private, _ in found) + shared
        detail = f"{four / 1e9:.2f} GB for 4 readers, {one / 1e9:.2f} GB for one"
        yield Row("memory of four readers", "1.1 times one reader", 1, 1.1 * one / four, 1.0, None, detail)


CLIENT = """
import http.client, sys, time
port, seconds = int(sys.argv[1]), float(sys.argv[2])
body = open(sys.argv[3], "rb").read()
connection = http.client.HTTPConnection("127.0.0.1", port)
done, end = 0, time.perf_counter() + seconds
while time.perf_counter() < end:
    connection.request("POST", "/v1/lookup.bin", body)
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    done += 1
print(done)
"""


@register("serve-http")
def http(run: Run) -> Iterator[Row]:
    import httpx

    rows, ids, seconds = min(run.sizes.rows, 1_000_000), 4096, 1.0 if run.sizes.rows < 10**6 else 8.0
    with folder() as path:
        embstore.dump(path / "d", {"m": {"user": filled(rows)}})
        drawn = scatter(zipf_rows(rows, ids, np.random.default_rng(3))).numpy()
        (path / "body").write_bytes(pack_request({"user": drawn}))
        port = 8931
        settings = json.dumps({"path": str(path / "d"), "port": port, "workers": 2, "cache": str(path / "c")})
        code = "import sys, json; from embstore.serving.server import serve; serve(**json.loads(sys.argv[1]))"
        server = subprocess.Popen(
            [sys.executable, "-c", code, settings], env={**os.environ, "EMBSTORE_NUM_THREADS": "1"}
        )
        try:
            for _ in range(300):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/readyz").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            command = [sys.executable, "-c", CLIENT, str(port), str(seconds), str(path / "body")]
            clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            requests = sum(int(client.communicate(timeout=120)[0]) for client in clients)
        finally:
            server.terminate()
            server.wait(30)
        rate = requests * ids / seconds
        work = f"HTTP, binary, {ids} ids x dim 64 a request, 2 workers, 2 clients"
        yield Row(work, "1 M vectors/s", 2, rate / 1e6, 1.0, None, f"{rate / 1e6:.2f} M vectors/s")
