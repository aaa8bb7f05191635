"""Real Redis servers for tests: on free ports of the loopback interface, stopped whatever happens."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port

MISSING = None if shutil.which("redis-server") else "redis-server is not installed (make setup tries to)"


class RedisServer:
    """One redis-server in its own directory. `where` is host:port."""

    def __init__(self, directory: Path, *options: str, port: int | None = None, sentinel: bool = False):
        self.directory = directory
        self.port = port or free_port()
        self.options = options
        self.sentinel = sentinel
        self.process: subprocess.Popen | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def where(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        command = ["redis-server"]
        if self.sentinel:
            command += [str(self.directory / "sentinel.conf"), "--sentinel"]
        else:
            plain = [] if "--tls-port" in self.options else ["--port", str(self.port)]
            command += [*plain, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            command += ["--dir", str(self.directory), *self.options]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return self
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.stop()
                raise RuntimeError(
                    f"redis-server did not start: {(self.directory / 'log').read_text()[-800:]}"
                )
            time.sleep(0.02)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        """kill -9, as a machine that loses its power."""
        self.process.kill()
        self.process.wait(10)

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)

    def cli(self, *arguments):
        command = ["redis-cli", "-p", str(self.port), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def form_cluster(nodes, replicas=0):
    """Makes running servers with `--cluster-enabled yes` one cluster, with replicas for each master."""
    create = ["redis-cli", "--cluster", "create", *(node.where for node in nodes)]
    subprocess.run(
        [*create, "--cluster-replicas", str(replicas), "--cluster-yes"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    deadline = time.monotonic() + 30
    while not all("cluster_state:ok" in node.cli("cluster", "info") for node in nodes):
        assert time.monotonic() < deadline, "the cluster did not form"
        time.sleep(0.1)
