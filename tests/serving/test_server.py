"""The HTTP server over a real socket: answers, limits, hostile clients, workers, the page in a browser."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from ports import free_port

import embstore
from embstore.serving.wire import WireError, pack_request, unpack_request, unpack_response

pytestmark = pytest.mark.multirank
KEYS = np.array([0, -1, 7, 2**63 - 1, -(2**63), *range(100, 423)], np.int64)
SERVE = "import sys, json; from embstore.serving.server import serve; serve(**json.loads(sys.argv[1]))"


def trained(name="user", dim=5):
    made = embstore.Table(name, dim=dim, optimizer=embstore.SGD(lr=0.5), score_strategy="step")
    made.find_or_insert(KEYS)
    return made


@contextlib.contextmanager
def serving(path, tmp_path, **settings):
    port = free_port()
    settings = {"path": os.fspath(path), "port": port, "cache": os.fspath(tmp_path / "cache"), **settings}
    process = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(settings)], stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz").status_code == 200:
                    break
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.1)
        else:
            raise AssertionError("the server did not start")
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def log_and_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    tables = {"a": {"user": trained()}, "b": {"item": trained("item", 3)}}
    log = embstore.IncrementLog.create(folder / "log", tables)
    limits = {"max_body_bytes": 100_000, "max_ids": 5000, "timeout_seconds": 1.0}
    with serving(folder / "log", folder, **limits) as (url, _):
        yield log, tables, url


def binary(url, ids):
    response = httpx.post(f"{url}/v1/lookup.bin", content=pack_request(ids))
    assert response.status_code == 200, response.text
    return unpack_response(response.content)


def test_no_ids_have_an_answer_without_vectors(log_and_server):
    _, _, url = log_and_server
    _, _, answers = binary(url, {"user": np.empty(0, np.int64), "item": np.array([7])})
    assert [(vectors.shape, found.shape) for vectors, found in answers] == [((0, 5), (0,)), ((1, 3), (1,))]


def test_both_forms_answer_as_the_tables_and_follow_the_log(log_and_server):
    log, tables, url = log_and_server
    user, item = tables["a"]["user"], tables["b"]["item"]
    for round_ in range(2):
        ids = {"user": np.concatenate([KEYS, [99]]), "b/item": KEYS[:7]}
        state, _, answers = binary(url, ids)
        for made, wanted, (vectors, found) in zip((user, item), ids.values(), answers):
            np.testing.assert_array_equal(vectors, made.find(wanted)[0])
            np.testing.assert_array_equal(found, made.find(wanted)[1])
        body = {"tables": {"user": [7, "-9223372036854775808", 99], "item": []}}
        answer = httpx.post(f"{url}/v1/lookup", json=body).json()
        assert answer["state"] == state and answer["tables"]["item"] == {"vectors": [], "found": []}
        assert answer["tables"]["user"]["found"] == [True, True, False]
        expected = user.find([7, -(2**63), 99])[0]
        np.testing.assert_array_equal(np.float32(answer["tables"]["user"]["vectors"]), expected)
        if round_ == 0:
            user.apply_gradients(KEYS, np.ones((len(KEYS), 5), np.float32))
            number = log.append(tables)
            for _ in range(200):
                if httpx.get(f"{url}/readyz").json()["state"] == number:
                    break
                time.sleep(0.05)
    ready = httpx.get(f"{url}/readyz")
    assert ready.status_code == 200 and ready.json()["error"] is None and ready.json()["age_seconds"] < 1000
    metrics = httpx.get(f"{url}/metrics").text
    assert f"embstore_state_number {float(number)}" in metrics
    assert 'embstore_rows{table="a/user"} 328.0' in metrics
    assert 'embstore_lookup_missing_ids_total{table="user"}' in metrics


BAD = [
    ("/v1/lookup", b"not json", 422, "JSON"),
    ("/v1/lookup", b'{"tables": {"user": [1.5]}}', 422, "integer"),
    ("/v1/lookup", b'{"tables": {"user": ["x"]}}', 422, "integers of 64 bits"),
    ("/v1/lookup", b'{"tables": {"user": [9223372036854775808]}}', 422, "integers of 64 bits"),
    ("/v1/lookup", b'{"tables": {"nobody": [1]}}', 404, "a/user, b/item, item, user but is: 'nobody'"),
    ("/v1/lookup", b'{"tables": {"user": [' + b",".join([b"1"] * 5001) + b"]}}", 413, "at most 5000 ids"),
    ("/v1/lookup", b"[" * 90_000, 422, "should be JSON"),
    ("/v1/lookup", b"\xff", 422, "should be JSON"),
    ("/v1/lookup", b"[1]", 422, "should be {"),
    ("/v1/lookup", b'{"tables": [1]}', 422, "should be {"),
    ("/v1/lookup", b'{"tables": {"user": 7}}', 422, "should be {"),
    ("/v1/lookup", b'{"tables": {"user": [7, null]}}', 422, "an integer or a string but is: None"),
    ("/v1/lookup", b'{"tables": {"user": [true]}}', 422, "an integer or a string but is: True"),
    ("/v1/lookup", b'{"tables": {"user": [' + b"9" * 5000 + b"]}}", 422, "should be JSON"),
    ("/v1/lookup", b" " * 100_001, 413, "at most 100000 bytes"),
    ("/v1/lookup.bin", b"", 422, "the number of tables"),
    ("/v1/lookup.bin", struct.pack("<I", 2**32 - 1), 422, "the head of table 0"),
    ("/v1/lookup.bin", struct.pack("<III", 1, 2**32 - 1, 0), 422, "the name of table 0"),
    ("/v1/lookup.bin", struct.pack("<III4s", 1, 4, 2**32 - 1, b"user"), 422, "the ids of 'user'"),
    ("/v1/lookup.bin", struct.pack("<III1s", 1, 1, 0, b"\xff"), 422, "UTF-8"),
    ("/v1/lookup.bin", pack_request({"user": KEYS}) + b"x", 422, "should end"),
    ("/nowhere", b"", 404, "Not Found"),
]


@pytest.mark.parametrize("route, body, status, part", BAD)
def test_a_bad_request_gets_a_status_and_a_reason(log_and_server, route, body, status, part):
    url = log_and_server[2]
    response = httpx.post(url + route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status and part in response.text
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_slow_and_broken_clients_do_not_hold_the_server(log_and_server):
    _, _, url = log_and_server
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    head = b"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"
    slow = [socket.create_connection(address, timeout=20) for _ in range(20)]
    for client in slow:
        client.sendall(head + b"{")
    chunked = socket.create_connection(address, timeout=20)
    chunked.sendall(b"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    with contextlib.suppress(OSError):
        for _ in range(4):
            chunked.sendall(b"%x\r\n%s\r\n" % (30_000, b" " * 30_000))
    gone = socket.create_connection(address, timeout=20)
    gone.sendall(head)
    gone.close()
    assert binary(url, {"user": KEYS[:3]})[2][0][1].all()  # while they wait
    assert b"413" in chunked.recv(4096)
    for client in slow:
        assert b"408" in client.recv(4096)
        client.close()
    chunked.close()


def test_a_token_is_asked_for_and_workers_share_a_log(tmp_path):
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}})
    (tmp_path / "token").write_text("s3cret\n")
    with serving(tmp_path / "d", tmp_path, workers=2, token_file=os.fspath(tmp_path / "token")) as (url, _):
        body = pack_request({"user": KEYS})
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.post(f"{url}/v1/lookup.bin", content=body, headers=headers).status_code == 401
            assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer s3cret"}
        for _ in range(10):
            answer = httpx.post(f"{url}/v1/lookup.bin", content=body, headers=right)
            np.testing.assert_array_equal(unpack_response(answer.content)[2][0][0], user.find(KEYS)[0])
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_path_without_tables_fails_before_a_server_starts(tmp_path):
    command = [
        sys.executable,
        "-c",
        SERVE,
        json.dumps({"path": os.fspath(tmp_path / "none"), "port": free_port()}),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "path should be the folder of a dump" in done.stderr


def test_requests_survive_the_round_trip():
    ids = {"user": KEYS, "a/b": np.empty(0, np.int64), "ü": np.array([5])}
    again = unpack_request(pack_request(ids))
    assert list(again) == list(ids)
    for name in ids:
        np.testing.assert_array_equal(again[name], ids[name])
    with pytest.raises(WireError, match="comes twice"):
        unpack_request(struct.pack("<I", 2) + 2 * (struct.pack("<II", 1, 0) + b"u"))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_api_page_works_in_a_browser_without_internet(log_and_server, tmp_path):
    url = log_and_server[2]
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=15000", "--enable-logging=stderr",
        "--dump-dom", f"{url}/docs",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "/v1/lookup.bin" in done.stdout and "/readyz" in done.stdout
    assert "//" not in httpx.get(f"{url}/docs").text.replace("<!--", "")  # no other host is named
    assert "CONSOLE" not in done.stderr, done.stderr


def test_the_client_of_the_guide_reads_what_the_server_sends(log_and_server):
    _, tables, url = log_and_server
    guide = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```python\n# client\n(.*?)```", guide, re.S)
    names = {}
    exec(code, names)
    _, answer = names["lookup"](url, {"user": KEYS, "item": [7, 99]})
    np.testing.assert_array_equal(answer["user"][0], tables["a"]["user"].find(KEYS)[0])
    assert answer["item"][1].tolist() == [True, False]
