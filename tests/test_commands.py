"""The command `embstore` as a person starts it: its version, the doctor and the server."""

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from ports import free_port

import embstore

COMMAND = str(Path(sys.executable).with_name("embstore"))
KEYS = np.array([0, -1, 7, 2**63 - 1, -(2**63)], np.int64)


def run(*arguments, code=0, **options):
    command = [COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def dumped(tmp_path):
    table = embstore.Table("user", dim=3, optimizer=embstore.SGD(lr=0.5))
    table.find_or_insert(KEYS)
    embstore.dump(tmp_path / "dump", {"model": {"user": table}})
    return tmp_path / "dump", table


@contextlib.contextmanager
def started(path, tmp_path, *options):
    """A server that was started by the command, and its port."""
    port = free_port()
    process = subprocess.Popen(
        [COMMAND, "serve", str(path), "--port", str(port), *map(str, options)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    try:
        yield process, port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()


@contextlib.contextmanager
def serving(path, tmp_path, *options):
    """What a server says in JSON when it starts, and its port."""
    with started(path, tmp_path, "--json", *options) as (process, port):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line), port


def lookup(url, ids, token=""):
    """The answer to a lookup, as soon as the server listens."""
    body = json.dumps({"tables": {"user": [str(i) for i in ids]}}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    for _ in range(600):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/lookup", body, headers)) as answer:
                return json.load(answer)["tables"]["user"]
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


def test_version_is_that_of_the_installed_package():
    assert run("--version").stdout == f"embstore {importlib.metadata.version('embstore')}\n"


def test_the_doctor_says_what_is_here(tmp_path):
    facts = json.loads(run("doctor", "--json", cwd=tmp_path).stdout)
    assert facts["embstore"] == embstore.__version__ and facts["python"] == platform.python_version()
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert facts["instruction_set"] == embstore.isa()
    assert facts["cores"] == len(os.sched_getaffinity(0)) and facts["threads"] >= 1
    assert 0 < facts["available_memory_bytes"] <= facts["memory_bytes"]
    assert facts["free_disk_bytes"] > 0 and facts["lookup"]["keys_per_second"] > 0
    assert facts["extras"]["serve"] == [] and "dev" not in facts["extras"]


def test_the_doctor_reports_the_threads_that_the_environment_asks_for():
    environment = {**os.environ, "EMBSTORE_NUM_THREADS": "1"}
    assert json.loads(run("doctor", "--json", env=environment).stdout)["threads"] == 1


def test_the_doctor_fits_80_columns():
    lines = run("doctor").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    named = {line[:16].strip() for line in lines}
    assert named >= {"embstore", "Python", "numpy", "torch", "memory", "disk", "extras", "lookup"}


def test_a_missing_package_is_listed_with_its_extra(monkeypatch):
    from embstore.cli import doctor

    real = importlib.metadata.version

    def version(name):
        if name in ("redis", "fbgemm-gpu-cpu", "torchrec"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    facts = doctor.examine()
    assert facts["extras"]["redis"] == ["redis"]
    assert facts["extras"]["torchrec"] == ["fbgemm-gpu-cpu"]
    assert facts["packages"]["torchrec"] is None
    lines = doctor.lines(facts)
    assert "torchrec         not installed" in lines
    assert "missing extras   torchrec, redis" in lines


@pytest.mark.multirank
@pytest.mark.parametrize("workers", [1, 2])
def test_serve_answers_what_was_dumped(dumped, tmp_path, workers):
    path, table = dumped
    with serving(path, tmp_path, "--workers", workers) as (said, port):
        assert said["url"] == f"http://127.0.0.1:{port}" and said["workers"] == workers
        answer = lookup(said["url"], [*KEYS.tolist(), 5])
    assert answer["found"] == [True] * len(KEYS) + [False]
    np.testing.assert_array_equal(np.float32(answer["vectors"][:-1]), table.find(KEYS)[0])


@pytest.mark.multirank
def test_serve_says_where_it_listens_in_two_lines(dumped, tmp_path):
    with started("dump", tmp_path) as (process, port):
        assert process.stdout.readline() == "serving dump\n"
        assert process.stdout.readline() == f"http://127.0.0.1:{port}  (Ctrl-C stops)\n"
        assert lookup(f"http://127.0.0.1:{port}", [7])["found"] == [True]


@pytest.mark.multirank
def test_serve_keeps_rows_small_and_asks_for_the_token(dumped, tmp_path):
    path, table = dumped
    (tmp_path / "token").write_text("secret\n")
    with serving(path, tmp_path, "--dtype", "float16", "--token-file", tmp_path / "token") as (said, _):
        answer = lookup(said["url"], KEYS.tolist(), "secret")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            lookup(said["url"], KEYS.tolist(), "guess")
    expected = table.find(KEYS)[0].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.float32(answer["vectors"]), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--port", "0"], "--port should be an integer between 1 and 65535 but is: 0"),
        (["--workers", "0"], "--workers should be an integer between 1 and 1024 but is: 0"),
        (
            ["--dtype", "int4"],
            "dtype should be one of 'float32', 'float16', 'bfloat16', 'int8' but is: 'int4'",
        ),
        (["--token-file", "nothing"], "No such file or directory: 'nothing'"),
        (["--token-file", "empty"], "token_file should hold a token but is empty: empty"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8200 cannot be used: Cannot assign"),
    ],
)
def test_serve_refuses_wrong_options_in_one_line(dumped, tmp_path, options, reason):
    (tmp_path / "empty").write_text("\n")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = run("serve", dumped[0], *options, code=2, cwd=tmp_path, env=environment)
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_serve_says_that_its_port_is_taken(dumped, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = run("serve", dumped[0], "--port", port, code=2, env=environment)
    assert done.stderr == f"error: --host 127.0.0.1 --port {port} cannot be used: Address already in use\n"


def test_serve_of_nothing_is_one_line(tmp_path):
    done = run("serve", tmp_path / "nothing", code=2)
    assert str(tmp_path / "nothing") in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client", "swagger_ui_bundle"])
def test_serve_without_its_extra_says_what_to_install(dumped, package):
    program = f"import sys; sys.modules[{package!r}] = None; from embstore.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(dumped[0])], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"error: this needs {package}: pip install 'embstore[serve]'\n"
