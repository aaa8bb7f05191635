"""What a parameter server costs: ids to slots, and rows to and from a store.

ps-slots    ids of a zipf(1.05) over ten times as many ids as slots, with eviction, one thread, against
            40 M ids/s; and the longest batch, against 5 ms
ps-memory   rows of dim 64 with one state, pushed and pulled over memory://, against 3 M rows/s; the first
            round, which takes fresh pages from the system, is not counted
ps-redis    the same over a redis-server of our own on the loopback interface, against what redis-benchmark
            reaches with the same bytes right before: MSET and MGET for the packed layout, pipelined SET and
            GET for the compatible one; with a few keys that stay in the server's cache, and for information
            with random ones out of as many as we move, which the server has to fetch from memory, like ours

A ratio above 1 means faster than that. Times of the slots are those of the processor, which others on the
machine lengthen less than the clock on the wall.
"""

import csv
import io
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import embstore
from embstore.stores.urls import open_store

from .ids import scatter, zipf_rows
from .registry import Row, Run, register

WANTED_IDS, WANTED_STALL = 40e6, 0.005
WANTED_ROWS = 3e6
DIM = 64
TENSORS = [4 * DIM, 4 * DIM]


@register("ps-slots")
def slots(run: Run) -> Iterator[Row]:
    quick = run.sizes.limit_keys < 10**6
    count, batch, batches = (100_000, 16_384, 60) if quick else (1_000_000, 65_536, 400)
    ids = scatter(zipf_rows(10 * count, batch * batches, np.random.default_rng(5))).numpy().reshape(-1, batch)
    embstore.set_num_threads(1)
    window = embstore.SlotMap(count)
    seconds = []
    for number, keys in enumerate(ids):
        begin = time.thread_time()
        window.find(keys, number)
        if window.missing > window.free_slots:
            window.victims(window.missing - window.free_slots, number)
            window.drop()
        window.admit()
        seconds.append(time.thread_time() - begin)
    rate = batch * batches / sum(seconds)
    work = f"ids to slots with eviction, {count:,} slots"
    yield Row(work, "40 M ids/s", 1, rate / WANTED_IDS, 1.0, 1.5, f"{rate / 1e6:.1f} M ids/s")
    settled = max(seconds[len(seconds) // 4 :])  # the first batches touch fresh pages
    yield Row(work, "no batch above 5 ms", 1, WANTED_STALL / settled, 1.0, None, f"{settled * 1e3:.1f} ms")


def move(url: str, keys: np.ndarray, layout: str = "compatible", rounds: int = 7) -> tuple[float, float]:
    """Median rows a second of put and of get."""
    store = open_store(url, table="bench", tensor_bytes=TENSORS, layout=layout)
    rows = np.random.default_rng(0).integers(0, 256, (len(keys), sum(TENSORS)), np.uint8)
    scores = np.ones(len(keys), np.uint64)
    put, get = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        store.put(keys, rows, scores)
        middle = time.perf_counter()
        found = store.get(keys)[2]
        get.append(time.perf_counter() - middle)
        put.append(middle - begin)
        if not found.all():
            raise RuntimeError("the store lost rows")
    return len(keys) / statistics.median(put), len(keys) / statistics.median(get)


@register("ps-memory")
def memory(run: Run) -> Iterator[Row]:
    """As the loader does it: rows are gathered from a weight and its state, and scattered to other slots."""
    import torch

    from torchrec_dynamic_embedding.ps import PS

    count = 20_000 if run.sizes.limit_keys < 10**6 else 200_000
    weight, state = torch.rand(count, DIM), torch.rand(count, DIM)
    ps = PS("bench", [weight, state], "memory://benchmark")
    pairs = np.stack([scatter(np.arange(count)).numpy(), np.random.default_rng(0).permutation(count)], 1)
    for threads in run.threads:
        embstore.set_num_threads(threads)
        push, pull = [], []
        for _ in range(7):
            begin = time.perf_counter()
            ps.push(pairs)
            middle = time.perf_counter()
            ps.pull(pairs, None)
            pull.append(time.perf_counter() - middle)
            push.append(middle - begin)
        for name, seconds in (("push", push[1:]), ("pull", pull[1:])):
            rate = count / statistics.median(seconds)
            detail = f"{rate / 1e6:.2f} M rows/s"
            work = f"{name} over memory://, dim {DIM}, one state"
            yield Row(work, "3 M rows/s", threads, rate / WANTED_ROWS, 1.0, None, detail)


@contextmanager
def server() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        command = [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            directory,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


def ceiling(port: int, keys: int, requests: int, pipeline: int, *command: str) -> float:
    """Commands a second of redis-benchmark with one client, over this many keys."""
    options = ["-p", str(port), "-r", str(keys), "-n", str(requests), "-c", "1", "-P", str(pipeline), "--csv"]
    output = subprocess.run(
        ["redis-benchmark", *options, *command], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    return float(next(csv.DictReader(io.StringIO(output)))["rps"])


@register("ps-redis")
def redis(run: Run) -> Iterator[Row]:
    if shutil.which("redis-server") is None:
        raise RuntimeError("redis-server is not installed")
    count, keys_a_command = (5_000, 100) if run.sizes.limit_keys < 10**6 else (60_000, 100)
    keys = scatter(np.arange(count)).numpy()
    with server() as port:
        row, tensor = "x" * (sum(TENSORS) + 8), "x" * TENSORS[0]
        many = 4 * count // keys_a_command  # reaches nearly all keys, so that MGET finds them

        def packed(command: str, *value: str) -> list[float]:
            """Rows a second with few keys and with random ones."""
            few = [text for number in range(keys_a_command) for text in (f"few:{number}", *value)]
            random = ["packed:__rand_int__", *value] * keys_a_command
            return [keys_a_command * ceiling(port, count, many, 4, command, *k) for k in (few, random)]

        def single(command: str, *value: str) -> list[float]:
            names = "few:0", "single:__rand_int__"
            return [ceiling(port, count, 4 * count, 100, command, n, *value) / len(TENSORS) for n in names]

        limits = {
            "packed": (packed("MSET", row), packed("MGET")),
            "compatible": (single("SET", tensor), single("GET")),
        }
        for layout, wanted, against in (
            ("packed", 0.75, ("MSET", "MGET")),
            ("compatible", 0.5, ("SET", "GET")),
        ):
            url = f"redis://127.0.0.1:{port}/?prefix=bench-{layout}"
            rates = move(url, keys, layout, rounds=3)
            for name, rate, (few, random), command in zip(("put", "get"), rates, limits[layout], against):
                work = f"redis {layout}, {name}, dim {DIM}, one state"
                for limit, least, keys_ in ((max(few, random), wanted, ""), (random, None, ", random keys")):
                    detail = f"ours {rate / 1e3:.0f}, theirs {limit / 1e3:.0f} k rows/s"
                    yield Row(work, f"redis-benchmark {command}{keys_}", 1, rate / limit, least, None, detail)
