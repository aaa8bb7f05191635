"""A table over a store: the same rows as a table that holds everything, whatever the size of the cache."""

import threading

import numpy as np
import pytest

import embstore
from embstore.stores import MemoryStore, NullStore, Store, row_bytes

DIM = 7


class DictStore(Store):
    """A store in a dict, written as a user would, that can be told to fail."""

    def __init__(self, row_bytes):
        super().__init__(row_bytes)
        self.rows = {}
        self.fail_get = self.fail_put = False
        self.calls = []

    def get(self, keys):
        self.calls.append(("get", len(keys)))
        if self.fail_get:
            raise OSError("get failed")
        found = np.array([int(k) in self.rows for k in keys], bool).reshape(len(keys))
        rows = np.zeros((len(keys), self.row_bytes), np.uint8)
        scores = np.zeros(len(keys), np.uint64)
        for i in np.flatnonzero(found):
            rows[i], scores[i] = self.rows[int(keys[i])]
        return rows, scores, found

    def put(self, keys, rows, scores):
        self.calls.append(("put", len(keys)))
        if self.fail_put:
            raise OSError("put failed")
        for key, row, score in zip(keys, rows, scores):
            self.rows[int(key)] = (row.copy(), int(score))

    def erase(self, keys):
        for key in keys:
            self.rows.pop(int(key), None)

    def scan(self):
        keys = np.array(list(self.rows), np.int64)
        if len(keys):
            yield keys, *self.get(keys)[:2]

    def __len__(self):
        return len(self.rows)


def make(store_type, *, optimizer=None, capacity=128, dtype="float32", **options):
    optimizer = optimizer or embstore.Adam(lr=0.1)
    options = {"optimizer": optimizer, "seed": 3, "dtype": dtype, "bucket_capacity": 16, **options}
    twin = embstore.Table("t", dim=DIM, **options)
    bytes_ = row_bytes(DIM, optimizer, twin.options.dtype)
    store = store_type(bytes_)
    cached = embstore.Table("t", dim=DIM, store=store, init_capacity=64, max_capacity=capacity, **options)
    return cached, twin, store


def train(tables, rng, steps, ids, batch):
    for _ in range(steps):
        keys = rng.integers(-ids, ids, batch)
        gradients = rng.standard_normal((batch, DIM)).astype(np.float32)
        for table in tables:
            table.find_or_insert(keys)
            table.apply_gradients(keys, gradients)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("store_type", [MemoryStore, DictStore])
def test_a_small_cache_trains_the_same_rows_as_a_table_that_holds_everything(store_type, dtype):
    cached, twin, store = make(store_type, dtype=dtype)
    rng = np.random.default_rng(0)
    # 41 keys of a batch fit beside each other, so that nothing is pinned out of the cache.
    for _ in range(30):
        keys = rng.integers(-500, 500, 41)
        gradients = rng.standard_normal((41, DIM)).astype(np.float32)
        for table in (cached, twin):
            table.find_or_insert(keys)
            table.apply_gradients(keys, gradients)
    ours, theirs = cached.rows(), twin.rows()
    np.testing.assert_array_equal(ours.keys, theirs.keys)
    np.testing.assert_array_equal(ours.values, theirs.values)
    np.testing.assert_array_equal(ours.states, theirs.states)
    assert cached.stats().write_backs > 0 and cached.stats().fetches > 0 and len(store) > 0
    assert cached.stats().refusals == 0


def test_reading_and_contains_look_below_and_bring_nothing_up():
    cached, twin, _ = make(MemoryStore)
    train([cached, twin], np.random.default_rng(1), 20, 400, 37)
    keys = np.arange(-450, 450)
    before = cached.stats()
    np.testing.assert_array_equal(cached.find(keys)[0], twin.find(keys)[0])
    np.testing.assert_array_equal(cached.find(keys)[1], twin.find(keys)[1])
    np.testing.assert_array_equal(cached.contains(keys), twin.contains(keys))
    np.testing.assert_array_equal(cached.read(keys).states, twin.read(keys).states)
    assert cached.stats() == before


def test_lfu_counts_survive_a_stay_below():
    cached, twin, _ = make(MemoryStore, score_strategy="lfu", optimizer=embstore.SGD(lr=0.1))
    train([cached, twin], np.random.default_rng(2), 40, 150, 33)
    np.testing.assert_array_equal(cached.rows().scores, twin.rows().scores)


