"""Look-ahead: the same rows as without, and fewer rows fetched inside of the step."""

import numpy as np
import pytest
import torch

import embstore
from embstore.lookahead import LookAhead
from embstore.stores import MemoryStore, SsdStore, TieredStore, row_bytes

DIM = 8
OPTIMIZER = embstore.Adam(lr=0.1)
ROW_BYTES = row_bytes(DIM, OPTIMIZER)


def tables(store, capacity=2048):
    cached = embstore.Table(
        "t", dim=DIM, optimizer=OPTIMIZER, store=store, init_capacity=128, max_capacity=capacity
    )
    return cached, embstore.Table("t", dim=DIM, optimizer=OPTIMIZER)


def step(table, keys):
    vectors = table.find_or_insert(keys)
    table.apply_gradients(keys, 2 * (vectors - 1.0))


def batches(count, seed):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 20_000, 300)) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 3])
def test_training_with_look_ahead_gives_the_rows_of_training_without(tmp_path, depth):
    with SsdStore(tmp_path, ROW_BYTES) as store:
        cached, twin = tables(store)
        work = batches(120, 0)
        loader = torch.utils.data.DataLoader(work, batch_size=None)
        for keys in LookAhead(loader, cached.prefetch, depth=depth):
            step(cached, keys)
            step(twin, keys)
        np.testing.assert_array_equal(cached.rows().keys, twin.rows().keys)
        np.testing.assert_array_equal(cached.rows().values, twin.rows().values)
        assert cached.stats().fetches > 1000
        cached.close()


def test_rows_of_the_coming_batch_are_up_when_it_comes():
    cached, twin = tables(MemoryStore(ROW_BYTES))
    for keys in batches(60, 1):
        step(cached, keys)
        step(twin, keys)
    known = [keys[cached.contains(keys)] for keys in batches(20, 2)]
    # One batch at a time is asked for, so that nothing is fetched beside the step.
    for keys in known:
        (same,) = LookAhead([keys], cached.prefetch)
        held = cached.prefetch(same)
        fetches = cached.stats().fetches
        np.testing.assert_array_equal(cached.find_or_insert(same), twin.find(same)[0])
        assert cached.stats().fetches == fetches
        del held


def test_a_failing_prefetch_is_raised_when_its_batch_is_due():
    def prefetch(batch):
        if batch == 2:
            raise OSError("no disk")

    seen = []
    with pytest.raises(OSError, match="no disk"):
        for batch in LookAhead(range(5), prefetch):
            seen.append(batch)
    assert seen == [0, 1]
    with pytest.raises(ValueError, match="depth should be an integer of at least 1 but is: 0"):
        LookAhead([], prefetch, depth=0)


def test_memory_over_ssd_over_another_store(tmp_path):
    lowest = MemoryStore(ROW_BYTES)
    with SsdStore(tmp_path, ROW_BYTES) as ssd:
        tiers = TieredStore(ssd, lowest, upper_rows=3000)
        cached, twin = tables(tiers, capacity=1024)
        for keys in batches(80, 3):
            step(cached, keys)
            step(twin, keys)
        assert len(lowest) > 0 and 0 < len(ssd) <= 3300 and cached.stats().write_backs > 0
        keys = np.arange(20_000)
        np.testing.assert_array_equal(cached.find(keys)[0], twin.find(keys)[0])
        np.testing.assert_array_equal(cached.rows().states, twin.rows().states)
        gone = keys[::3]
        assert cached.erase(gone) == twin.erase(gone)
        np.testing.assert_array_equal(cached.contains(keys), twin.contains(keys))
        cached.flush()
        assert len(lowest) == len(tiers) == len(twin)
        del cached
    with pytest.raises(RuntimeError, match="attached to another"):
        TieredStore(lowest, MemoryStore(ROW_BYTES), 5)
    with pytest.raises(ValueError, match="lower should keep rows of 8 bytes .* keeps: 12"):
        TieredStore(MemoryStore(8), MemoryStore(12), 5)
