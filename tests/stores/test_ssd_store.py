"""The SSD store against a dict: rows, snapshots, space, damage and everything that can go wrong."""

import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import embstore
from embstore.stores import SsdStore, row_bytes


def rows_of(keys, version, width):
    """Rows that tell their key and version."""
    keys = np.asarray(keys, np.int64)
    return (keys[:, None] * 31 + version * 7 + np.arange(width)).astype(np.float32)


def check(store, oracle, width):
    keys = np.array(sorted(oracle), np.int64)
    rows, scores, found = store.get(keys)
    assert found.all() and len(store) == len(oracle)
    expected = np.concatenate(
        [rows_of([k], oracle[k][0], width) for k in keys.tolist()] or [np.zeros((0, width))]
    )
    np.testing.assert_array_equal(rows.view(np.float32).reshape(len(keys), width), expected)
    np.testing.assert_array_equal(scores, [oracle[k][1] for k in keys.tolist()])


@pytest.mark.parametrize("io", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("width", "block"), [(3, 512), (32, 4096), (300, 512), (1500, 4096)])
def test_a_store_holds_what_a_dict_holds(tmp_path, monkeypatch, width, block, direct, io):
    monkeypatch.setenv("EMBSTORE_IO", io)
    rng = np.random.default_rng(width)
    oracle = {}
    with SsdStore(tmp_path, 4 * width, physical_block_bytes=block, direct=direct) as store:
        for version in range(30):
            keys = rng.integers(-400, 400, 97)
            keys[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
            store.put(keys, rows_of(keys, version, width), np.full(97, version + 1))
            oracle.update({k: (version, version + 1) for k in keys.tolist()})
            gone = rng.integers(-400, 400, 11)
            store.erase(gone)
            for k in gone.tolist():
                oracle.pop(k, None)
            if version % 7 == 3:
                store.flush()
        check(store, oracle, width)
        found = store.get([10_000, 10_001])[2]
        assert not found.any()
        scanned = {}
        for keys, _, _ in store.scan(50):
            for key in keys.tolist():
                assert key not in scanned
                scanned[key] = True
        assert scanned.keys() == oracle.keys()


def reads_past_the_page_cache(folder, block):
    """Whether the file system lets a file be read in such blocks with O_DIRECT."""
    page = mmap.mmap(-1, 4096)
    try:
        file = os.open(folder / "trial", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            whole = os.pwritev(file, [page], 0) == os.preadv(file, [page], 0) == 4096
            return whole and os.preadv(file, [memoryview(page)[:block]], 4096 - block) == block
        finally:
            os.close(file)
    except OSError:
        return False


@pytest.mark.parametrize("block", [512, 4096])
def test_rows_are_read_past_the_page_cache_where_that_is_possible_and_wanted(tmp_path, block):
    possible = reads_past_the_page_cache(tmp_path, block)
    for direct in (True, False):
        with SsdStore(tmp_path / str(direct), 8, physical_block_bytes=block, direct=direct) as store:
            assert store.stats().direct == (direct and possible)


def test_space_of_overwritten_rows_is_used_again(tmp_path):
    width, keys = 256, np.arange(8192)
    with SsdStore(tmp_path, 4 * width) as store:
        rng = np.random.default_rng(0)
        oracle = {}
        for version in range(40):
            some = rng.permutation(keys)[:4096]
            store.put(some, rows_of(some, version, width), np.full(len(some), 1))
            oracle.update({k: (version, 1) for k in some.tolist()})
        store.flush()
        stats = store.stats()
        assert stats.moved_rows > 0
        # Without compaction it would be 160 MiB.
        assert stats.file_bytes <= 2 * 8192 * 4 * width + (32 << 20)
        on_disk = sum(f.stat().st_blocks * 512 for f in (tmp_path / "values").iterdir())
        # 40 versions were written, 160 MiB; how far compaction is behind depends on the machine's load.
        assert on_disk <= 6 * 8192 * 4 * width + (16 << 20)
        check(store, oracle, width)


def test_the_index_takes_at_most_24_bytes_a_key(tmp_path):
    with SsdStore(tmp_path, 4) as store:
        for start in range(0, 600_000, 50_000):
            keys = np.arange(start, start + 50_000) * 7919
            store.put(keys, np.zeros((50_000, 1), np.float32))
            if start >= 100_000:
                assert store.stats().index_bytes <= 24 * len(store)


def test_snapshots_live_side_by_side_and_are_untouched_by_what_follows(tmp_path):
    width = 64
    with SsdStore(tmp_path, 4 * width) as store:
        oracles = {}
        oracle = {}
        rng = np.random.default_rng(1)
        for version in range(60):
            keys = rng.integers(0, 6000, 3000)
            store.put(keys, rows_of(keys, version, width), np.full(3000, version + 1))
            oracle.update({k: (version, version + 1) for k in keys.tolist()})
            if version in (5, 6, 41):
                store.snapshot(f"v{version}")
                oracles[f"v{version}"] = dict(oracle)
        check(store, oracle, width)
        for name in ("v6", "v41", "v5"):
            store.load_snapshot(name)
            check(store, oracles[name], width)
    with SsdStore(tmp_path, 4 * width) as store:
        assert len(store) == 0 and store.snapshots() == ["v41", "v5", "v6"]
        keys = np.arange(20_000)
        for _ in range(3):
            store.put(keys, rows_of(keys, 99, width))
        for name in ("v5", "v6", "v41"):
            store.load_snapshot(name)
            check(store, oracles[name], width)
        before = store.stats().file_bytes
        store.delete_snapshot("v5")
        store.delete_snapshot("v6")
        assert store.snapshots() == ["v41"] and store.stats().file_bytes < before
        check(store, oracles["v41"], width)


def test_a_snapshot_of_a_used_name_replaces_the_old_one(tmp_path):
    with SsdStore(tmp_path, 8) as store:
        for version in range(3):
            store.put(np.arange(10), rows_of(np.arange(10), version, 2))
            store.snapshot("latest")
    with SsdStore(tmp_path, 8) as store:
        store.load_snapshot("latest")
        check(store, {k: (2, 1) for k in range(10)}, 2)


def test_int32_keys_take_four_bytes(tmp_path):
    keys = np.array([-(2**31), -1, 0, 2**31 - 1])
    with SsdStore(tmp_path, 8, key_bytes=4) as store:
        store.put(keys, rows_of(keys, 1, 2))
        store.snapshot("s")
        store.load_snapshot("s")
        check(store, {k: (1, 1) for k in keys.tolist()}, 2)
        with pytest.raises(ValueError, match="keys should fit int32 .* one is: 2147483648"):
            store.put([2**31], np.zeros((1, 2), np.float32))
    assert (tmp_path / "KEY_SIZE").read_text() == "4\n"


def test_a_forty_line_reader_understands_the_files(tmp_path):
    width, keys = 5, np.arange(-700, 700)
    with SsdStore(tmp_path, 4 * width) as store:
        store.put(keys, rows_of(keys, 1, width))
        store.put(keys[::3], rows_of(keys[::3], 2, width))
        store.snapshot("s")

    def number(name):
        return int((tmp_path / name).read_text())

    block = max(number("PHYSICAL_BLOCK_SIZE"), number("VALUE_SIZE"))
    per_block, per_chunk = block // number("VALUE_SIZE"), number("NUM_LOGICAL_BLOCKS_PER_CHUNK")
    assert per_chunk == (4 << 30) // block
    folder, found = tmp_path / "snapshots" / "s", {}
    for name in (folder / "LIST").read_text().split():
        for row in np.fromfile(folder / name, "<u8").tolist():
            chunk, at = divmod(row, per_block * per_chunk)
            key = np.fromfile(tmp_path / "keys" / f"key-{chunk:012}", "<i8")[at]
            offset = at // per_block * block + at % per_block * number("VALUE_SIZE")
            values = np.fromfile(tmp_path / "values" / f"value-{chunk:012}", "<f4", width, offset=offset)
            found[int(key)] = values
    assert found.keys() == set(keys.tolist())
    for key, values in found.items():
        np.testing.assert_array_equal(values, rows_of([key], 2 if (key + 700) % 3 == 0 else 1, width)[0])


def test_a_damaged_block_is_reported_with_its_rows(tmp_path):
    width, keys = 32, np.arange(1000)
    with SsdStore(tmp_path, 4 * width) as store:
        store.put(keys, rows_of(keys, 1, width))
        store.snapshot("s")
    with open(tmp_path / "values" / "value-000000000000", "r+b") as file:
        file.seek(5 * 4096 + 40)
        file.write(b"\xff\x00\xff\x00")
    with SsdStore(tmp_path, 4 * width) as store:
        store.load_snapshot("s")
        store.get(np.arange(160))
        with pytest.raises(RuntimeError, match="row 160 of key 160 .* its block holds rows 160 to 191"):
            store.get(keys)
        with pytest.raises(RuntimeError, match="is damaged"):
            list(store.scan())


@pytest.mark.parametrize("file", ["LIST", "index-000000000000"])
def test_a_damaged_snapshot_is_refused_and_changes_nothing(tmp_path, file):
    with SsdStore(tmp_path, 8) as store:
        store.put(np.arange(10), rows_of(np.arange(10), 1, 2))
        store.snapshot("s")
        store.put(np.arange(10), rows_of(np.arange(10), 2, 2))
        path = tmp_path / "snapshots" / "s" / file
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
        with pytest.raises((RuntimeError, OSError), match="s"):
            store.load_snapshot("s")
        check(store, {k: (2, 1) for k in range(10)}, 2)


def test_misuse_is_refused_with_a_reason(tmp_path):
    store = SsdStore(tmp_path / "a", 8, capacity_rows=5)
    with pytest.raises(OSError, match="is locked: some process has it open for writing"):
        SsdStore(tmp_path / "a", 8)
    with pytest.raises(FileNotFoundError, match="has no snapshot 'nothing'"):
        store.load_snapshot("nothing")
    for name in ("", ".x", "a/b"):
        with pytest.raises(ValueError, match="name of a snapshot should be a file name"):
            store.snapshot(name)
    store.put(np.arange(5), np.zeros((5, 2), np.float32))
    with pytest.raises(RuntimeError, match="is full: it holds 5 of 5 rows and was given 1 new ones"):
        store.put([4, 5], np.zeros((2, 2), np.float32))
    assert len(store) == 5
    store.close()
    with pytest.raises(RuntimeError, match="is closed"):
        store.get([1])
    with pytest.raises(ValueError, match="VALUE_SIZE 8 but is opened with: 12"):
        SsdStore(tmp_path / "a", 12)
    with pytest.raises(ValueError, match="physical_block_bytes should be 512 or 4096 but is: 100"):
        SsdStore(tmp_path / "b", 8, physical_block_bytes=100)
    with pytest.raises(FileNotFoundError):
        SsdStore(tmp_path / "c", 8, create=False)


def run_child(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options
    )


FULL_DISK = """
import resource, sys
import numpy as np
from embstore.stores import SsdStore
import embstore
# A file may not grow beyond 3 MB: what a full disk is for the writer, but for the errno.
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
optimizer = embstore.Adam(lr=0.1)
store = SsdStore(sys.argv[1], 4 * 96)
cached = embstore.Table("t", dim=32, optimizer=optimizer, store=store, max_capacity=4096)
twin = embstore.Table("t", dim=32, optimizer=optimizer)
failed = 0
for step in range(400):
    keys = np.arange(step * 100, step * 100 + 100)
    gradients = np.full((100, 32), step, np.float32)
    try:
        cached.find_or_insert(keys)
    except OSError as error:
        failed += 1
        if failed == 3:
            break
        continue
    cached.apply_gradients(keys, gradients)
    twin.optimizer_step = cached.optimizer_step - 1
    twin.find_or_insert(keys)
    twin.apply_gradients(keys, gradients)
assert failed == 3, failed
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
a, b = cached.rows(), twin.rows()
known = np.isin(a.keys, b.keys)
np.testing.assert_array_equal(a.keys[known], b.keys)
np.testing.assert_array_equal(a.values[known], b.values)
cached.find_or_insert(np.arange(10**6, 10**6 + 100))
cached.flush()
np.testing.assert_array_equal(cached.read(b.keys).states, b.states)
print("nothing lost")
"""


@pytest.mark.multirank
def test_a_full_disk_raises_and_loses_no_row(tmp_path):
    child = run_child(FULL_DISK, tmp_path)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and out == "nothing lost\n"


def test_a_forked_child_neither_uses_nor_locks_the_store(tmp_path):
    store = SsdStore(tmp_path, 8)
    store.put([1], np.ones((1, 2), np.float32))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.put([2], np.ones((1, 2), np.float32))
            os.write(write, b"used")
        except RuntimeError:
            os.write(write, b"refused")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 10) == b"refused"
        store.close()
        SsdStore(tmp_path, 8).close()  # the child lives, but does not hold the lock
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


KILLED = """
import sys
import numpy as np
from embstore.stores import SsdStore
store = SsdStore(sys.argv[1], 4 * 24)
keys = np.arange(5000)
version = int(sys.argv[2])
if version:
    store.load_snapshot(f"v{version}")
print("ready", flush=True)
while True:
    for part in np.array_split(np.random.permutation(keys), 7):
        store.put(part, (part[:, None] * 31 + (version + 1) * 7 + np.arange(24)).astype(np.float32))
    version += 1
    store.snapshot(f"v{version}")
    print(version, flush=True)
    if version > 2:
        store.delete_snapshot(f"v{version - 2}")
"""


def kill_rounds(path, rounds, seed):
    rng = np.random.default_rng(seed)
    last = 0
    for number in range(10 * rounds):
        if number >= rounds and last > 0:  # a busy machine may need more rounds for its first snapshot
            break
        child = run_child(KILLED, path, last)
        assert child.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.4))
        child.kill()
        for line in child.stdout.read().splitlines():
            last = int(line)
        child.wait(timeout=30)
        with SsdStore(path, 96) as store:
            # The one that was announced, or one that was complete before it could be.
            newest = max((int(name[1:]) for name in store.snapshots()), default=0)
            assert last <= newest <= last + 1
            last = newest
            for name in store.snapshots():
                store.load_snapshot(name)
                check(store, {k: (int(name[1:]), 1) for k in range(5000)}, 24)
    return last


