"""Rows of files that belong together, read block by block.

Files are read, not mapped: one that shrinks meanwhile raises CheckpointError instead of a bus error, and the
bytes that become rows are those whose checksum was taken.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import crc32, file_size, open_regular, read_into
from embstore.formats.dynamicemb import Floats, Part
from embstore.rows import Rows

Array = npt.NDArray[Any]
Pieces = dict[str, list[tuple[int, int, int]]]  # path -> (offset, bytes, crc)
Choose = Callable[[Array], Array]  # keys -> a mask of those that are wanted
AMPLE_AHEAD_KB = 4096  # read_ahead_kb of a device from which on nothing is announced


class RowFile:
    """A file of rows: `rows` times `width` elements behind `header_bytes`."""

    AHEAD_BYTES = 8 << 20  # the disk reads them while the rows before are placed
    GAP_BYTES = 1024  # rows this near to each other are read in one go

    def __init__(self, path: Path, dtype: Any, rows: int, width: int, header_bytes: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.shape = (rows, width)
        self._header_bytes = header_bytes
        self._announced = 0  # bytes of the file that the kernel was told about
        self._keeps, self._fd = False, -1  # the descriptor that reads of `kept_open` share

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * int(self.dtype.itemsize)

    def read(self, begin: int, end: int, sums: Pieces | None = None) -> Array:
        """Rows [begin, end). Adds their checksum to `sums`."""
        size = (end - begin) * self.row_bytes
        if size == 0:
            return np.empty((end - begin, self.shape[1]), self.dtype)
        raw = _core.empty_bytes(size)  # recycled: fresh pages cost more than the copy
        array: Array = raw.view(self.dtype).reshape(-1, self.shape[1])
        at = self._header_bytes + begin * self.row_bytes
        fd, self._fd = (self._fd if self._fd >= 0 else open_regular(self.path)), -1
        try:
            read_into(fd, self.path, at, raw)
            if not (self._keeps and _reads_ahead(os.fstat(fd).st_dev)):
                self._announce(fd, at + raw.nbytes)
        finally:
            if self._keeps:
                self._fd = fd
            else:
                os.close(fd)
        if sums is not None:
            sums.setdefault(str(self.path), []).append((at, raw.nbytes, crc32(raw)))
        return array

    def all(self) -> Array:
        return self.read(0, self.shape[0])

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Reads of the block share a descriptor, by which the kernel sees that they follow each other."""
        self._keeps = True
        try:
            yield
        finally:
            fd, self._fd, self._keeps = self._fd, -1, False
            if fd >= 0:
                os.close(fd)

    def _announce(self, fd: int, end: int) -> None:
        """Tells the kernel what is read next; each part once, since it looks up every page of it. What it
        reads by itself comes in larger pages, at twice the speed and a third of the CPU time."""
        if not end <= self._announced <= end + self.AHEAD_BYTES:
            self._announced = end
        if self._announced - end <= self.AHEAD_BYTES // 2:
            size = end + self.AHEAD_BYTES - self._announced
            os.posix_fadvise(fd, self._announced, size, os.POSIX_FADV_WILLNEED)
            self._announced += size

    def take(self, rows: Array) -> Array:
        """Rows by their numbers, in any order."""
        array = np.empty((len(rows), self.shape[1]), self.dtype)
        if array.size == 0:
            return array
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        # Runs of rows without a large gap between them are read together.
        breaks = np.flatnonzero(np.diff(ordered) * self.row_bytes > self.GAP_BYTES) + 1
        fd = open_regular(self.path)
        try:
            for run in np.split(np.arange(len(ordered)), breaks):
                first, last = int(ordered[run[0]]), int(ordered[run[-1]])
                block = np.empty((last + 1 - first, self.shape[1]), self.dtype)
                at = self._header_bytes + first * self.row_bytes
                read_into(fd, self.path, at, block.reshape(-1).view(np.uint8))
                array[order[run]] = block[ordered[run] - first]
        finally:
            os.close(fd)
        return array

    def mapped(self) -> Array:
        """All rows, without copying them."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        try:
            os.close(open_regular(self.path))
            return np.memmap(self.path, self.dtype, "r", self._header_bytes, self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be mapped: {error}") from error


@functools.lru_cache
def _reads_ahead(device: int) -> bool:
    """Whether the kernel reads so much ahead on this device that it needs no word of what comes next."""
    try:
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        return int(setting.read_text()) >= AMPLE_AHEAD_KB
    except (OSError, ValueError):  # a partition, another kernel
        return False


class PartReader:
    """The rows of one part, in the order of its files."""

    def __init__(self, part: Part, states: list[str], ages_from_ns: int | None, trusted: bool) -> None:
        self.part = part
        self._ages_from_ns = ages_from_ns
        self._files: dict[Path, RowFile] = {}
        self._keys = RowFile(part.keys, "<i8", part.rows, 1)
        words = part.words or ("score",)
        self._scores = RowFile(part.scores, "<u8", part.rows, len(words)) if part.scores else None
        self._uses = RowFile(part.uses, "<u4", part.rows, 1) if part.uses else None
        # Of a score of several words: the columns of the time and of the count.
        self._word = words.index("timestamp") if part.words else 0
        self._use_word = words.index("lfu") if part.words else None
        self._values = part.values
        self._states = [part.states[name] for name in states]
        self._add(part.values, part.rows)
        for name in states:
            keys = part.state_keys.get(name)
            self._add(part.states[name], part.rows if keys is None else file_size(keys) // 8)
        self._orders = [None if trusted else self._order(name) for name in states]

    def _add(self, floats: Floats, rows: int) -> None:
        self._files[floats.path] = RowFile(floats.path, "<f4", rows, floats.row_width)

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keeps the files open for reads that follow each other."""
        with contextlib.ExitStack() as stack:
            for file in (self._keys, self._scores, self._uses, *self._files.values()):
                if file is not None:
                    stack.enter_context(file.kept_open())
            yield

    def _order(self, state: str) -> Array | None:
        """Rows of a state table whose keys are in another order than those of the vectors."""
        path = self.part.state_keys.get(state)
        if path is None:
            return None
        keys = RowFile(path, "<i8", file_size(path) // 8, 1).all()[:, 0]
        ours = self.keys(0, self.part.rows)
        if np.array_equal(keys, ours):
            return None
        order = np.argsort(keys, kind="stable")
        at = np.searchsorted(keys, ours, sorter=order)
        at = order[np.minimum(at, max(len(keys) - 1, 0))] if len(keys) else np.zeros(0, np.int64)
        if len(at) != len(ours) or not np.array_equal(keys[at], ours):
            raise CheckpointError(f"{path}: some keys of {self.part.keys.name} are missing")
        return np.asarray(at)

    def keys(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        return self._keys.read(begin, end)[:, 0]

    def worths(self, begin: int, end: int) -> npt.NDArray[np.uint64]:
        """What decides who is evicted first: uses where they were counted, else scores."""
        scores, uses = self._worth(end - begin, lambda file: file.read(begin, end))
        return scores if uses is None else uses.astype(np.uint64)

    def scores(self, begin: int, end: int) -> npt.NDArray[np.uint64]:
        """Scores; ages are turned into the time of last use. 0 where there is no score file."""
        if self._scores is None:
            return np.zeros(end - begin, np.uint64)
        return self._times(self._scores.read(begin, end)[:, self._word])

    def _times(self, stored: Array) -> npt.NDArray[np.uint64]:
        if self._ages_from_ns is None:
            return stored
        with np.errstate(over="ignore"):
            times = np.int64(self._ages_from_ns) - stored.view(np.int64)
        return np.asarray(np.maximum(times, 1).view(np.uint64))

    def read(self, begin: int, end: int, choose: Choose | None = None, sums: Pieces | None = None) -> Rows:
        """Rows [begin, end), or those of them whose keys are chosen. Adds checksums to `sums`."""
        keys = self._keys.read(begin, end, sums)[:, 0]
        mine = None if choose is None else choose(keys)
        read: dict[Path, Array] = {}
        for floats, order in [(self._values, None), *zip(self._states, self._orders)]:
            if order is None and floats.path not in read:
                read[floats.path] = self._files[floats.path].read(begin, end, sums)
        columns = [_columns(read[self._values.path], self._values)]
        for floats, order in zip(self._states, self._orders):
            raw = read[floats.path] if order is None else self._files[floats.path].take(order[begin:end])
            columns.append(_columns(raw, floats))
        scores, uses = self._worth(end - begin, lambda file: file.read(begin, end, sums))
        rows = _joined(keys, scores, columns, uses)
        return rows if mine is None else rows[mine]

    def _worth(self, n: int, read: Callable[[RowFile], Array]) -> tuple[Array, Array | None]:
        """Scores and uses of n rows."""
        scores: Array = np.zeros(n, np.uint64)
        uses: Array | None = None
        if self._scores is not None:
            words = read(self._scores)
            scores = self._times(np.ascontiguousarray(words[:, self._word]))
            if self._use_word is not None:
                uses = np.minimum(words[:, self._use_word], np.uint64(0xFFFF_FFFF)).astype(np.uint32)
        if self._uses is not None:
            uses = read(self._uses)[:, 0]
        return scores, uses

    def take(self, rows: Array) -> Rows:
        """Rows by their numbers."""
        columns = [
            _columns(self._files[floats.path].take(rows if order is None else order[rows]), floats)
            for floats, order in [(self._values, None), *zip(self._states, self._orders)]
        ]
        scores, uses = self._worth(len(rows), lambda file: file.take(rows))
        return _joined(self._keys.take(rows)[:, 0], scores, columns, uses)

    # ---- whole columns, mapped from the files where that is possible

    def mapped_keys(self) -> npt.NDArray[np.int64]:
        return self._keys.mapped()[:, 0]

    def mapped_values(self) -> npt.NDArray[np.float32]:
        return _columns(self._files[self._values.path].mapped(), self._values)

    def mapped_state(self, i: int) -> npt.NDArray[np.float32]:
        floats, order = self._states[i], self._orders[i]
        mapped = _columns(self._files[floats.path].mapped(), floats)
        return mapped if order is None else mapped[order]


def _columns(raw: Array, floats: Floats) -> Array:
    return raw[:, floats.begin : floats.begin + floats.width]


def _joined(keys: Array, scores: Array, columns: list[Array], uses: Array | None) -> Rows:
    values, *states = columns
    if not states:
        joined: Array = np.empty((len(keys), 0), np.float32)
    else:
        joined = states[0] if len(states) == 1 else np.concatenate(states, axis=1)
    return Rows(keys, values, joined, scores, uses)
