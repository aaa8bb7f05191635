"""`max_bytes`, `set_max_capacity`: tables that keep to a budget in bytes, and whose limit moves."""

import numpy as np
import pytest
from native_tables import as_dict, hash_of, random_keys, small_table

import embstore
from embstore.stores import MemoryStore, row_bytes

# ---- max_bytes


@pytest.mark.parametrize("max_bytes", [30_000, 1 << 20, 12_345_678])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_capacity": 16, "dtype": "float16"}, {"admission_threshold": 1}]
)
def test_a_full_table_takes_at_most_its_bytes_and_most_of_them(max_bytes, options):
    table = embstore.Table("t", dim=7, optimizer=embstore.Adagrad(), max_bytes=max_bytes, **options)
    capacity = table.options.max_capacity
    for step in range(8):
        keys = np.random.default_rng(step).integers(-(2**63), 2**63, capacity, dtype=np.int64)
        table.find_or_insert(keys)
    assert len(table) == capacity
    assert 0.7 * max_bytes < table.stats().bytes <= max_bytes


def test_a_module_counts_what_its_default_strategy_needs():
    torch = pytest.importorskip("torch")
    embedding = embstore.Embedding(8, max_bytes=1 << 20)
    table = embedding.table
    for step in range(6):
        embedding(torch.arange(5000) + 3000 * step)
    assert len(table) == table.options.max_capacity and len(table.shared_rows()) == 1
    assert 0.7 * (1 << 20) < table.stats().bytes <= 1 << 20


def test_max_bytes_reads_as_the_rows_it_gives():
    options = embstore.TableOptions(name="t", dim=16, max_bytes=10**6)
    assert options.max_bytes is None
    assert options.full_bytes(options.max_capacity) <= 10**6 < options.full_bytes(options.max_capacity + 1)
    assert embstore.Table(options, seed=4).options.max_capacity == options.max_capacity


@pytest.mark.parametrize("value", [0, -5, 100, 2.5, "1GB", True])
def test_bytes_that_hold_no_bucket_are_refused(value):
    with pytest.raises(ValueError, match="max_bytes"):
        embstore.Table("t", dim=16, max_bytes=value)


def test_max_bytes_comes_instead_of_max_capacity():
    with pytest.raises(ValueError, match="max_bytes.*max_capacity"):
        embstore.Table("t", dim=16, max_bytes=10**6, max_capacity=1000)


# ---- a limit that moves


def filled(n=1000, **keywords):
    options = {"max_capacity": 1000, "bucket_capacity": 16, "optimizer": embstore.Adagrad(lr=0.1), **keywords}
    table = small_table(**options)
    keys = np.random.default_rng(0).permutation(n) - n // 2
    for part in np.array_split(keys, 10):
        table.find_or_insert(part)
        table.apply_gradients(part, np.ones((len(part), 4)))
    return table


@pytest.mark.parametrize("rows", [16, 97, 500, 999])
def test_a_smaller_limit_keeps_the_rows_with_the_largest_scores(rows):
    table = filled()
    before = as_dict(table)
    table.set_max_capacity(rows)
    kept = sorted(before, key=lambda key: (before[key][2], hash_of(key)))[-rows:]
    assert as_dict(table) == {key: before[key] for key in kept}
    assert table.stats().evictions == 1000 - rows
    assert table.stats().max_capacity == table.options.max_capacity == rows
    assert table.stats().bytes <= table.options.full_bytes(rows)
    table.find_or_insert(np.arange(5000, 5010))
    assert len(table) == rows and table.contains(np.arange(5000, 5010)).all()


def test_a_larger_limit_makes_room():
    table = filled()
    before = as_dict(table)
    table.set_max_capacity(3000)
    assert as_dict(table) == before
    table.find_or_insert(np.arange(10_000, 12_000))
    assert len(table) == 3000 and table.stats().evictions == 0


