"""The Redis store against a dict, over real servers: standalone, with a password, TLS, Sentinel, Cluster."""

import signal
import subprocess
import time

import numpy as np
import pytest
import redis_server
from ports import free_port

import embstore
from embstore import stores
from embstore.stores.redis.store import RedisStore
from embstore.stores.urls import open_store, tiers

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING)),
]
SIZES = [12, 4]
PASSWORD = "pass%40word-of-the-store"  # "@" as a URL writes it
PLAIN_PASSWORD = "pass@word-of-the-store"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    running = []

    def start(*options, **more):
        running.append(redis_server.RedisServer(tmp_path_factory.mktemp("redis"), *options, **more))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def standalone(start):
    return f"redis://{start().start().where}/?"


@pytest.fixture(scope="module")
def protected(start):
    server = start("--requirepass", PLAIN_PASSWORD).start()
    return f"redis://default:{PASSWORD}@{server.where}/2?"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) that sign themselves."""
    directory = tmp_path_factory.mktemp("certificates")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + [
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key


def tls_server(start, certificate, *more):
    port = free_port()
    options = ("--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificate[0]))
    options += ("--tls-key-file", str(certificate[1]), "--tls-ca-cert-file", str(certificate[0]))
    return start(*options, "--tls-auth-clients", "no", *more, port=port).start()


@pytest.fixture(scope="module")
def encrypted(start, certificate):
    return f"rediss://{tls_server(start, certificate).where}/?ca_file={certificate[0]}&"


@pytest.fixture(scope="module")
def cluster(start):
    nodes = [start("--cluster-enabled", "yes", "--cluster-node-timeout", "2000").start() for _ in range(3)]
    redis_server.form_cluster(nodes)
    return f"redis://{nodes[0].where},{nodes[1].where}/?cluster=1&"


@pytest.fixture(scope="module")
def sentinel(start):
    master = start().start()
    watcher = start(sentinel=True)
    (watcher.directory / "sentinel.conf").write_text(
        f"port {watcher.port}\nbind 127.0.0.1\nsentinel monitor rows 127.0.0.1 {master.port} 1\n"
    )
    watcher.start()
    return f"redis://{watcher.where}/?sentinel=rows&"


@pytest.fixture(scope="module")
def protected_sentinel(start, certificate):
    """Servers and Sentinels with TLS and passwords of their own."""
    master = tls_server(start, certificate, "--requirepass", PLAIN_PASSWORD, "--tls-replication", "yes")
    watcher = start(sentinel=True)
    (watcher.directory / "sentinel.conf").write_text(
        f"port 0\ntls-port {watcher.port}\nbind 127.0.0.1\ntls-auth-clients no\ntls-replication yes\n"
        f"tls-cert-file {certificate[0]}\ntls-key-file {certificate[1]}\ntls-ca-cert-file {certificate[0]}\n"
        f"requirepass of-the-sentinel\nsentinel monitor rows 127.0.0.1 {master.port} 1\n"
        f"sentinel auth-pass rows {PLAIN_PASSWORD}\n"
    )
    watcher.start()
    return (
        f"rediss://:{PASSWORD}@{watcher.where}/?sentinel=rows&sentinel_password=of-the-sentinel"
        f"&ca_file={certificate[0]}&"
    )


PLACES = ["standalone", "protected", "encrypted", "cluster", "sentinel", "protected_sentinel"]
NUMBER = iter(range(10**6))


def fresh(url, **options):
    options = {"table": "emb.t", "tensor_bytes": SIZES, **options}
    return RedisStore(f"{url}prefix=p{next(NUMBER)}", **options)


@pytest.mark.parametrize("layout", ["compatible", "packed"])
@pytest.mark.parametrize("place", PLACES)
def test_it_behaves_as_a_dict(place, layout, request):
    url = request.getfixturevalue(place)
    store = fresh(f"{url}layout={layout}&chunk_size=31&num_threads=3&")
    rng = np.random.default_rng(1)
    universe = rng.integers(-(2**63), 2**63 - 1, 90)
    universe[:4] = [np.iinfo(np.int64).min, -1, 2**32 + 5, 5]
    oracle = {}
    for n in (1, 7, 0, 60):
        keys = rng.choice(universe, n, replace=False)
        rows = rng.integers(0, 256, (n, 16), np.uint8)
        scores = rng.integers(1, 2**63, n).astype(np.uint64)
        store.put(keys, rows, scores)
        oracle |= {int(k): (r.tobytes(), int(s)) for k, r, s in zip(keys, rows, scores)}
        gone = rng.choice(universe, 3, replace=False)
        store.erase(gone)
        for key in gone:
            oracle.pop(int(key), None)
        got, got_scores, found = store.get(universe)
        assert found.tolist() == [int(k) in oracle for k in universe]
        assert store.contains(universe).tolist() == found.tolist()
        for key, row, score, there in zip(universe, got, got_scores, found):
            if there:
                assert row.tobytes() == oracle[int(key)][0]
                assert layout == "compatible" or score == oracle[int(key)][1]
    scanned = {int(k): r.tobytes() for keys, rows, _ in store.scan() for k, r in zip(keys, rows)}
    assert scanned == {key: row for key, (row, _) in oracle.items()}
    assert len(store) == len(oracle)
    store.clear()
    assert len(store) == 0


def test_the_compatible_layout_has_the_keys_of_the_original(start):
    server = start().start()
    store = RedisStore(
        f"redis://{server.where}/?prefix=model", table="emb1.t0", tensor_bytes=[8, 8], layout="compatible"
    )
    rows = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], "<f4").view(np.uint8)
    store.put(np.array([7, 2**32 + 5]), rows, np.ones(2, np.uint64))
    assert sorted(server.cli("keys", "*").split()) == [
        "model_table_emb1.t0_gid_4294967301_cid_0_osid_0",
        "model_table_emb1.t0_gid_4294967301_cid_0_osid_1",
        "model_table_emb1.t0_gid_7_cid_0_osid_0",
        "model_table_emb1.t0_gid_7_cid_0_osid_1",
    ]
    assert server.cli("strlen", "model_table_emb1.t0_gid_7_cid_0_osid_1") == "8"


def test_a_wrong_password_of_the_sentinels_is_not_shown(protected_sentinel):
    with pytest.raises((PermissionError, ConnectionError)) as info:
        fresh(protected_sentinel.replace("of-the-sentinel", "hidden-word") + "timeout=2s&retry_limit=1&")
    assert "hidden-word" not in str(info.value)


@pytest.mark.parametrize("place", ["protected", "encrypted", "cluster"])
def test_a_password_is_never_shown(place, request, caplog):
    url = request.getfixturevalue(place)
    host = url.rpartition("@")[2].partition("//")[2] or url.rpartition("@")[2]
    wrong = f"redis{'s' * (place == 'encrypted')}://me:hidden-word@{host}timeout=2s&"
    with pytest.raises((PermissionError, ConnectionError, RuntimeError)) as info:
        fresh(wrong)
    shown = "".join(map(str, (info.value, info.value.__cause__, info.value.__context__, caplog.text)))
    assert "hidden-word" not in shown
    store = fresh(url)
    assert PLAIN_PASSWORD not in repr(store) and PASSWORD not in repr(store)


def test_a_wrong_password_is_not_tried_again(protected):
    begin = time.monotonic()
    with pytest.raises(PermissionError):
        fresh(protected.replace(PASSWORD, "wrong") + "timeout=20s&")
    assert time.monotonic() - begin < 10


def test_a_certificate_that_nobody_signed_is_refused(encrypted):
    with pytest.raises(ConnectionError, match="[Cc]ertificate"):
        fresh(encrypted.partition("?")[0] + "?timeout=1s&retry_limit=1&")
    fresh(encrypted.partition("?")[0] + "?verify=0&")


def test_a_node_of_a_cluster_says_how_to_reach_the_cluster(cluster):
    store = fresh(cluster.replace("cluster=1", "cluster=0"))
    with pytest.raises(RuntimeError, match="add cluster=1"):
        store.put(np.arange(50), np.zeros((50, 16), np.uint8), np.ones(50, np.uint64))


@pytest.mark.parametrize("place", ["cluster", "standalone"])
@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_values_of_the_wrong_kind_are_refused(place, layout, request):
    from redis import Redis, RedisCluster

    url = request.getfixturevalue(place)
    store = fresh(f"{url}layout={layout}&")
    store.put(np.arange(9), np.zeros((9, 16), np.uint8), np.ones(9, np.uint64))
    host, port = url.partition("//")[2].partition("/")[0].split(",")[0].split(":")
    client = (RedisCluster if place == "cluster" else Redis)(host=host, port=int(port))
    name = f"{store._head}4{store._tails[0]}"
    client.set(name, b"12345")
    with pytest.raises(RuntimeError, match="gid_4_.* should have .* bytes but has: 5"):
        store.get(np.arange(9))
    client.delete(name)
    client.rpush(name, "x")
    with pytest.raises(RuntimeError, match="(?i)list|wrong kind"):
        store.get(np.arange(9))
    client.close()


def test_a_stopped_server_raises_within_the_limit_and_works_afterwards(start):
    server = start().start()
    store = fresh(f"redis://{server.where}/?timeout=250ms&retry_limit=3&")
    keys, rows, scores = np.arange(5000), np.zeros((5000, 16), np.uint8), np.ones(5000, np.uint64)
    store.put(keys, rows, scores)
    server.signal(signal.SIGSTOP)
    begin = time.monotonic()
    for call in (lambda: store.get(keys), lambda: store.put(keys, rows, scores)):
        with pytest.raises(ConnectionError, match="tried 3 times"):
            call()
    assert time.monotonic() - begin < 20
    server.signal(signal.SIGCONT)
    assert store.get(keys)[2].all()


@pytest.mark.parametrize("above", [(), ("ssd",), ("memory", "ssd")])
def test_a_table_over_redis_trains_as_one_in_memory(standalone, above, tmp_path):
    optimizer = embstore.Adagrad(lr=0.5)
    url = f"{standalone}prefix=native{len(above)}"
    upper = {"ssd": f"ssd://{tmp_path}", "memory": "memory://near"}
    below = tiers(*(upper[kind] for kind in above), url, upper_rows=60)(
        embstore.TableOptions(name="user", dim=4, optimizer=optimizer), 0
    )
    options = {"dim": 4, "optimizer": optimizer, "bucket_capacity": 16}
    small = embstore.Table("user", max_capacity=64, init_capacity=64, store=below, **options)
    large = embstore.Table("user", max_capacity=4096, **options)
    rng = np.random.default_rng(0)
    keys_seen = set()
    for _ in range(12):
        keys = np.unique(rng.integers(-300, 300, 40))
        gradients = rng.random((len(keys), 4), np.float32)
        keys_seen |= set(keys.tolist())
        for table in (small, large):
            table.find_or_insert(keys)
            table.apply_gradients(keys, gradients)
    small.flush()
    keys = np.array(sorted(keys_seen))
    rows, _, found = below.get(keys)
    assert found.all()
    np.testing.assert_allclose(
        np.ascontiguousarray(rows[:, :16]).view(np.float32), large.read(keys).values, rtol=1e-6
    )
    last = open_store(url, table="user-0", tensor_bytes=[stores.row_bytes(4, optimizer)], layout="packed")
    assert last.get(keys)[2].all(), "flush should reach Redis"
