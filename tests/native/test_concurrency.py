"""Readers in threads while one trains, and tables in forked processes."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from native_tables import as_dict, small_table, values_of

import embstore


@pytest.mark.parametrize("max_capacity", [1024, 1 << 15])
def test_readers_see_whole_rows_while_one_thread_trains(max_capacity):
    table = small_table(9, optimizer=embstore.SGD(lr=0.0), max_capacity=max_capacity)
    emb = embstore.Embedding(table=table)
    reader = embstore.Embedding(table=table).eval()
    stop, problems = threading.Event(), []

    def read(seed):
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                keys = rng.integers(0, 8000, size=97)
                values, found = table.find(keys)
                out = reader(torch.from_numpy(keys)).numpy()
                rows = next(table.export(block_rows=50))
                table.stats()
                whole = np.repeat(keys[:, None], 9, 1).astype(np.float32)
                ok = (values[found] == whole[found]).all() and ((out == whole) | (out == 0)).all()
                ok &= (rows.values == rows.keys[:, None]).all()
                if not ok:
                    problems.append("torn row")
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(99)
    for _ in range(60):
        emb(torch.from_numpy(rng.integers(0, 8000, size=600))).sum().backward()
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert problems == []
    assert (table.stats().evictions > 0) == (max_capacity == 1024)


def test_two_threads_train_the_same_tables_in_any_order():
    tables = [
        small_table(
            2, name=n, optimizer=embstore.SGD(lr=1.0), initializer=embstore.Constant(0.0), max_capacity=4096
        )
        for n in "ab"
    ]
    problems = []

    def train(order):
        try:
            collection = embstore.EmbeddingCollection(order)
            for _ in range(50):
                ids = torch.arange(100)
                sum(v.sum() for v in collection({"a": ids, "b": ids}).values()).backward()
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=train, args=(o,)) for o in (tables, tables[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert problems == []
    for table in tables:
        assert (table.find(np.arange(100))[0] == -100.0).all()


class Looked(torch.utils.data.Dataset):
    """Items are read from a table inside the worker process."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.table.find_or_insert(np.arange(10000 * (i + 1), 10000 * (i + 1) + 50))  # in the worker only
        values, found = self.table.find(np.arange(i, i + 500))
        return torch.from_numpy(values[:, 0].copy()), bool(found.all())


@pytest.mark.timeout(100)
def test_a_forked_data_loader_worker_reads_its_own_copy_of_a_table():
    table = small_table(3, max_capacity=1 << 14)
    table.find_or_insert(np.arange(1000))  # starts the threads of the parent
    before = as_dict(table)
    loader = torch.utils.data.DataLoader(
        Looked(table), batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    emb = embstore.Embedding(table=table)
    for i, (values, found) in enumerate(loader):
        assert found.all()
        expected = torch.arange(500).repeat(8, 1) + torch.arange(8 * i, 8 * i + 8)[:, None]
        assert torch.equal(values, expected.float())
        emb.eval()(torch.arange(10))  # the parent goes on meanwhile
    assert as_dict(table) == before


@pytest.mark.timeout(60)
def test_a_forked_child_trains_and_leaves_the_parent_alone():
    table = small_table(2, optimizer=embstore.SGD(lr=1.0), max_capacity=1 << 14)
    emb = embstore.Embedding(table=table)
    emb(torch.arange(3000)).sum().backward()
    before = values_of(table)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _ in range(3):
                emb(torch.arange(6000)).sum().backward()
            code = 0 if len(table) == 6000 and (table.find([5])[0] == 1).all() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    after = values_of(table)
    assert all((after[k] == v).all() for k, v in before.items()) and len(after) == 3000


FORKS_BEFORE_ITS_FIRST_TABLE = """
import os
import embstore

if worker := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
table = embstore.Table("t", dim=2)
table.find_or_insert([1, 2])
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
table.find_or_insert([3])
os._exit(len(table))
"""


def test_a_worker_that_was_forked_before_the_first_table_can_fork_again():
    command = [sys.executable, "-c", FORKS_BEFORE_ITS_FIRST_TABLE]
    assert subprocess.run(command, timeout=60).returncode == 3
