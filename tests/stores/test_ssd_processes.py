"""One directory, several processes: readers beside the writer, forks, limits of the process."""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import embstore
from embstore.stores import SsdStore

WIDTH = 250
KEYS = np.arange(3000)


def rows_of(version):
    return (KEYS[:, None] * 31 + version * 7 + np.arange(WIDTH)).astype(np.float32)


def opened(path, **options):
    return SsdStore(path, 4 * WIDTH, **options)


def check(store, version):
    rows, _, found = store.get(KEYS)
    assert found.all() and len(store) == len(KEYS)
    np.testing.assert_array_equal(rows.view(np.float32), rows_of(version))


def churn(store, rounds=12):
    for version in range(100, 100 + rounds):
        store.put(KEYS, rows_of(version))
    store.flush()


READER = """
import sys
import numpy as np
from embstore.stores import SsdStore
with SsdStore(sys.argv[1], 1000, create=False) as store:
    store.load_snapshot("s")
    for line in sys.stdin:
        rows = store.get(np.arange(3000))[0].view(np.float32)
        same = rows - rows[0, 0] == np.arange(3000)[:, None] * 31 + np.arange(250)
        print(int(rows[0, 0]) // 7, same.all(), flush=True)
"""


@pytest.mark.parametrize("change", ["overwrite", "delete", "replace"])
def test_a_snapshot_is_read_while_another_process_writes_and_drops_it(tmp_path, change):
    with opened(tmp_path) as store:
        store.put(KEYS, rows_of(1))
        store.snapshot("s")
        child = subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def ask():
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline()

        try:
            assert ask() == "1 True\n"
            if change == "delete":
                store.delete_snapshot("s")
                assert store.snapshots() == []
            store.put(KEYS, rows_of(2))
            if change == "replace":
                store.snapshot("s")
            churn(store)
            assert ask() == "1 True\n"
        finally:
            child.stdin.close()
            assert child.wait(timeout=30) == 0
        # Once it is closed, its segments are used again.
        before = store.stats().file_bytes
        store.snapshot("later")
        if change != "overwrite":
            assert store.stats().file_bytes < before
        names = {"overwrite": {"s", "later"}, "delete": {"later"}, "replace": {"s", "later"}}[change]
        assert {p.name for p in (tmp_path / "snapshots").iterdir()} == names
        for name in names:
            store.load_snapshot(name)
            check(store, {"later": 111, "s": 2 if change == "replace" else 1}[name])


def test_readers_of_one_process_share_a_directory_with_its_writer(tmp_path):
    with (
        opened(tmp_path) as store,
        opened(tmp_path, create=False) as one,
        opened(tmp_path, create=False) as two,
    ):
        for version in (1, 2):
            store.put(KEYS, rows_of(version))
            store.snapshot(f"v{version}")
        assert one.snapshots() == ["v1", "v2"]
        one.load_snapshot("v1")
        two.load_snapshot("v2")
        store.delete_snapshot("v1")
        store.delete_snapshot("v2")
        assert one.snapshots() == []
        churn(store)
        check(one, 1)
        check(two, 2)
        with pytest.raises(FileNotFoundError, match="has no snapshot 'v2'"):
            one.load_snapshot("v2")
        check(one, 1)
        one.flush()
        for change in (lambda: one.put(KEYS, rows_of(3)), lambda: one.snapshot("x"), one.clear):
            with pytest.raises(RuntimeError, match="was opened for reading"):
                change()
        with pytest.raises(OSError, match="is locked"):
            opened(tmp_path)


def test_a_deleted_snapshot_that_is_read_keeps_its_rows_when_the_store_is_opened_again(tmp_path):
    with opened(tmp_path) as store:
        store.put(KEYS, rows_of(1))
        store.snapshot("s")
        with opened(tmp_path, create=False) as reader:
            reader.load_snapshot("s")
            store.delete_snapshot("s")
            store.close()
            with opened(tmp_path) as again:
                assert again.snapshots() == []
                churn(again)
                check(reader, 1)
    with opened(tmp_path):
        assert list((tmp_path / "snapshots").iterdir()) == []