def test_rows_of_a_live_batch_stay_and_get_their_gradients():
    torch = pytest.importorskip("torch")
    twins = [
        embstore.Embedding(
            4,
            max_capacity=4096,
            seed=1,
            bucket_capacity=16,
            score_strategy="step",
            optimizer=embstore.SGD(lr=1.0),
        )
        for _ in range(2)
    ]
    for embedding, shrinks in zip(twins, (True, False)):
        out = embedding(torch.arange(100))
        embedding(torch.arange(100, 2000)).sum().backward()
        if shrinks:
            embedding.table.set_max_capacity(64)
            assert len(embedding.table) == 100  # of the batch that waits
        out.sum().backward()
    rows = twins[0].table.rows()
    assert rows.keys.tolist() == list(range(100))
    assert np.array_equal(rows.values, twins[1].table.find(np.arange(100))[0])


def test_rows_that_leave_are_deletions_and_the_others_keep_their_marks():
    table = filled()
    table.track_changes()
    table.find_or_insert([-500, -499])
    table.set_max_capacity(100)
    rows, removed = table.take_changes()
    assert sorted(rows.keys) == [-500, -499]
    assert len(removed) == 900 and not table.contains(removed).any()
    table.find_or_insert([-500])
    assert list(table.take_changes()[0].keys) == [-500]


def test_a_snapshot_reads_on_while_the_limit_moves():
    table = filled()
    before = as_dict(table)
    blocks = table.export(block_rows=7)
    first = next(blocks)
    table.set_max_capacity(50)
    table.find_or_insert(np.arange(9000, 9040))
    keys = [first.keys] + [block.keys for block in blocks]
    assert set(np.concatenate(keys).tolist()) == set(before)
    assert len(np.concatenate(keys)) == 1000
    assert len(table) == 50


def test_over_a_store_rows_that_leave_go_down():
    optimizer = embstore.Adagrad(lr=0.1)
    table = filled(store=MemoryStore(row_bytes(4, optimizer)), max_capacity=2000)
    before = as_dict(table)
    table.set_max_capacity(100)
    assert len(table) == 100 and table.stats().write_backs >= 900
    assert as_dict(table) == before
    table.set_max_capacity(1500)
    table.find_or_insert(np.array(sorted(before))[:1200])
    assert {key: row[:2] for key, row in as_dict(table).items()} == {k: r[:2] for k, r in before.items()}


def test_least_used_rows_leave_first_where_the_table_counts_uses():
    table = filled(evict_least_used=True)
    for _ in range(3):
        table.find_or_insert(np.arange(-500, -400))
    table.find_or_insert(np.arange(0, 500))  # newer, but used less
    table.set_max_capacity(100)
    assert sorted(table.rows().keys) == list(range(-500, -400))
    table.find_or_insert([7])  # the counts have moved with their rows
    assert len(table) == 100 and table.contains([7]).all()


def test_limits_that_cannot_be_are_refused_and_change_nothing():
    table = filled()
    before = as_dict(table)
    for rows in (0, -5, 2**40):
        with pytest.raises(ValueError, match="rows|max_capacity"):
            table.set_max_capacity(rows)
    assert as_dict(table) == before and table.options.max_capacity == 1000
    with pytest.raises(ValueError, match="evicts nothing"):
        small_table(score_strategy="no_eviction").set_max_capacity(200)


def test_the_same_limit_gives_the_same_rows_for_any_number_of_threads():
    def rows_with(threads):
        embstore.set_num_threads(threads)
        table = filled()
        for limit in (300, 700, 64, 900):
            table.set_max_capacity(limit)
            keys = random_keys(400, 3000, limit)
            table.find_or_insert(keys)
            table.apply_gradients(keys, np.ones((400, 4)))
        return as_dict(table)

    before = embstore.get_num_threads()
    try:
        assert rows_with(1) == rows_with(4)
    finally:
        embstore.set_num_threads(before)
