"""Rows of files, read in ranges and one by one: what numpy says of the whole array."""

import os

import numpy as np
import pytest

import embstore
from embstore.checkpoint import parts
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import crc32, open_regular
from embstore.checkpoint.parts import RowFile

ROWS, WIDTH, HEADER = 1023, 7, 13


@pytest.fixture
def stored(tmp_path):
    array = np.random.default_rng(0).random((ROWS, WIDTH)).astype(np.float32)
    (tmp_path / "rows").write_bytes(b"h" * HEADER + array.tobytes())
    return RowFile(tmp_path / "rows", "<f4", ROWS, WIDTH, HEADER), array


@pytest.mark.parametrize(("begin", "end"), [(0, ROWS), (0, 0), (5, 6), (1022, 1023), (97, 700)])
def test_a_range_of_rows_is_read_with_its_checksum(stored, begin, end):
    file, array = stored
    before, sums = len(os.listdir("/proc/self/fd")), {}
    np.testing.assert_array_equal(file.read(begin, end, sums), array[begin:end])
    assert len(os.listdir("/proc/self/fd")) == before
    whole = np.ascontiguousarray(array[begin:end])
    place = (HEADER + begin * 4 * WIDTH, whole.nbytes, crc32(whole))
    assert sums == ({str(file.path): [place]} if end > begin else {})


@pytest.mark.parametrize("gap_bytes", [0, 27, 28, 1024])
def test_rows_are_taken_by_number_in_any_order_whatever_lies_between_them(stored, gap_bytes, monkeypatch):
    monkeypatch.setattr(RowFile, "GAP_BYTES", gap_bytes)
    file, array = stored
    rng = np.random.default_rng(1)
    for rows in (
        [3],
        [3, 4],
        [1022, 0],
        [5, 5, 5],
        [0, 2, 3, 900],
        rng.integers(0, ROWS, 97),
        rng.permutation(ROWS),
    ):
        np.testing.assert_array_equal(file.take(np.asarray(rows)), array[rows])
    before = len(os.listdir("/proc/self/fd"))
    assert file.take(np.zeros(0, np.int64)).shape == (0, WIDTH)
    assert len(os.listdir("/proc/self/fd")) == before


def test_all_rows_are_mapped(stored, tmp_path):
    file, array = stored
    np.testing.assert_array_equal(file.mapped(), array)
    assert RowFile(tmp_path / "none", "<f4", 0, WIDTH).mapped().shape == (0, WIDTH)
    with pytest.raises(CheckpointError, match="is missing"):
        RowFile(tmp_path / "none", "<f4", 1, WIDTH).mapped()


def test_a_file_that_shrank_is_refused_and_not_read_as_zeros(stored):
    file, _ = stored
    os.truncate(file.path, HEADER + 4 * WIDTH * 1000 + 5)
    file.read(0, 1000)
    with pytest.raises(CheckpointError, match="the file ends 23 bytes too early"):
        file.read(0, 1001)
    with pytest.raises(CheckpointError, match="bytes too early"):
        file.take(np.array([0, 1022]))
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        file.mapped()


@pytest.mark.parametrize("kernel_reads_ahead", [False, True])
def test_reads_that_follow_each_other_share_a_descriptor(stored, kernel_reads_ahead, monkeypatch):
    """So the kernel reads ahead by itself; only where it reads little ahead it is told what comes next."""
    file, array = stored
    opened, told = [], []
    monkeypatch.setattr(parts, "_reads_ahead", lambda device: kernel_reads_ahead)
    monkeypatch.setattr(parts, "open_regular", lambda path: opened.append(open_regular(path)) or opened[-1])
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: told.append(given))
    before = len(os.listdir("/proc/self/fd"))
    with file.kept_open():
        blocks = [file.read(first, min(first + 97, ROWS)) for first in range(0, ROWS, 97)]
    np.testing.assert_array_equal(np.concatenate(blocks), array)
    assert len(opened) == 1 and len(os.listdir("/proc/self/fd")) == before
    assert bool(told) != kernel_reads_ahead
    file.read(0, 1)  # of no block any more
    assert len(opened) == 2 and len(os.listdir("/proc/self/fd")) == before
    file.path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="bytes too early"), file.kept_open():
        file.read(0, 1)
    assert len(os.listdir("/proc/self/fd")) == before
    file.path.unlink()
    with pytest.raises(CheckpointError, match="is missing"), file.kept_open():
        file.read(0, 1)


def test_a_load_opens_each_file_of_rows_once(tmp_path, monkeypatch):
    table, again = (embstore.Table("user", dim=7, optimizer=embstore.Adagrad()) for _ in range(2))
    table.find_or_insert(np.arange(200_000))
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    opened, before = [], len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(parts, "open_regular", lambda path: opened.append(path) or open_regular(path))
    embstore.load(tmp_path / "dump", {"model": {"user": again}}, optim=True)
    assert len(again) == 200_000 and len(opened) == len(set(opened)) == 4
    assert len(os.listdir("/proc/self/fd")) == before


def test_how_far_the_kernel_reads_ahead_is_asked_of_the_device(tmp_path):
    parts._reads_ahead.cache_clear()
    device = os.stat(tmp_path).st_dev
    setting = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    if os.path.exists(setting):
        with open(setting) as file:
            assert parts._reads_ahead(device) == (int(file.read()) >= parts.AMPLE_AHEAD_KB)
    assert not parts._reads_ahead(os.makedev(4095, 4095))  # there is no such device
