"""Memory that cannot be had raises MemoryError, and the table stays usable."""

import subprocess
import sys

import numpy as np
import pytest
from native_tables import as_dict, small_table

import embstore

HUGE = 1_600_000_000


@pytest.mark.parametrize("bucket_capacity", [16, 128])
def test_a_first_capacity_beyond_the_machine_is_refused(bucket_capacity):
    with pytest.raises(MemoryError, match="rows needs .* bytes but only"):
        embstore.Table(
            "huge", dim=1 << 16, optimizer=embstore.Adam(), init_capacity=HUGE, max_capacity=HUGE,
            bucket_capacity=bucket_capacity,
        )  # fmt: skip


def test_a_table_that_cannot_grow_keeps_its_rows_and_works_on():
    table = small_table(1 << 16, optimizer=embstore.Adam(), max_capacity=HUGE)
    table.find_or_insert([1, 2, 3])
    before = as_dict(table)
    with pytest.raises(MemoryError, match="table 'small'"):
        table.reserve(1 << 30)
    assert as_dict(table) == before
    table.find_or_insert([4])
    assert len(table) == 4
    table.close()


# A limit of the address space stands for a machine without memory. The table grows until the system
# refuses, in the middle of batches; then every row must be whole and the table must go on.
PROGRAM = """
import resource, sys
import numpy as np, embstore
embstore.set_num_threads(int(sys.argv[2]))
if sys.argv[2] != "1":
    embstore.Table("warm", dim=1).find_or_insert(np.arange(100000))  # starts the threads
def make(name, strategy):
    return embstore.Table(name, dim=16, optimizer=embstore.Adam(lr=0.1), initializer=embstore.Debug(),
                          init_capacity=1024, score_strategy=strategy)
table = make("limited", sys.argv[1])
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * 4096
limit = used + (220 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
refused, start = 0, 0
for step in range(200):
    keys = np.arange(start, start + 20000)
    try:
        values = table.find_or_insert(keys)
        assert (values == (keys % 100000)[:, None]).all()
        start += 20000
    except MemoryError as error:
        assert "bytes" in str(error) or not str(error), str(error)
        refused += 1
        if refused == 3:
            break
assert refused == 3, refused
size = len(table)
assert size >= start > 0, (size, start)
count = 0
for rows in table.export(block_rows=1000):  # every row is whole, also those of the batch that failed
    assert (rows.values == (rows.keys % 100000)[:, None]).all() and (rows.states == 0).all()
    assert (rows.scores > 0).all()
    count += len(rows)
assert count == size == table.stats().size
known = np.arange(1000)
table.apply_gradients(known, np.ones((1000, 16)))
assert (table.find(known)[0] < known[:, None]).all()
assert table.erase(np.arange(5000)) == 5000
fresh = np.arange(10**9, 10**9 + 1000)
assert (table.find_or_insert(fresh) == (fresh % 100000)[:, None]).all()
try:
    make("another", "step").reserve(1 << 24)
except MemoryError:
    pass
else:
    raise AssertionError("a second large table fit into the limit")
print("fine")
"""


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("strategy", ["step", "no_eviction"])
def test_a_limit_of_the_address_space_raises_and_loses_nothing(strategy, threads):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, strategy, threads], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "fine"


def test_a_result_larger_than_memory_raises_and_the_pool_works_on():
    from embstore.arrays import empty_floats

    with pytest.raises(MemoryError, match="bytes"):
        empty_floats(1 << 30, 1 << 20)
    np.testing.assert_array_equal(small_table(2).find_or_insert([3]), [[3, 3]])
