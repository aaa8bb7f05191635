"""Rows in memory as the names and values of Redis.

compatible  head + id + "_cid_0_osid_0", head + id + "_cid_0_osid_1"    a tensor each
packed      head + id + "_cid_0"                                        the row and its score
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from embstore import _core
from embstore.arrays import address
from embstore.stores import FoundArray, KeyArray, RowArray, ScoreArray

SCORE_BYTES = 8

Value = list[tuple[int, int, int]]  # its pieces: address in row 0, bytes from row to row, bytes


class Layout:
    """The Redis keys of an id, and what each holds."""

    def __init__(self, head: str, tail: str, tensor_bytes: Sequence[int], packed: bool) -> None:
        self.head, self.packed = head, packed
        self.tensor_bytes = list(tensor_bytes)
        self.tails = [tail] if packed else [f"{tail}_osid_{k}" for k in range(len(tensor_bytes))]
        self.value_bytes = [sum(tensor_bytes) + SCORE_BYTES] if packed else self.tensor_bytes

    def names(self, ids: KeyArray) -> list[str]:
        """The names of all values of these ids, id after id."""
        return [f"{self.head}{i}{tail}" for i in ids.tolist() for tail in self.tails]

    def complete(self, ids: KeyArray, lengths: Callable[[Sequence[str]], list[int]]) -> FoundArray:
        """Which ids have all of their values. `lengths` are those of `names(...)`, 0 for missing ones."""
        names = self.names(ids)
        found = lengths(names)
        for name, length, wanted in zip(names, found, itertools.cycle(self.value_bytes)):
            if length not in (0, wanted):
                raise RuntimeError(f"{name} should have {wanted} bytes but has: {length}")
        complete: FoundArray = np.array(found, bool).reshape(len(ids), -1).min(axis=1)
        return complete


class RowBatch:
    """Rows (n, bytes) of these keys with their scores; `found` is set by a read."""

    def __init__(
        self,
        layout: Layout,
        keys: KeyArray,
        rows: RowArray,
        scores: ScoreArray,
        found: FoundArray | None = None,
    ) -> None:
        self.layout, self.keys, self.found = layout, keys, found
        self._arrays = rows, scores
        width = rows.shape[1] if len(keys) else 0
        if layout.packed:
            self._values: list[Value] = [[(address(rows), width, width), (address(scores), 8, 8)]]
        else:
            sizes = layout.tensor_bytes
            begins = itertools.accumulate(sizes[:-1], initial=0)
            self._values = [[(address(rows) + begin, width, size)] for begin, size in zip(begins, sizes)]

    def names(self, chunk: range) -> list[str]:
        return self.layout.names(self.keys[chunk.start : chunk.stop])

    def codec(self) -> _core.RedisRows:
        """The engine's codec for commands and replies; one for each connection."""
        found = 0 if self.found is None else address(self.found)
        keys = self.keys
        return _core.RedisRows(
            self.layout.head, self.layout.tails, self._values, address(keys), len(keys), found
        )

    def absent_names(self, chunk: range) -> list[str]:
        """The names of the ids of a chunk that a read did not find."""
        assert self.found is not None
        ids = self.keys[chunk.start : chunk.stop]
        return self.layout.names(ids[~self.found[chunk.start : chunk.stop]])

    # ---- for clients that take and give a bytes object for each value

    def values(self, chunk: range) -> list[bytes]:
        """The values of a chunk, in the order of its names."""
        rows, scores = (array[chunk.start : chunk.stop] for array in self._arrays)
        if self.layout.packed:
            return [row.tobytes() + score.tobytes() for row, score in zip(rows, scores)]
        bounds = list(itertools.pairwise(itertools.accumulate(self.layout.tensor_bytes, initial=0)))
        return [row[a:b].tobytes() for row in rows for a, b in bounds]

    def receive(self, chunk: range, values: Sequence[bytes | None]) -> None:
        """Takes the values of a chunk; None for those that are not there."""
        answer = [b"*%d\r\n" % len(values)]
        for value in values:
            answer.append(b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value))
        codec = self.codec()
        codec.mget(chunk.start, chunk.stop, len(chunk))
        data = np.frombuffer(b"".join(answer), np.uint8)
        codec.receive(address(data), len(data))
