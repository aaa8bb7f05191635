"""Rows of files, read in ranges and one by one: what numpy says of the whole array."""

import os

import numpy as np
import pytest

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import crc32
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
