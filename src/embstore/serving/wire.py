"""The binary form of a lookup over HTTP: a few integers, then arrays as they lie in memory.

    request    uint32 tables, then for each table
                   uint32 bytes of its name, uint32 ids, the name (UTF-8), int64[ids]
    response   uint64 state, uint64 taken_ns, uint32 tables, then for each table in the same order
                   uint32 ids, uint32 dim, float32[ids, dim], uint8[ids] (1: the id has a row)

All numbers are little-endian; there is no padding. docs/serving.md has a client of 20 lines.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class WireError(ValueError):
    """A body that is not in the binary form."""


class _Cursor:
    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, count: int, what: str) -> memoryview:
        end = self._at + count
        if end > len(self._body):
            raise WireError(
                f"body should have {count} more bytes for {what} but has: {len(self._body) - self._at}"
            )
        part = self._body[self._at : end]
        self._at = end
        return part

    def numbers(self, form: str, what: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def end(self) -> None:
        if self._at != len(self._body):
            raise WireError(f"body should end after {self._at} bytes but has: {len(self._body)}")


def pack_request(ids: dict[str, Ids]) -> bytes:
    """The body of a request."""
    parts = [struct.pack("<I", len(ids))]
    for table, wanted in ids.items():
        name, array = table.encode(), np.ascontiguousarray(wanted, "<i8").reshape(-1)
        parts += [struct.pack("<II", len(name), len(array)), name, array.tobytes()]
    return b"".join(parts)


def unpack_request(body: bytes) -> dict[str, Ids]:
    """Ids by table. Raises WireError naming what does not fit."""
    cursor, found = _Cursor(body), dict[str, Ids]()
    (tables,) = cursor.numbers("<I", "the number of tables")
    for i in range(tables):
        name_bytes, n = cursor.numbers("<II", f"the head of table {i}")
        try:
            name = bytes(cursor.take(name_bytes, f"the name of table {i}")).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"the name of table {i} should be UTF-8: {error}") from error
        if name in found:
            raise WireError(f"table should come once but comes twice: {name!r}")
        found[name] = np.frombuffer(cursor.take(8 * n, f"the ids of {name!r}"), "<i8")
    cursor.end()
    return found


def pack_response(
    state: int, taken_ns: int, tables: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]
) -> bytes:
    """The body of a response, from the vectors and flags of each table."""
    parts: list[bytes | memoryview] = [struct.pack("<QQI", state, taken_ns, len(tables))]
    for vectors, found in tables:
        # As plain bytes: memory of no ids cannot be cast.
        parts += [
            struct.pack("<II", *vectors.shape),
            *(a.reshape(-1).view(np.uint8).data for a in (vectors, found)),
        ]
    return b"".join(parts)


def unpack_response(
    body: bytes,
) -> tuple[int, int, list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]]:
    """state, taken_ns, and (vectors, found) of each table in the order of the request."""
    cursor = _Cursor(body)
    state, taken_ns, count = cursor.numbers("<QQI", "the head of the response")
    tables = []
    for i in range(count):
        n, dim = cursor.numbers("<II", f"the head of table {i}")
        vectors = np.frombuffer(cursor.take(4 * n * dim, "vectors"), "<f4").reshape(n, dim)
        tables.append((vectors, np.frombuffer(cursor.take(n, "flags"), np.bool_)))
    cursor.end()
    return state, taken_ns, tables