@pytest.mark.multirank
def test_the_last_complete_snapshot_loads_after_a_kill_at_any_moment(tmp_path):
    assert kill_rounds(tmp_path, rounds=6, seed=0) > 0


def test_a_table_over_ssd_trains_the_same_rows_as_one_in_memory(tmp_path):
    optimizer = embstore.Adam(lr=0.1)
    options = {"dim": 16, "optimizer": optimizer, "seed": 5}
    with SsdStore(tmp_path, row_bytes(16, optimizer)) as store:
        cached = embstore.Table("t", store=store, max_capacity=2048, init_capacity=128, **options)
        twin = embstore.Table("t", **options)
        rng = np.random.default_rng(3)
        saved = None
        for step in range(60):
            keys = (rng.zipf(1.2, 500) % 20_000) * 7919
            gradients = rng.standard_normal((500, 16)).astype(np.float32)
            for table in (cached, twin):
                table.find_or_insert(keys)
                table.apply_gradients(keys, gradients)
            if step == 30:
                cached.save_snapshot("half")
                saved = twin.rows()
        np.testing.assert_array_equal(cached.rows().keys, twin.rows().keys)
        np.testing.assert_array_equal(cached.rows().values, twin.rows().values)
        np.testing.assert_array_equal(cached.rows().states, twin.rows().states)
        cached.load_snapshot("half")
        np.testing.assert_array_equal(cached.rows().keys, saved.keys)
        np.testing.assert_array_equal(cached.rows().values, saved.values)
        cached.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_is_cut_short_raises_and_the_rest_can_be_read(tmp_path, direct):
    width, keys = 32, np.arange(9000)  # a segment of 8192 rows is in the file
    with SsdStore(tmp_path, 4 * width, direct=direct) as store:
        store.put(keys, rows_of(keys, 1, width))
        store.flush()
        store.get(keys)
        os.truncate(tmp_path / "values" / "value-000000000000", 64 * 4096)
        for wanted in (keys, keys[5000:5001]):
            with pytest.raises(OSError, match="reading"):
                store.get(wanted)
        rows, _, found = store.get(keys[:2048])
        assert found.all()
        np.testing.assert_array_equal(
            rows.view(np.float32).reshape(2048, width), rows_of(keys[:2048], 1, width)
        )


BUS_ERROR = """
import faulthandler, mmap, sys, numpy as np
from embstore.stores import SsdStore
path, when = sys.argv[1:]
if when == "before":
    faulthandler.enable()
keys = np.arange(3000)
with SsdStore(path + "/store", 128, direct=False) as store:
    store.put(keys, np.zeros((3000, 128), np.uint8))
    store.flush()
    store.get(keys)
    if when == "after":
        faulthandler.enable()
        store.get(keys)
    with open(path + "/other", "wb+") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        print("reading", flush=True)
        mapped[0]
"""


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_a_bus_error_that_is_not_of_the_store_ends_the_process_as_before(tmp_path, when):
    command = [sys.executable, "-c", BUS_ERROR, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "reading\n")
    assert ("Bus error" in done.stderr) == (when != "never")