def test_a_batch_larger_than_the_cache_is_exact():
    cached, twin, _ = make(MemoryStore, capacity=64)
    train([cached, twin], np.random.default_rng(3), 4, 5000, 1023)
    ours, theirs = cached.rows(), twin.rows()
    np.testing.assert_array_equal(ours.keys, theirs.keys)
    np.testing.assert_array_equal(ours.values, theirs.values)
    assert cached.stats().refusals == 0


def test_a_failing_put_raises_and_loses_no_row():
    cached, twin, store = make(DictStore)
    rng = np.random.default_rng(4)
    train([cached, twin], rng, 10, 300, 41)
    store.fail_put = True
    size = len(cached)
    with pytest.raises(OSError, match="put failed"):
        cached.find_or_insert(np.arange(10_000, 10_060))
    assert len(cached) == size
    assert not cached.contains(np.arange(10_000, 10_060)).any()
    store.fail_put = False
    keys = np.arange(-300, 300)
    np.testing.assert_array_equal(cached.read(keys).values, twin.read(keys).values)
    np.testing.assert_array_equal(cached.read(keys).states, twin.read(keys).states)
    train([cached, twin], rng, 10, 300, 41)
    np.testing.assert_array_equal(cached.rows().values, twin.rows().values)


def test_a_failing_get_raises_and_leaves_no_half_made_keys():
    cached, twin, store = make(DictStore)
    train([cached, twin], np.random.default_rng(5), 10, 300, 41)
    store.fail_get = True
    size = len(cached)
    with pytest.raises(OSError, match="get failed"):
        cached.find_or_insert(np.arange(-300, 300))
    assert len(cached) == size
    store.fail_get = False
    np.testing.assert_array_equal(cached.rows().keys, twin.rows().keys)
    np.testing.assert_array_equal(cached.rows().values, twin.rows().values)


def test_misses_and_victims_of_a_batch_go_in_one_call_each():
    cached, _, store = make(DictStore, bucket_capacity=128)
    keys = np.arange(100)
    cached.find_or_insert(keys)
    cached.apply_gradients(keys, np.ones((100, DIM)))
    store.calls.clear()
    cached.find_or_insert(np.arange(1000, 1060))
    assert [name for name, _ in store.calls] == ["get", "put"]


def test_new_rows_go_down_without_an_update_and_clean_ones_go_down_once():
    cached, twin, store = make(MemoryStore)
    for start in range(0, 2000, 50):
        keys = np.arange(start, start + 50)
        np.testing.assert_array_equal(cached.find_or_insert(keys), twin.find_or_insert(keys))
    assert cached.stats().evictions > 0
    np.testing.assert_array_equal(cached.rows().keys, twin.rows().keys)
    cached.flush()
    assert len(store) == cached.stats().write_backs == 2000
    for start in range(0, 2000, 50):
        keys = np.arange(start, start + 50)
        np.testing.assert_array_equal(cached.find_or_insert(keys), twin.find(keys)[0])
    assert cached.stats().write_backs == 2000


def test_erase_and_clear_reach_the_store():
    cached, twin, store = make(MemoryStore)
    train([cached, twin], np.random.default_rng(6), 20, 300, 41)
    gone = np.arange(-100, 100)
    assert cached.erase(gone) == twin.erase(gone)
    assert not cached.contains(gone).any() and not store.contains(gone).any()
    np.testing.assert_array_equal(cached.rows().values, twin.rows().values)
    cached.clear()
    assert len(store) == 0 and len(cached) == 0


def test_assigned_rows_go_down_with_their_scores():
    cached, _, store = make(MemoryStore)
    keys = np.arange(1000)
    values = np.arange(7000, dtype=np.float32).reshape(1000, DIM)
    states = np.full((1000, 14), 2.0, np.float32)
    for at in range(0, 1000, 40):
        part = slice(at, at + 40)
        cached.insert_or_assign(keys[part], values[part], states=states[part], scores=keys[part] + 5)
    cached.flush()
    rows, scores, found = store.get(keys)
    assert found.all()
    np.testing.assert_array_equal(rows.view(np.float32)[:, :DIM], values)
    np.testing.assert_array_equal(scores, keys + 5)


def test_close_writes_changed_rows_down():
    cached, twin, store = make(MemoryStore)
    train([cached, twin], np.random.default_rng(7), 3, 50, 17)
    cached.close()
    again = embstore.Table("t", dim=DIM, optimizer=embstore.Adam(), store=store, max_capacity=128, seed=3)
    np.testing.assert_array_equal(again.rows().values, twin.rows().values)


