"""A fork, or the end of a snapshot, while another thread is inside a store that is written in Python.

Each scenario runs in a process of its own: where it hangs, it holds the GIL and nothing else can end it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

COMMON = """
import os, sys, threading, time
import numpy as np
import embstore
from embstore.stores import Store, row_bytes

class Slow(Store):
    '''A store that takes its time, with a lock of its own.'''
    def __init__(self):
        super().__init__(row_bytes(2))
        self.rows, self.lock, self.inside, self.slow = {}, threading.Lock(), threading.Event(), 0.0
    def get(self, keys):
        with self.lock:
            if self.slow:
                self.inside.set()
                time.sleep(self.slow)
            found = np.array([int(k) in self.rows for k in keys], bool)
            rows = np.zeros((len(keys), self.row_bytes), np.uint8)
            for i in np.flatnonzero(found):
                rows[i] = self.rows[int(keys[i])]
            return rows, np.ones(len(keys), np.uint64), found
    def put(self, keys, rows, scores):
        with self.lock:
            for key, row in zip(keys, rows):
                self.rows[int(key)] = row.copy()
    def erase(self, keys):
        for key in keys:
            self.rows.pop(int(key), None)
    def scan(self):
        keys = np.array(list(self.rows), np.int64)
        yield keys, *self.get(keys)[:2]
    def __len__(self):
        return len(self.rows)

store = Slow()
table = embstore.Table("t", dim=2, store=store, init_capacity=64, max_capacity=64, bucket_capacity=16,
                       optimizer=embstore.SGD(lr=1.0), initializer=embstore.Constant(0.0))
keys = np.arange(200)
for at in range(0, 200, 20):
    table.insert_or_assign(keys[at : at + 20], np.full((20, 2), at))
expected = np.repeat(np.arange(0, 200, 20), 20)[:, None].repeat(2, 1)
table.flush()

def beside(work):
    '''Runs it on a thread and returns once that is inside the store.'''
    store.slow = 0.5
    thread = threading.Thread(target=work)
    thread.start()
    assert store.inside.wait(20)
    return thread

def both_work(thread):
    child = os.fork()
    store.slow = 0.0
    if child == 0:
        code = 1
        try:
            assert (table.find(keys)[0] == expected).all()
            table.insert_or_assign(keys[:20], np.full((20, 2), -1.0))
            assert (table.find(keys[:20])[0] == -1).all()
            code = 0
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    thread.join()
    assert (table.find(keys)[0] == expected).all()
    return status
"""

SCENARIOS = {
    "a lookup under the lock of the table": """
        assert both_work(beside(lambda: table.find(keys))) == 0
    """,
    "training under the lock of the table": """
        assert both_work(beside(lambda: table.find_or_insert(keys[:30]))) == 0
    """,
    "a prefetch without the lock of the table": """
        assert both_work(beside(lambda: table.prefetch(keys[:30]))) == 0
    """,
    "a reader of a snapshot": """
        assert both_work(beside(lambda: table.rows())) == 0
    """,
    "the end of a snapshot": """
        snapshot = table.snapshot()
        thread = beside(lambda: table.find_or_insert(keys[:30]))
        del snapshot
        thread.join()
    """,
    "the end of a table and the start of another": """
        other = embstore.Table("other", dim=2)
        thread = beside(lambda: table.find_or_insert(keys[:30]))
        forker = threading.Thread(target=lambda: both_work(thread))
        forker.start()
        time.sleep(0.1)
        del other
        embstore.Table("third", dim=2).find_or_insert([1])
        forker.join()
    """,
    "two forks at once": """
        thread = beside(lambda: table.find_or_insert(keys[:30]))
        forkers = [threading.Thread(target=lambda: both_work(thread)) for _ in range(2)]
        for forker in forkers: forker.start()
        for forker in forkers: forker.join()
    """,
}


def run(scenario: str, seconds: float) -> subprocess.CompletedProcess[str]:
    script = COMMON + textwrap.dedent(scenario) + "\nprint('done')\n"
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_nothing_waits_for_ever_beside_a_thread_inside_a_python_store(scenario: str) -> None:
    result = run(SCENARIOS[scenario], 60)
    assert result.stdout.endswith("done\n"), result.stderr


def test_a_snapshot_belongs_to_the_process_that_took_it() -> None:
    result = run(
        """
        snapshot = table.snapshot()
        child = os.fork()
        if child == 0:
            try:
                snapshot.rows
            except RuntimeError as error:
                print(error, flush=True)
            table.insert_or_assign(keys[:20], np.full((20, 2), -1.0))
            del snapshot
            assert len(table.rows()) == 200
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert snapshot.rows == 200
        """,
        60,
    )
    assert "taken by another process and cannot be read after fork" in result.stdout, result.stderr
    assert result.stdout.endswith("done\n"), result.stderr
