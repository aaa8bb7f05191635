"""Rows that training has not used for a while leave the embedding and its files: `ttl` of a store."""

import numpy as np
import pytest
import torch

import one_embedding as oe

STORES = {
    "device_mem": lambda path, **more: oe.make_device_mem_store_options(str(path), 100, **more),
    "cached_host_mem": lambda path, **more: oe.make_cached_host_mem_store_options(1, str(path), 100, **more),
    "cached_ssd": lambda path, **more: oe.make_cached_ssd_store_options(1, str(path), **more),
}
SECOND = 10**9


def make(store):
    return oe.MultiTableEmbedding("aging", 4, torch.float, torch.int64, None, store)


def train(embedding, *ids):
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor(ids)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", STORES)
def test_snapshots_keep_the_ages_by_which_rows_expire(kind, tmp_path):
    embedding = make(STORES[kind](tmp_path))
    table = embedding.table
    ages = np.array([3700, 3500]) * SECOND
    table.insert_or_assign([1, 2], np.ones((2, 4)), scores=table.score - ages)
    embedding.save_snapshot("monday")
    embedding.close()
    back = make(STORES[kind](tmp_path, ttl=3600))
    back.load_snapshot("monday")
    assert sorted(back.table) == [1, 2]
    train(back, 3)
    assert sorted(back.table) == [2, 3] and back.table.stats().expired == 1
    back.save_snapshot("tuesday")
    assert sorted(np.concatenate([keys for keys, _, _ in back.store.scan()])) == [2, 3]
    back.close()


@pytest.mark.parametrize("kind", STORES)
def test_rows_of_unknown_age_count_as_used_when_they_are_loaded(kind, tmp_path):
    folder = tmp_path / "0-1"
    with oe.make_persistent_table_writer([str(folder)], "original", np.int64, np.float32, 4) as writer:
        writer.write(np.arange(50), np.ones((50, 4), np.float32))
    embedding = make(STORES[kind](tmp_path, ttl=3600))
    embedding.load_snapshot("original")
    for _ in range(3):
        train(embedding, 3, 60)
    assert len(list(embedding.table)) == 51 and embedding.table.stats().expired == 0
    assert embedding.eval()(torch.tensor([7])).tolist() == [[1.0] * 4]
    embedding.close()


def test_what_expired_makes_room_in_a_full_store(tmp_path):
    embedding = make(oe.make_device_mem_store_options(str(tmp_path), 10, ttl=3600))
    table = embedding.table
    old = np.full(10, table.score - 3700 * SECOND)
    table.insert_or_assign(np.arange(10), np.ones((10, 4)), scores=old)
    table.expire()
    train(embedding, *range(100, 110))
    assert sorted(embedding.table) == list(range(100, 110))
    with pytest.raises(RuntimeError, match="is full"):
        train(embedding, 500)
    embedding.close()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("ttl", [0, -1, float("nan"), "1h", True])
def test_a_time_that_is_none_is_refused(kind, ttl, tmp_path):
    with pytest.raises(ValueError, match="ttl should be a number of seconds but is"):
        STORES[kind](tmp_path, ttl=ttl)


def test_without_a_ttl_the_options_are_those_of_the_original(tmp_path):
    for make_options in STORES.values():
        assert set(make_options(tmp_path)) == {"kv_store", "size_factor", "storage_dim"}
