"""Redis servers that are replaced under load: behind a Sentinel and in a Cluster.

    python -m trust.failover                     10 rounds of each kind
    python -m trust.failover --kind cluster-kill --rounds 1

Threads write and read rows without a pause. In the middle a master hands over to its replica ("handover"), or
is killed and replaced ("kill"). A row tells its key and its version: what is read has to be whole, and not
newer than what was written. A call may raise ConnectionError within its limit, and succeeds later when made
again. Redis replicates in the background: a new master may lack rows that had not reached it, but none that
had. In the handover of a Cluster, which stops its clients meanwhile, nothing that was acknowledged is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import redis_server
from redis_server import RedisServer

KEYS_PER_THREAD, WRITERS, BATCH = 600, 2, 100
ROW_BYTES = 40  # key and version, and both again in reverse: a torn row shows
CALL_SECONDS = 1.0
RETRY_LIMIT = 2
MOST_CALL_SECONDS = 2 * CALL_SECONDS * RETRY_LIMIT + 8  # the machine may be busy
LOAD_SECONDS = 2.0  # before and after


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        # A server that changes its role closes its connections, redis-cli's among them.
        with contextlib.suppress(subprocess.CalledProcessError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def facts(server: RedisServer) -> dict[str, str]:
    """What INFO says of its replication."""
    lines = server.cli("info", "replication").splitlines()
    return dict(line.strip().split(":", 1) for line in lines if ":" in line)


class Pair:
    """A master, its replica and a Sentinel."""

    def __init__(self, folder: Path) -> None:
        self.servers = [RedisServer(folder / "master"), RedisServer(folder / "sentinel", sentinel=True)]
        self.master, self.sentinel = self.servers
        self.replica = RedisServer(folder / "replica", "--replicaof", "127.0.0.1", str(self.master.port))
        self.servers.append(self.replica)
        (self.sentinel.directory / "sentinel.conf").write_text(
            f"port {self.sentinel.port}\nbind 127.0.0.1\n"
            f"sentinel monitor rows 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds rows 1000\nsentinel failover-timeout rows 3000\n"
        )
        self.url = f"redis://{self.sentinel.where}/?sentinel=rows"

    def start(self) -> None:
        for server in (self.master, self.replica, self.sentinel):
            server.start()
        wait_until(lambda: facts(self.replica)["master_link_status"] == "up", "the replica does not connect")

        def known() -> bool:
            reply = self.sentinel.cli("sentinel", "master", "rows").splitlines()
            return reply[reply.index("num-slaves") + 1] == "1"

        wait_until(known, "the Sentinel does not find the replica")

    def pairs(self) -> list[tuple[RedisServer, RedisServer]]:
        return [(self.master, self.replica)]

    def hand_over(self) -> None:
        self.sentinel.cli("sentinel", "failover", "rows")

    def kill(self) -> None:
        self.master.kill()

    def replaced(self) -> bool:
        return facts(self.replica)["role"] == "master"


class Cluster:
    """Three masters with a replica each; the first is replaced."""

    def __init__(self, folder: Path) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        self.servers = [RedisServer(folder / f"node-{i}", *options) for i in range(6)]
        self.url = f"redis://{self.servers[1].where},{self.servers[2].where}/?cluster=1"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        redis_server.form_cluster(self.servers, replicas=1)
        wait_until(lambda: len(self._found_pairs()) == 3, "the replicas do not connect")
        self._pairs = self._found_pairs()
        self.master, self.replica = self._pairs[0]

    def _found_pairs(self) -> list[tuple[RedisServer, RedisServer]]:
        by_port = {str(server.port): server for server in self.servers}
        found = []
        for server in self.servers:
            about = facts(server)
            if about["role"] == "slave" and about["master_link_status"] == "up":
                found.append((by_port[about["master_port"]], server))
        return found

    def pairs(self) -> list[tuple[RedisServer, RedisServer]]:
        return self._pairs

    def hand_over(self) -> None:
        self.replica.cli("cluster", "failover")

    def kill(self) -> None:
        self.master.kill()

    def replaced(self) -> bool:
        return facts(self.replica)["role"] == "master"


def rows_of(keys: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """(n, ROW_BYTES)"""
    words = np.stack([keys, versions, keys * 31 + versions, versions, keys], axis=1)
    return words.astype(np.int64).view(np.uint8).reshape(len(keys), ROW_BYTES)


class Load:
    """Threads that write versions of their own keys and read all of them. `errors` are broken promises."""

    def __init__(self, url: str) -> None:
        from embstore.stores.redis.store import RedisStore

        options = f"timeout={CALL_SECONDS}s&retry_limit={RETRY_LIMIT}&prefix=f"
        self._keys = np.arange(KEYS_PER_THREAD * WRITERS) * 7919 - 1_000_000
        self.tried = np.zeros(len(self._keys), np.int64)  # the newest version that was sent
        self.acknowledged = np.zeros(len(self._keys), np.int64)
        self.calls = self.raised = 0
        self.errors: list[str] = []
        self._store = self._call(  # on a busy machine, servers may not answer in time
            lambda: RedisStore(f"{url}&{options}", table="t", tensor_bytes=[ROW_BYTES])
        )
        self._end = threading.Event()
        works = [*(lambda w=w: self._write(w) for w in range(WRITERS)), self._read]
        self._threads = [threading.Thread(target=self._checked, args=(work,)) for work in works]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _checked(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _call(self, call: Callable[[], Any]) -> Any:
        """Until it succeeds."""
        for _ in range(100):
            begin = time.monotonic()
            try:
                self.calls += 1
                return call()
            except ConnectionError as error:
                self.raised += 1
                seconds = time.monotonic() - begin
                if seconds > MOST_CALL_SECONDS:
                    self.errors.append(f"a call raises after {seconds:.1f} s: {error}")
        raise AssertionError("100 calls failed one after the other")

    def _write(self, writer: int) -> None:
        rng = np.random.default_rng(writer)
        own = np.arange(KEYS_PER_THREAD) + writer * KEYS_PER_THREAD
        while not self._end.is_set():
            at = rng.choice(own, BATCH, replace=False)
            self.tried[at] += 1
            rows = rows_of(self._keys[at], self.tried[at])
            scores = np.ones(BATCH, np.uint64)
            self._call(lambda: self._store.put(self._keys[at], rows, scores))  # noqa: B023
            self.acknowledged[at] = self.tried[at]

    def _read(self) -> None:
        while not self._end.is_set():
            self.versions()

    def versions(self) -> np.ndarray:
        """The version of every key; 0 where there is no row."""
        rows, _, found = self._call(lambda: self._store.get(self._keys))
        versions = np.where(found, np.ascontiguousarray(rows).view(np.int64)[:, 1], 0)
        whole = (rows == rows_of(self._keys, versions)).all(axis=1) | ~found
        assert whole.all(), f"the row of {self._keys[~whole][0]} is torn"
        newer = versions > self.tried
        assert not newer.any(), f"the row of {self._keys[newer][0]} was never written"
        return versions


def replicated(load: Load, servers: Pair | Cluster) -> np.ndarray:
    """Versions that every replica has by now."""
    versions = load.acknowledged.copy()
    for master, replica in servers.pairs():
        offset = int(facts(master)["master_repl_offset"])
        wait_until(
            lambda: int(facts(replica)["master_repl_offset"]) >= offset,  # noqa: B023
            "the replica does not follow",
        )
    return versions


def round_of(kind: str, folder: Path) -> str:
    """Raises AssertionError where a promise is broken."""
    servers: Pair | Cluster = (Pair if kind.startswith("sentinel") else Cluster)(folder)
    try:
        servers.start()
        load = Load(servers.url)
        load.start()
        try:
            time.sleep(LOAD_SECONDS)
            safe = replicated(load, servers)
            begin = time.monotonic()
            if kind.endswith("kill"):
                servers.kill()
            else:
                servers.hand_over()
            wait_until(servers.replaced, "the replica is not promoted")
            seconds = time.monotonic() - begin
            before = load.acknowledged.sum()
            wait_until(lambda: load.acknowledged.sum() > before, "writes do not go on")
            time.sleep(LOAD_SECONDS)
        finally:
            load.stop()
        assert not load.errors, load.errors
        if kind == "cluster-handover":
            safe = load.acknowledged
        versions = load.versions()
        lost = versions < safe
        assert not lost.any(), f"{lost.sum()} rows that were safe are lost"
        missing = int((versions < load.acknowledged).sum())
        return (
            f"replaced after {seconds:.1f} s; {load.calls} calls, {load.raised} raised, {missing} rows had "
            "not reached the replica"
        )
    finally:
        for server in servers.servers:
            server.stop()


KINDS = ("sentinel-handover", "sentinel-kill", "cluster-handover", "cluster-kill")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    if redis_server.MISSING:
        print(f"skipped: {redis_server.MISSING}")
        return 0
    broken = 0
    for kind in options.kind or KINDS:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    told = round_of(kind, Path(folder))
                except AssertionError as error:
                    broken, told = broken + 1, f"BROKEN: {error}"
            print(f"{kind:<19}{told}", flush=True)
    print(f"{broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
