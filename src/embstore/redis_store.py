"""Rows in Redis, standalone, behind Sentinels or in a Cluster.

    compatible  {prefix}_table_{table}_gid_{id}_cid_{column}_osid_{tensor}    the bytes of one tensor
    packed      {prefix}_table_{table}_gid_{id}_cid_{column}                  the row, then its score (uint64)

All numbers are little-endian. The compatible layout is that of TorchRec's contrib/dynamic_embedding; it keeps
no scores, and an id is found when all of its tensors are.

Commands carry `chunk_size` keys, and the next one is on its way before the last was answered. A lost
connection is opened again and the batch is sent again, which is safe: all it does is read, or write the same
values.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from embstore.redis_connection import Connection, RedisServer, TemporaryError
from embstore.redis_url import LAYOUTS, SCHEMES, parse_redis_url
from embstore.stores import FoundArray, KeyArray, RowArray, ScoreArray, Store

__all__ = ["SCHEMES", "RedisStore"]

SCAN_ROWS = 4096
FIRST_PAUSE_SECONDS = 0.02


class RedisStore(Store):
    """The rows of one table in Redis; `tensor_bytes` are the sizes of what a row consists of.

    url: see embstore.redis_url. layout: used when the URL names none.
    """

    def __init__(
        self,
        url: str,
        *,
        table: str,
        tensor_bytes: Sequence[int],
        column: int = 0,
        layout: str = "packed",
    ) -> None:
        if not tensor_bytes or min(tensor_bytes) < 1:
            raise ValueError(f"tensor_bytes should be sizes above 0 but are: {list(tensor_bytes)}")
        if layout not in LAYOUTS:
            raise ValueError(f"layout should be one of {list(LAYOUTS)} but is: {layout!r}")
        super().__init__(sum(tensor_bytes))
        options = parse_redis_url(url)
        self._packed = (options.layout or layout) == "packed"
        self._head = f"{options.prefix}_table_{table}_gid_"
        tail = f"_cid_{column}"
        self._tails = [tail] if self._packed else [f"{tail}_osid_{k}" for k in range(len(tensor_bytes))]
        self._sizes = [self.row_bytes + 8] if self._packed else list(tensor_bytes)
        self._options = options
        self._server = RedisServer(options)
        self._chunk_ids = max(1, options.chunk_size // len(self._tails))
        self._pool = (
            ThreadPoolExecutor(options.num_threads, "embstore-redis") if options.num_threads > 1 else None
        )
        self._retry(lambda c: c.call("PING"), opening=True)

    def __repr__(self) -> str:
        return f"<{self._options.where}: {self._head}*{self._tails[0]}>"

    # ---- rows

    def get(self, keys: KeyArray) -> tuple[RowArray, ScoreArray, FoundArray]:
        data = np.zeros((len(keys), sum(self._sizes)), np.uint8)
        found = np.zeros(len(keys), bool)

        def receive(first: int, names: list[str], values: list[bytes | None]) -> None:
            width = len(self._sizes)
            here = _all_present(values, width)
            self._check_sizes(names, values)
            if not here.all():
                values = [v for i in np.flatnonzero(here) for v in values[i * width : (i + 1) * width]]
            rows = np.frombuffer(b"".join(values), np.uint8).reshape(-1, data.shape[1])  # type: ignore[arg-type]
            data[first : first + len(here)][here] = rows
            found[first : first + len(here)] = here

        self._in_chunks(len(keys), lambda c, ranges: c.get_many(self._named(keys, ranges), receive))
        scores = np.ones(len(keys), np.uint64)
        if self._packed:
            scores = np.ascontiguousarray(data[:, self.row_bytes :]).view(np.uint64)[:, 0]
            data = np.ascontiguousarray(data[:, : self.row_bytes])
        return data, scores, found

    def put(self, keys: KeyArray, rows: RowArray, scores: ScoreArray) -> None:
        if self._packed:
            rows = np.concatenate(
                [rows, np.ascontiguousarray(scores, np.uint64).view(np.uint8).reshape(-1, 8)], axis=1
            )

        def named(ranges: Sequence[range]) -> Iterator[tuple[list[str], list[bytes]]]:
            for (_, names), chunk in zip(self._named(keys, ranges), ranges):
                yield names, _split_rows(rows[chunk.start : chunk.stop], self._sizes)

        self._in_chunks(len(keys), lambda c, ranges: c.set_many(named(ranges)))

    def contains(self, keys: KeyArray) -> FoundArray:
        return self.get(keys)[2]

    def erase(self, keys: KeyArray) -> None:
        self._in_chunks(
            len(keys), lambda c, ranges: c.delete_many(names for _, names in self._named(keys, ranges))
        )

    def scan(self) -> Iterator[tuple[KeyArray, RowArray, ScoreArray]]:
        pattern = _glob_escape(self._head) + "*" + _glob_escape(self._tails[0])
        head, tail = self._head.encode(), self._tails[0].encode()
        seen: set[int] = set()  # SCAN may show a key twice
        for names in self._retry(lambda c: c.scan_keys(pattern, SCAN_ROWS)):
            ids = {
                int(n[len(head) : len(n) - len(tail)])
                for n in names
                if _is_id(n[len(head) : len(n) - len(tail)])
            }
            keys = np.array(sorted(ids - seen), np.int64)
            seen |= ids
            rows, scores, found = self.get(keys)
            if found.any():
                yield keys[found], np.ascontiguousarray(rows[found]), np.ascontiguousarray(scores[found])

    def __len__(self) -> int:
        return sum(len(keys) for keys, _, _ in self.scan())

    # ---- how they travel

    def _named(self, keys: KeyArray, ranges: Sequence[range]) -> Iterator[tuple[int, list[str]]]:
        """The first index and the names of every chunk."""
        head, tails = self._head, self._tails
        for chunk in ranges:
            ids = keys[chunk.start : chunk.stop].tolist()
            if len(tails) == 1:
                tail = tails[0]
                yield chunk.start, [f"{head}{i}{tail}" for i in ids]
            else:
                yield chunk.start, [f"{head}{i}{tail}" for i in ids for tail in tails]

    def _in_chunks(self, n: int, work: Callable[[Connection, Sequence[range]], None]) -> None:
        """work(connection, ranges) for ranges that cover 0 .. n, over all connections."""
        step = self._chunk_ids
        chunks = [range(first, min(first + step, n)) for first in range(0, n, step)]
        if not chunks:
            return
        if self._pool is None or len(chunks) == 1:
            self._retry(lambda c: work(c, chunks))
            return
        lanes = [chunks[lane :: self._options.num_threads] for lane in range(self._options.num_threads)]
        pool = self._pool
        futures = [pool.submit(self._retry, _with_ranges(work, lane)) for lane in lanes if lane]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def _retry(self, work: Callable[[Connection], Any], opening: bool = False) -> Any:
        """Does it until it works. A server that does not answer is tried retry_limit times, one that refuses
        (it may be starting) for as long as these would take; while `opening`, retry_limit times as well."""
        options = self._options
        deadline = None
        pause = FIRST_PAUSE_SECONDS
        misses = 0
        for attempt in itertools.count(1):
            try:
                with self._server.connection() as connection:
                    return work(connection)
            except TemporaryError as error:
                now = time.monotonic()
                deadline = deadline or now + options.timeout * options.retry_limit
                misses += error.timed_out or opening
                if misses >= options.retry_limit or now + pause > deadline:
                    raise ConnectionError(f"{options.where}: {error} (tried {attempt} times)") from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _check_sizes(self, names: list[str], values: list[bytes | None]) -> None:
        for k, size in enumerate(self._sizes):
            column = values[k :: len(self._sizes)]
            if {len(v) for v in column if v is not None} - {size}:
                wrong = next(i for i, v in enumerate(column) if v is not None and len(v) != size)
                name = names[wrong * len(self._sizes) + k]
                length = len(column[wrong] or b"")
                raise RuntimeError(
                    f"{self._options.where}: {name} should have {size} bytes but has: {length}"
                )


def _with_ranges(
    work: Callable[[Connection, Sequence[range]], None], ranges: Sequence[range]
) -> Callable[[Connection], None]:
    return lambda connection: work(connection, ranges)


def _all_present(values: list[bytes | None], width: int) -> FoundArray:
    present = np.fromiter((v is not None for v in values), bool, len(values))
    return np.logical_and.reduce(present.reshape(-1, width), axis=1)  # type: ignore[no-any-return]


def _split_rows(rows: RowArray, sizes: Sequence[int]) -> list[bytes]:
    """The tensors of every row, row after row."""
    flat, width = rows.tobytes(), rows.shape[1]
    if len(sizes) == 1:
        return [flat[i : i + width] for i in range(0, len(flat), width)]
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    return [flat[i + a : i + b] for i in range(0, len(flat), width) for a, b in bounds]


def _glob_escape(text: str) -> str:
    return "".join("\\" + c if c in "*?[]\\^-" else c for c in text)


def _is_id(text: bytes) -> bool:
    return text.lstrip(b"-").isdigit()
