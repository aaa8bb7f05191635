"""Rows that were not used for too long leave a table: `ttl` and `Table.expire`, with a dict as the oracle."""

import threading

import numpy as np
import pytest
from native_tables import as_dict, random_keys, small_table

import embstore
from embstore.stores import MemoryStore, row_bytes


def keys_of(table):
    return set(table.rows().keys.tolist())


def roomy(**keywords):
    return small_table(max_capacity=4096, **keywords)


@pytest.mark.parametrize("ttl", [1, 7, 40])
def test_a_row_goes_between_its_ttl_and_an_eighth_more_after_its_last_use(ttl):
    table = roomy(ttl=ttl)
    last_use, rng = {}, np.random.default_rng(ttl)
    for step in range(1, 120):
        keys = rng.zipf(1.3, 13) % 400
        table.find_or_insert(keys)
        last_use.update(dict.fromkeys(keys.tolist(), step))
        there = keys_of(table)
        assert {k for k, used in last_use.items() if step - used <= ttl} <= there
        assert there <= {k for k, used in last_use.items() if step - used <= ttl + ttl // 8}
    assert table.stats().expired == table.stats().inserts - len(table) > 0
    assert table.stats().evictions == 0


@pytest.mark.parametrize("ttl", [1, 7, 80])
def test_a_table_that_was_loaded_expires_the_same_ids_as_the_one_that_went_on(ttl, tmp_path):
    def train(table, first, last):
        for step in range(first, last):
            keys = np.random.default_rng(step).zipf(1.15, 19) % 3000
            table.find_or_insert(keys)
            table.apply_gradients(keys, np.ones((19, 4)))

    for cut in (ttl, ttl + 1, ttl + 2, ttl + ttl // 8 + 3, ttl + 33):
        table, back, copy = (roomy(ttl=ttl) for _ in range(3))
        train(table, 0, cut)
        embstore.dump(tmp_path / f"{cut}", {"model": {"small": table}}, optim=True)
        embstore.load(tmp_path / f"{cut}", {"model": {"small": back}}, optim=True)
        copy.load_state(table.state())
        for one in (table, back, copy):
            train(one, cut, cut + 2 * ttl + 3)
        assert as_dict(table) == as_dict(back) == as_dict(copy)


def test_an_expired_id_that_comes_back_begins_anew():
    table = roomy(ttl=3, optimizer=embstore.Adagrad(lr=1.0))
    table.find_or_insert([5])
    table.apply_gradients([5], np.ones((1, 4)))
    for _ in range(5):
        table.find_or_insert([6])
    assert np.array_equal(table.find_or_insert([5]), table.initial_values([5]))
    assert not table.read([5]).states.any()


def test_seconds_are_counted_by_the_clock_of_the_scores():
    table = roomy(score_strategy="timestamp", ttl=3600)
    now = table.score
    ages = np.array([0, 1000, 3599, 3700, 9000])
    table.insert_or_assign(np.arange(5), np.ones((5, 4)), scores=now - ages * 10**9)
    table.find_or_insert([77])
    assert keys_of(table) == {0, 1, 2, 77}
    assert table.expire(older_than=1500.5) == 1
    assert keys_of(table) == {0, 1, 77}
    assert table.stats().expired == 3


def test_expire_without_an_age_takes_the_ttl():
    table = roomy(ttl=5)
    for key in range(8):
        table.find_or_insert([key])
    before = keys_of(table)
    table.expire()
    assert keys_of(table) == {k for k in before if 7 - k <= 5}


@pytest.mark.parametrize("strategy", ["step", "customized", "lfu", "timestamp", "no_eviction"])
def test_below_score_removes_the_smaller_scores_of_any_strategy(strategy):
    table = roomy(score_strategy=strategy)
    keys = random_keys(1023, 700, 1)
    scores = np.random.default_rng(2).integers(1, 1000, 1023).astype(np.uint64)
    table.insert_or_assign(keys, np.ones((1023, 4)), scores=scores)
    oracle = {k: s for k, s in zip(keys.tolist(), scores.tolist())}
    gone = table.expire(below_score=313)
    assert keys_of(table) == {k for k, s in oracle.items() if s >= 313}
    assert gone == sum(s < 313 for s in oracle.values()) == table.stats().expired
    assert table.expire(below_score=313) == 0


def test_what_expired_is_a_deletion_in_the_changes():
    table = roomy(ttl=4)
    table.find_or_insert([1, 2, 3])
    table.track_changes()
    for _ in range(8):
        table.find_or_insert([2, 9])
    rows, removed = table.take_changes()
    assert sorted(removed) == [1, 3] and sorted(rows.keys) == [2, 9]
    table.find_or_insert([1])
    assert list(table.take_changes()[1]) == []


def test_a_snapshot_keeps_what_expires_after_it():
    table = roomy()
    table.find_or_insert(np.arange(97))
    before = as_dict(table)
    blocks = table.export(block_rows=10)
    assert table.expire(below_score=2) == 97
    assert {int(k) for block in blocks for k in block.keys} == set(before)


def test_the_expired_go_before_any_victim():
    # By occurrences alone, key 0 would be the last to go.
    table = small_table(ttl=80, evict_least_used=True)
    for _ in range(30):
        table.find_or_insert([0])
    for step in range(81):
        table.find_or_insert([1 + step % 3])
    table.find_or_insert(np.arange(10, 134))  # 128 rows: the table is full
    table.expire(older_than=10**6)  # nothing
    assert 0 in keys_of(table)
    table.find_or_insert([1000])
    assert 0 not in keys_of(table) and {1, 2, 3, 1000} <= keys_of(table)
    assert (table.stats().evictions, table.stats().expired) == (0, 1)


def test_gradients_of_a_batch_skip_rows_that_expired_meanwhile():
    torch = pytest.importorskip("torch")
    embedding = embstore.Embedding(4, score_strategy="step", initializer=embstore.Debug())
    out = embedding(torch.tensor([1, 2]))
    embedding.table.expire(below_score=2)
    out.sum().backward()
    assert len(embedding.table) == 0


def test_expiry_is_the_same_for_any_number_of_threads():
    def rows_with(threads):
        embstore.set_num_threads(threads)
        table = roomy(ttl=6, optimizer=embstore.Adam(lr=0.1))
        for step in range(40):
            keys = random_keys(997, 3000, step)
            table.find_or_insert(keys)
            table.apply_gradients(keys, np.ones((997, 4)))
        assert table.stats().expired > 0
        return as_dict(table)

    before = embstore.get_num_threads()
    try:
        assert rows_with(1) == rows_with(2) == rows_with(4)
    finally:
        embstore.set_num_threads(before)


# ---- over a store


def over_store(**keywords):
    optimizer = embstore.Adagrad(lr=0.1)
    store = MemoryStore(row_bytes(4, optimizer))
    options = {"init_capacity": 64, "max_capacity": 64, "bucket_capacity": 16, **keywords}
    return small_table(optimizer=optimizer, store=store, **options)


@pytest.mark.parametrize("trained", [True, False])
def test_over_a_store_the_same_ids_expire_as_in_memory(trained):
    options = {"ttl": 9, "optimizer": embstore.Adagrad(lr=0.1)}
    whole, cached = roomy(**options), over_store(**{k: v for k, v in options.items() if k != "optimizer"})
    for step in range(70):
        keys = np.random.default_rng(step).zipf(1.2, 17) % 900 - 300
        for table in (whole, cached):
            table.find_or_insert(keys)
            if trained:
                table.apply_gradients(keys, np.ones((17, 4)))
        assert as_dict(whole) == as_dict(cached)
    assert cached.stats().write_backs > 0
    assert cached.stats().expired == whole.stats().expired > 0


def test_over_a_store_expired_ids_are_deletions_in_the_changes():
    table = over_store(ttl=50)
    table.track_changes()
    table.find_or_insert(np.arange(40))
    for step in range(60):
        table.find_or_insert(np.arange(100 + 30 * (step % 2), 130 + 30 * (step % 2)))
    rows, removed = table.take_changes()
    assert sorted(removed) == list(range(40))
    assert sorted(rows.keys) == list(range(100, 160))


def test_rows_that_were_fetched_ahead_expire_by_the_score_they_have_below():
    table = over_store()
    table.insert_or_assign(np.arange(50), np.ones((50, 4)), scores=np.arange(1, 51))
    table.score = 1000
    table.find_or_insert(np.arange(100, 160))  # pushes most of them down
    held = table.prefetch([20, 40])
    assert table.expire(below_score=31) == 30
    assert table.contains([29, 30, 40]).tolist() == [False, True, True]
    del held


def test_a_store_that_fails_expires_nothing():
    class Failing(embstore.stores.Store):
        def __init__(self, bytes_):
            super().__init__(bytes_)

        def scan(self):
            raise OSError("the disk is gone")

        def get(self, keys):
            n = len(keys)
            return np.zeros((n, self.row_bytes), np.uint8), np.zeros(n, np.uint64), np.zeros(n, bool)

        def put(self, keys, rows, scores):
            raise OSError("the disk is gone")

        def erase(self, keys):
            pass

        def __len__(self):
            return 0

    optimizer = embstore.SGD()
    table = small_table(optimizer=optimizer, store=Failing(row_bytes(4, optimizer)))
    table.find_or_insert([1, 2, 3])
    with pytest.raises((OSError, RuntimeError), match="the disk is gone"):
        table.expire(older_than=0)
    assert keys_of_memory(table) == {1, 2, 3} and table.stats().expired == 0


def keys_of_memory(table):
    return {int(k) for rows in table.resident() for k in rows.keys}


def test_reads_go_on_while_rows_expire():
    table = roomy(score_strategy="timestamp", ttl=0.001)
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            values, found = table.find(np.arange(500))
            if not np.array_equal(values[found], table.initial_values(np.arange(500)[found])):
                failures.append("a row is torn")

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(300):
        table.find_or_insert(np.arange(500) if step % 3 else np.arange(1000, 1100))
    stop.set()
    reader.join()
    assert not failures


# ---- bad input


@pytest.mark.parametrize(
    ("strategy", "ttl"),
    [
        ("step", 0),
        ("step", 1.5),
        ("step", True),
        ("step", -3),
        ("timestamp", 0),
        ("timestamp", -1.0),
        ("timestamp", float("nan")),
        ("timestamp", float("inf")),
        ("timestamp", "1h"),
        ("lfu", 5),
        ("customized", 5),
    ],
)
def test_a_ttl_that_is_no_time_is_refused(strategy, ttl):
    with pytest.raises(ValueError, match="ttl"):
        small_table(score_strategy=strategy, ttl=ttl)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"older_than": -1}, {"older_than": 1.5}, {"below_score": -1}, {"older_than": 1, "below_score": 1}],
)
def test_expire_refuses_what_says_no_age_and_changes_nothing(arguments):
    table = small_table()
    table.find_or_insert([1, 2])
    with pytest.raises(ValueError, match="older_than|below_score"):
        table.expire(**arguments)
    assert keys_of(table) == {1, 2}


def test_a_device_tier_refuses_a_table_with_a_ttl():
    torch = pytest.importorskip("torch")
    from embstore.nn.device_tier import DeviceTier

    with pytest.raises(ValueError, match="ttl"):
        DeviceTier(small_table(ttl=5), torch.device("cpu"), 16)