def test_too_many_open_files_free_no_row(tmp_path):
    with opened(tmp_path) as store:
        store.put(KEYS, rows_of(1))
        store.snapshot("s")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    gaps = [os.dup(0)]
    while gaps[-1] < used:
        gaps.append(os.dup(0))
    refused = 0
    try:
        for spare in range(8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + spare, limit[1]))
            try:
                store = opened(tmp_path)
            except OSError:
                refused += 1
                continue
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            with store:
                store.put(KEYS, rows_of(2))
                store.flush()
                store.load_snapshot("s")
                check(store, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in gaps:
            os.close(fd)
    assert 0 < refused < 8


def in_child(work, timeout=30):
    """What `work` returns in a forked child: bytes, or the text of its exception."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(timeout)
        try:
            os.write(write, work())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            return pipe.read()
    finally:
        os.waitpid(child, 0)


def test_a_forked_child_leaves_descriptors_alone_that_are_not_the_stores(tmp_path):
    (tmp_path / "mine").write_text("mine")
    store = opened(tmp_path / "store")
    store.put(KEYS, rows_of(1))
    store.snapshot("s")
    reader = opened(tmp_path / "store", create=False)
    reader.load_snapshot("s")
    stores = [store, reader]
    used = set(map(int, os.listdir("/proc/self/fd")))
    del store, reader

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.dup2(write, 1)
        for fd in used - {0, 1, 2}:
            with contextlib.suppress(OSError):  # the locks are closed already
                os.close(fd)
        # Every number that the stores used belongs to a file of the child.
        mine = [os.open(tmp_path / "mine", os.O_RDONLY) for _ in range(max(used) + 2)]
        stores.clear()
        try:
            os.write(1, b"".join(os.pread(fd, 4, 0) for fd in mine))
        except OSError as error:
            os.write(1, repr(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"mine" * (max(used) + 2)
    os.waitpid(child, 0)
    check(stores[0], 1)
    for store in stores:
        store.close()


def test_a_child_forked_at_any_moment_refuses_its_parents_store_and_opens_its_own(tmp_path):
    store = opened(tmp_path / "parent")
    stop = threading.Event()

    def write():
        while not stop.is_set():
            store.put(KEYS, rows_of(1))
            store.snapshot("s")
            store.get(KEYS)

    def work(number):
        for use in (
            len,
            lambda s: s.get(KEYS),
            lambda s: s.contains(KEYS),
            SsdStore.stats,
            SsdStore.snapshots,
        ):
            with pytest.raises(RuntimeError, match="cannot be used after fork"):
                use(store)
        with opened(tmp_path / f"child-{number}") as own:
            own.put(KEYS, rows_of(number))
            own.snapshot("s")
            own.load_snapshot("s")
            check(own, number)
        return b"well"

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(10):
            assert in_child(lambda number=number: work(number)) == b"well"
    finally:
        stop.set()
        thread.join()
    check(store, 1)
    store.close()


def test_close_beside_prefetch_and_lookups_of_a_table(tmp_path):
    for _ in range(5):
        store = opened(tmp_path)
        table = embstore.Table("t", dim=WIDTH, store=store, max_capacity=512)
        for part in np.array_split(np.arange(len(KEYS)), 30):
            table.insert_or_assign(KEYS[part], rows_of(1)[part])
        errors = []

        def read(call, table=table, errors=errors):
            try:
                while True:
                    call(table)
            except Exception as error:
                errors.append(error)

        parts = itertools.cycle(np.array_split(KEYS, 10))
        calls = (
            lambda t, parts=parts: t.prefetch(next(parts)),
            lambda t: t.find(KEYS),
            lambda t: t.find(KEYS[::-1]),
        )
        threads = [threading.Thread(target=read, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        store.close()
        for thread in threads:
            thread.join(timeout=60)
        assert [type(e) for e in errors] == [RuntimeError] * 3
        assert all("is closed" in str(e) for e in errors)
