"""Stores by URL: which ones there are, and what several users of one URL meet."""

import subprocess
import sys

import numpy as np
import pytest

import embstore
from embstore.stores import SsdStore
from embstore.stores.urls import is_shared, open_store, tiers

KEYS = np.array([5, -9, 2**40])
ROWS = np.arange(3 * 12, dtype=np.uint8).reshape(3, 12)
ONES = np.ones(3, np.uint64)


@pytest.mark.parametrize("scheme", ["memory", "ssd"])
def test_one_process_meets_one_store_for_each_table_and_column(scheme, tmp_path):
    url = f"{scheme}://{tmp_path}"
    store = open_store(url, table="emb.t/x", tensor_bytes=[8, 4])
    store.put(KEYS, ROWS, ONES)
    assert open_store(url, table="emb.t/x", tensor_bytes=[8, 4]) is store
    assert not open_store(url, table="emb.t/x", tensor_bytes=[8, 4], column=1).get(KEYS)[2].any()
    assert not open_store(url, table="other", tensor_bytes=[8, 4]).get(KEYS)[2].any()
    with pytest.raises(ValueError, match="should have 12 bytes, as they were stored, but have: 8"):
        open_store(url, table="emb.t/x", tensor_bytes=[8])
    assert not is_shared(url)


def test_an_ssd_store_begins_with_what_another_process_flushed(tmp_path):
    program = (
        "import sys, numpy as np\n"
        "from embstore.stores.urls import open_store\n"
        "store = open_store('ssd://' + sys.argv[1], table='t', tensor_bytes=[4])\n"
        "keys = np.arange(100); found = store.contains(keys).sum()\n"
        "for n in (40, 70):\n"
        "    store.put(keys[:n], np.full((n, 4), n, np.uint8), np.ones(n, np.uint64)); store.flush()\n"
        "store.put(keys, np.zeros((100, 4), np.uint8), np.ones(100, np.uint64))\n"
        "print(found)"
    )
    for expected in ("0", "70"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected


TRAIN = """
import sys
import numpy as np
import embstore
from embstore.stores.urls import tiers

urls, step = sys.argv[1:-1], int(sys.argv[-1])
options = embstore.TableOptions(name="user", dim=4, max_capacity=128)
table = embstore.Table(options, store=tiers(*urls, upper_rows=200)(options, 0))
keys = np.arange(1000)
for part in np.array_split(keys, 10):
    np.testing.assert_array_equal(table.find(part)[0], np.full((100, 4), step))
    table.insert_or_assign(part, np.full((100, 4), step + 1))
table.flush()
table.save_snapshot("monday")
table.insert_or_assign(keys, np.full((1000, 4), -1))  # never flushed
"""


@pytest.mark.multirank
@pytest.mark.parametrize("upper", ["", "memory://near", "ssd://{}/near"])
def test_a_new_process_opens_what_the_table_above_flushed(tmp_path, upper):
    urls = [upper.format(tmp_path)] * bool(upper) + [f"ssd://{tmp_path}/far"]
    for step in range(2):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, *urls, str(step)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_a_url_whose_store_was_closed_opens_again(tmp_path):
    url = f"ssd://{tmp_path}"
    with open_store(url, table="t", tensor_bytes=[12]) as store:
        store.put(KEYS, ROWS, ONES)
        store.flush()
    again = open_store(url, table="t", tensor_bytes=[12])
    np.testing.assert_array_equal(again.get(KEYS)[0], ROWS)


def test_what_an_older_version_flushed_is_opened_and_other_snapshots_stay(tmp_path):
    keys, rows = np.arange(3), np.arange(12, dtype=np.uint8).reshape(3, 4)
    with SsdStore(tmp_path / "t-0", 4) as store:
        for name, count in (("saved-9", 2), ("saved-10", 3), ("monday", 1), ("saved-friday", 1)):
            store.clear()
            store.put(keys[:count], rows[:count])
            store.snapshot(name)
    store = open_store(f"ssd://{tmp_path}", table="t", tensor_bytes=[4])
    np.testing.assert_array_equal(store.get(keys)[0], rows)
    store.put([7], rows[:1], np.ones(1, np.uint64))
    store.flush()
    assert store.snapshots() == ["flushed", "monday", "saved-friday"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("plain", "url should be scheme"),
        ("ftp://x", r"should be one of \['memory', 'ssd', 'redis', 'rediss'.* but is: ftp"),
        ("ssd://relative", "should be ssd:///path but its path is: 'relative'"),
    ],
)
def test_a_wrong_url_is_named(url, text):
    with pytest.raises(ValueError, match=text):
        open_store(url, table="t", tensor_bytes=[4])


def test_a_wrong_url_of_an_upper_tier_is_named():
    with pytest.raises(ValueError, match="should be ssd:///path but its path is: 'relative'"):
        tiers("ssd://relative", "memory://x", upper_rows=1)(embstore.TableOptions(name="t", dim=1), 0)