def test_prefetched_rows_are_resident_until_released():
    cached, twin, _ = make(MemoryStore)
    train([cached, twin], np.random.default_rng(8), 20, 300, 41)
    wanted = twin.rows().keys[:40]
    held = cached.prefetch(wanted)
    for start in range(10_000, 12_000, 40):
        cached.find_or_insert(np.arange(start, start + 40))
    fetches = cached.stats().fetches
    np.testing.assert_array_equal(cached.find_or_insert(wanted), twin.find(wanted)[0])
    assert cached.stats().fetches == fetches
    del held


@pytest.mark.parametrize("capacity", [32, 128])
@pytest.mark.parametrize("strategy", ["timestamp", "step"])
def test_prefetched_rows_that_nobody_used_make_room_for_others(strategy, capacity):
    cached, _, _ = make(MemoryStore, capacity=capacity, score_strategy=strategy)
    share = 3 * capacity // 4
    for start in range(0, 4 * capacity, share):
        cached.find_or_insert(np.arange(start, start + share))
    wanted = np.arange(share)  # long evicted
    held = cached.prefetch(wanted)
    cached.find_or_insert(np.arange(5000, 5000 + capacity // 8))  # while all of them are held
    del held
    for start in range(6000, 6000 + 2 * capacity, 4):
        cached.find_or_insert(np.arange(start, start + 4))
        resident = np.concatenate([block.keys for block in cached.resident()])
        assert len(resident) <= capacity
    assert not np.isin(wanted, resident).any()


def test_a_python_store_may_be_used_while_other_threads_drop_batches():
    # The store needs the GIL while the table's lock is held; the other threads hold the GIL when they
    # drop their pins. Neither may wait for the other.
    cached, twin, _ = make(DictStore)
    stop, errors = threading.Event(), []

    def read():
        rng = np.random.default_rng(9)
        try:
            while not stop.is_set():
                cached.find(rng.integers(-300, 300, 23))
                cached.prefetch(rng.integers(-300, 300, 5))
        except Exception as error:  # shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    train([cached, twin], np.random.default_rng(10), 40, 300, 41)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    np.testing.assert_array_equal(cached.rows().values, twin.rows().values)


def test_a_full_memory_store_raises_and_keeps_its_rows():
    optimizer = embstore.SGD(lr=0.1)
    store = MemoryStore(row_bytes(DIM, optimizer), capacity_rows=100)
    table = embstore.Table(
        "t", dim=DIM, optimizer=optimizer, store=store, max_capacity=64, bucket_capacity=16
    )
    keys = np.arange(300)
    with pytest.raises(RuntimeError, match="memory store is full: it holds .* of 100 rows"):
        for at in range(0, 300, 20):
            table.find_or_insert(keys[at : at + 20])
            table.apply_gradients(keys[at : at + 20], np.ones((20, DIM)))
    assert len(store) <= 100 and len(table.rows()) >= 100


def test_misuse_is_refused_with_the_argument_and_its_value():
    with pytest.raises(ValueError, match="row_bytes should be at least 1 but is: 0"):
        MemoryStore(0)
    with pytest.raises(ValueError, match="capacity_rows should be at least 0 but is: -1"):
        MemoryStore(4, -1)
    with pytest.raises(ValueError, match=r"store should keep rows of 8 bytes for table 't' .* keeps: 12"):
        embstore.Table("t", dim=2, store=NullStore(12))
    with pytest.raises(RuntimeError, match="has no store below it"):
        embstore.Table("t", dim=2).flush()
    store = MemoryStore(8)
    table = embstore.Table("t", dim=2, store=store)
    with pytest.raises(RuntimeError, match="attached to another table"):
        embstore.Table("u", dim=2, store=store)
    with pytest.raises(RuntimeError, match="keeps no snapshots"):
        table.save_snapshot("s")
    with pytest.raises(ValueError, match=r"rows should have the shape \(1, 8\) in bytes"):
        store.put([1], np.zeros((1, 3), np.float32))


def test_a_python_store_that_answers_wrongly_is_named():
    class Wrong(DictStore):
        def get(self, keys):
            return (
                np.zeros((len(keys), 3), np.uint8),
                np.zeros(len(keys), np.uint64),
                np.ones(len(keys), bool),
            )

    table = embstore.Table("t", dim=2, store=Wrong(8))
    with pytest.raises(ValueError, match=r"get of .*Wrong.* should return rows of the shape \(2, 8\)"):
        table.find_or_insert([1, 2])
    assert len(table) == 0
