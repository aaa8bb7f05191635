"""Whatever a server does, a call ends in bounded time and memory, with an exception that says why."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from stores.hostile_redis import HostileRedis, slowly

from embstore.stores.redis.store import RedisStore

KEYS = np.arange(7)
ROW = b"$8\r\nabcdefgh\r\n"


@pytest.fixture
def serve():
    servers = []

    def start(layout="compatible", **answers):
        """Answers by command; a function gets the command."""

        def answer(command):
            found = answers.get(command[0].decode().lower(), "usual")
            return found(command) if callable(found) else found

        servers.append(HostileRedis(answer))
        url = f"redis://{servers[-1].where}/?timeout=300ms&retry_limit=2&chunk_size=3&layout={layout}"
        return url, servers[-1]

    yield start
    for server in servers:
        server.stop()


def opened(url):
    return RedisStore(url, table="t", tensor_bytes=[8])


def rows_for(command):
    return b"*%d\r\n" % (len(command) - 1) + ROW * (len(command) - 1)


def block(cursor, *names):
    """An answer to SCAN."""
    text = b"*2\r\n$%d\r\n%d\r\n*%d\r\n" % (len(str(cursor)), cursor, len(names))
    return text + b"".join(b"$%d\r\n%b\r\n" % (len(n), n) for n in names)


CALLS = {
    "get": lambda store: store.get(KEYS),
    "put": lambda store: store.put(KEYS, np.zeros((7, 8), np.uint8), np.ones(7, np.uint64)),
    "contains": lambda store: store.contains(KEYS),
    "erase": lambda store: store.erase(KEYS),
    "len": len,
    "scan": lambda store: list(store.scan()),
    "clear": lambda store: store.clear(),
}
ANSWERS = {
    "mget": rows_for,
    "mset": b"+OK\r\n",
    "strlen": b":8\r\n",
    "del": b":1\r\n",
    "dbsize": b":7\r\n",
    "scan": block(0, b"_table_t_gid_5_cid_0_osid_0"),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_server_of_these_tests_can_also_behave(call, serve):
    store = opened(serve(**ANSWERS)[0])
    CALLS[call](store)


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_sends_a_byte_at_a_time_is_given_up(call, serve):
    """Each byte comes within the timeout; all of them do not."""
    slow = {
        name: lambda command, a=a: slowly(a(command) if callable(a) else a) for name, a in ANSWERS.items()
    }
    slow["mset"] = lambda command: slowly(b"+OK" + b"." * 50)
    slow["del"] = slow["strlen"] = lambda command: slowly(b":" + b"0" * 50)
    store = opened(serve(**slow)[0])
    with pytest.raises(ConnectionError, match="127.0.0.1:.*tried 2 times"):
        CALLS[call](store)


def test_so_is_one_that_is_slow_from_the_first_answer(serve):
    with pytest.raises(ConnectionError, match="tried 2 times"):
        opened(serve(ping=lambda command: slowly(b"+PONG" + b"." * 90))[0])


@pytest.mark.parametrize("option", ["cluster=1", "sentinel=rows"])
def test_so_are_slow_nodes_of_a_cluster_and_slow_sentinels(option, serve):
    url, server = serve(
        cluster=lambda command: slowly(b"+" + b"." * 90),
        sentinel=lambda command: slowly(b"*" + b"0" * 90),
        info=lambda command: slowly(b"+" + b"." * 90),
        command=b"*0\r\n",
    )
    with pytest.raises(ConnectionError, match="tried 2 times"):
        opened(f"{url}&{option}")
    assert {command[0] for command in server.commands} & {b"CLUSTER", b"SENTINEL"}


def test_one_deadline_is_for_all_chunks_of_a_call(serve):
    """Three commands, each answered within the timeout."""

    def late(command):
        time.sleep(0.15)
        return rows_for(command)

    store = opened(serve(mget=late)[0])
    with pytest.raises(ConnectionError, match="tried 2 times"):
        store.get(KEYS)


@pytest.mark.parametrize("call", ["scan", "len", "clear"])
def test_a_scan_that_never_ends_is_given_up(call, serve):
    cursors = itertools.count(1)
    answers = {**ANSWERS, "scan": lambda command: block(next(cursors))}
    url, server = serve(**answers)
    with pytest.raises(RuntimeError, match="SCAN has not ended after 64 blocks"):
        CALLS[call](opened(url))
    assert sum(command[0] == b"SCAN" for command in server.commands) == 64


def test_a_scan_follows_a_server_that_grows(serve):
    names = [b"_table_t_gid_%d_cid_0_osid_0" % i for i in range(300)]

    def scan(command):
        at = int(command[1])
        return block(at + 1 if at + 1 < len(names) else 0, names[at])

    url, server = serve(**{**ANSWERS, "scan": scan, "dbsize": lambda c: b":%d\r\n" % (4096 * 300)})
    assert len(opened(url)) == 300


def test_a_scan_that_loses_its_connection_begins_again(serve):
    broken = iter([False, False, True])

    def scan(command):
        if next(broken, False):
            return None
        at = int(command[1])
        return block((at + 1) % 4, b"_table_t_gid_%d_cid_0_osid_0" % at)

    url, server = serve(**{**ANSWERS, "scan": scan})
    found = np.concatenate([keys for keys, _, _ in opened(url).scan()])
    assert sorted(found.tolist()) == [0, 1, 2, 3]
    assert [command[1] for command in server.commands if command[0] == b"SCAN"] == [
        *(b"0", b"1", b"2"),
        *(b"0", b"1", b"2", b"3"),
    ]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "nonsense",
    [
        b"+what\r\n",
        b":5\r\n",
        b"$3\r\nabc\r\n",
        b"*0\r\n",
        b"*1\r\n*1\r\n:1\r\n",
        b"\x00\xff\x00\r\n",
        b"$x\r\n",
    ],
    ids=["text", "number", "string", "empty", "nested", "bytes", "length"],
)
def test_an_answer_of_the_wrong_kind_is_named(call, nonsense, serve):
    """In the second of three commands, so that more are on their way."""
    seen = itertools.count()

    def answer(command):
        usual = ANSWERS[command[0].decode().lower()]
        return (usual(command) if callable(usual) else usual) if next(seen) == 0 else nonsense

    store = opened(serve(**dict.fromkeys(ANSWERS, answer))[0])
    if (call, nonsense) in {("put", b"+what\r\n"), ("erase", b":5\r\n")}:
        return  # that is how success looks
    with pytest.raises((RuntimeError, ConnectionError), match=r"redis 127\.0\.0\.1:\d+ db 0: ") as info:
        CALLS[call](store)
    assert "object has no attribute" not in str(info.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "huge", [b"$999999999999\r\n", b"*2147483647\r\n", b"$-7\r\n"], ids=["string", "array", "negative"]
)
def test_an_answer_of_a_huge_length_takes_no_memory(call, huge, serve):
    store = opened(serve(**dict.fromkeys(ANSWERS, huge))[0])
    tracemalloc.start()
    try:
        with pytest.raises((RuntimeError, ConnectionError), match=r"redis 127\.0\.0\.1"):
            CALLS[call](store)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_an_answer_without_an_end_is_given_up(serve, monkeypatch):
    from embstore.stores.redis import deadline as redis_deadline

    monkeypatch.setattr(redis_deadline, "MOST_BYTES", 1 << 20)

    def endless(command):
        return itertools.chain([b"$9999999999\r\n"], itertools.repeat(b"x" * 65536))

    store = opened(serve(dbsize=endless)[0].replace("300ms", "30s"))
    with pytest.raises(ConnectionError, match="longer than 1048576 bytes"):
        len(store)


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_closes_in_the_middle_is_given_up(call, serve):
    def half(command):
        usual = ANSWERS[command[0].decode().lower()]
        data = usual(command) if callable(usual) else usual
        yield data[: len(data) // 2]
        raise OSError("enough")

    store = opened(serve(**dict.fromkeys(ANSWERS, half))[0])
    with pytest.raises(ConnectionError, match="tried"):
        CALLS[call](store)


FOREIGN = (
    b"--5",
    b"+5",
    b"05",
    b"-0",
    b"9223372036854775808",
    b"99999999999999999999999",
    b"5_x",
    b"",
    b"abc",
)


@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_foreign_keys_that_match_are_passed_by(layout, serve):
    tail = b"_cid_0" + b"_osid_0" * (layout == "compatible")
    ours = (b"-9223372036854775808", b"5", b"-1", b"0", b"9223372036854775807")
    names = [b"_table_t_gid_" + middle + tail for middle in (*FOREIGN, *ours)]
    value = b"$8\r\nabcdefgh\r\n" if layout == "compatible" else b"$16\r\nabcdefgh\1\0\0\0\0\0\0\0\r\n"

    def mget(command):
        return b"*%d\r\n" % (len(command) - 1) + value * (len(command) - 1)

    store = opened(serve(layout, **{**ANSWERS, "mget": mget, "scan": block(0, *names)})[0])
    assert len(store) == 5
    [(keys, rows, _)] = store.scan()
    assert keys.tolist() == sorted(int(middle) for middle in ours)
    assert {row.tobytes() for row in rows} == {b"abcdefgh"}


@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_contains_and_len_move_no_rows(layout, serve):
    lengths = iter([8, 0, 8, 8, 0, 8, 8] if layout == "compatible" else [16, 0, 16, 16, 0, 16, 16])
    answers = {**ANSWERS, "strlen": lambda command: b":%d\r\n" % next(lengths)}
    url, server = serve(layout, **answers)
    store = opened(url)
    assert store.contains(KEYS).tolist() == [True, False, True, True, False, True, True]
    len(store)
    assert {command[0] for command in server.commands} & {b"GET", b"MGET", b"GETRANGE"} == set()


def test_contains_refuses_values_that_are_no_rows(serve):
    store = opened(serve(strlen=b":9\r\n")[0])
    with pytest.raises(RuntimeError, match="_table_t_gid_0_cid_0_osid_0 should have 8 bytes but has: 9"):
        store.contains(KEYS)
    store = opened(serve(strlen=b"-WRONGTYPE Operation against a key of the wrong kind\r\n")[0])
    with pytest.raises(RuntimeError, match="_table_t_gid_0_cid_0_osid_0 should hold a string"):
        store.contains(KEYS)


def test_clear_removes_a_block_before_it_asks_for_the_next(serve):
    def scan(command):
        at = int(command[1])
        return block((at + 1) % 5, b"_table_t_gid_%d_cid_0_osid_0" % at)

    url, server = serve(**{**ANSWERS, "scan": scan})
    opened(url).clear()
    order = [command[0] for command in server.commands if command[0] in (b"SCAN", b"DEL")]
    assert order == [b"SCAN", b"DEL"] * 5
