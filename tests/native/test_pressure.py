"""Tables that do not fit their stream say so once, with what to do."""

import logging

import numpy as np
import pytest
from native_tables import small_table

import embstore
from embstore import pressure
from embstore.stores import MemoryStore, row_bytes


@pytest.fixture(autouse=True)
def watching_every_batch(monkeypatch):
    monkeypatch.setattr(pressure, "EVERY", 1)


def messages(caplog):
    return [r.message for r in caplog.records if r.name == "embstore"]


def test_a_table_that_evicts_heavily_says_so_once(caplog):
    table = small_table(name="user")
    for step in range(20):
        table.find_or_insert(np.arange(100) + 100 * step)
    (message,) = messages(caplog)
    assert "table 'user' evicted" in message and "max_capacity (now 128)" in message
    assert "shared_rows=1" in message and "advise()" in message
    assert caplog.records[0].levelno == logging.WARNING


def test_it_says_so_again_after_an_hour(caplog, monkeypatch):
    table, now = small_table(), 1000.0
    monkeypatch.setattr(pressure.time, "monotonic", lambda: now)
    for step in range(20):
        table.find_or_insert(np.arange(100) + 100 * step)
        now += 600
    assert len(messages(caplog)) == 4  # at steps 1, 7, 13 and 19


def test_a_table_with_room_or_little_eviction_says_nothing(caplog):
    table = small_table()
    for step in range(200):
        table.find_or_insert(np.concatenate([np.arange(100), [1000 + step]]))
    assert table.stats().evictions > 50
    assert messages(caplog) == []


def test_a_table_that_refuses_keys_says_so(caplog):
    table = small_table()
    for step in range(3):
        table.find_or_insert(np.arange(200) + 200 * step)
    assert any("no room for" in m and "smaller batches" in m for m in messages(caplog))


def test_a_table_that_grows_beyond_its_limit_says_so(caplog):
    table = small_table(score_strategy="no_eviction")
    for step in range(4):
        table.find_or_insert(np.arange(100) + 100 * step)
    (message,) = messages(caplog)
    assert "more than its max_capacity of 128" in message and "ttl" in message


def test_over_a_store_eviction_is_no_loss_but_growth_is_told(caplog):
    table = small_table(store=MemoryStore(row_bytes(4, embstore.SGD())))
    for step in range(10):
        table.find_or_insert(np.arange(100) + 100 * step)
    assert messages(caplog) == []
    for step in range(3):
        table.find_or_insert(np.arange(500) + 500 * step)
    (message,) = messages(caplog)
    assert "a batch needs more rows than that at once" in message


def test_modules_are_watched_in_training_alone(caplog):
    torch = pytest.importorskip("torch")
    embedding = embstore.Embedding(2, max_capacity=128, score_strategy="step")
    for step in range(5):
        embedding(torch.arange(100) + 100 * step)
    assert len(messages(caplog)) == 1
    caplog.clear()
    fresh = embstore.Embedding(2, max_capacity=128, score_strategy="step").eval()
    for step in range(5):
        fresh(torch.arange(100) + 100 * step)
    assert messages(caplog) == []
