"""Stores by URL: which ones there are, and what several users of one URL meet."""

import subprocess
import sys

import numpy as np
import pytest

from embstore.store_urls import is_shared, open_store

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
        "from embstore.store_urls import open_store\n"
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
