"""Rows in Redis, standalone, behind Sentinels or in a Cluster.

    compatible  {prefix}_table_{table}_gid_{id}_cid_{column}_osid_{tensor}    the bytes of one tensor
    packed      {prefix}_table_{table}_gid_{id}_cid_{column}                  the row, then its score (uint64)

All numbers are little-endian. The compatible layout is that of TorchRec's contrib/dynamic_embedding; it keeps
no scores, and an id is found when all of its tensors are.

Commands carry `chunk_size` keys, and the next is sent before the last is answered. After a lost connection
the batch is sent again, which is safe: it only reads, or writes the same values.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from embstore import _core
from embstore.stores import FoundArray, KeyArray, RowArray, ScoreArray, Store
from embstore.stores.redis.connection import Connection, RedisServer, TemporaryError
from embstore.stores.redis.deadline import call_limits
from embstore.stores.redis.rows import Layout, RowBatch
from embstore.stores.redis.url import LAYOUTS, SCHEMES, parse_redis_url

__all__ = ["SCHEMES", "RedisStore"]

SCAN_ROWS = 4096
FEW_BLOCKS = 64
CALL_BYTES = 16 << 20  # of rows that move within one timeout
FIRST_PAUSE_SECONDS = 0.02


class RedisStore(Store):
    """The rows of one table in Redis; `tensor_bytes` are the sizes of what a row consists of.

    url: see embstore.stores.redis.url. layout: used when the URL names none.
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
        self._layout = Layout(
            f"{options.prefix}_table_{table}_gid_",
            f"_cid_{column}",
            tensor_bytes,
            packed=(options.layout or layout) == "packed",
        )
        self._head, self._tails = self._layout.head, self._layout.tails
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
        keys = np.ascontiguousarray(keys, np.int64)
        rows: RowArray = _core.empty_bytes(len(keys) * self.row_bytes).reshape(-1, self.row_bytes)
        scores = np.ones(len(keys), np.uint64)
        found = np.zeros(len(keys), bool)
        batch = RowBatch(self._layout, keys, rows, scores, found)
        self._in_chunks(len(keys), lambda c, ranges: c.get_rows(batch, ranges))
        return rows, scores, found

    def put(self, keys: KeyArray, rows: RowArray, scores: ScoreArray) -> None:
        batch = RowBatch(
            self._layout,
            np.ascontiguousarray(keys, np.int64),
            np.ascontiguousarray(rows),
            np.ascontiguousarray(scores, np.uint64),
        )
        self._in_chunks(len(keys), lambda c, ranges: c.set_rows(batch, ranges))

    def contains(self, keys: KeyArray) -> FoundArray:
        keys = np.ascontiguousarray(keys, np.int64)
        found = np.zeros(len(keys), bool)

        def work(connection: Connection, ranges: Sequence[range]) -> None:
            for r in ranges:
                found[r.start : r.stop] = self._layout.complete(keys[r.start : r.stop], connection.lengths)

        self._in_chunks(len(keys), work)
        return found

    def erase(self, keys: KeyArray) -> None:
        def work(connection: Connection, ranges: Sequence[range]) -> None:
            connection.delete_many(self._layout.names(keys[r.start : r.stop]) for r in ranges)

        self._in_chunks(len(keys), work)

    def scan(self) -> Iterator[tuple[KeyArray, RowArray, ScoreArray]]:
        for keys in self._scan_ids():
            rows, scores, found = self.get(keys)
            if found.any():
                yield keys[found], np.ascontiguousarray(rows[found]), np.ascontiguousarray(scores[found])

    def scan_keys(self) -> Iterator[KeyArray]:
        for keys in self._scan_ids():
            # An id of several tensors counts only when all of them are there.
            yield keys if len(self._tails) == 1 else keys[self.contains(keys)]

    def _scan_ids(self) -> Iterator[KeyArray]:
        """The ids whose first tensor is there, each once."""
        seen: set[int] = set()  # SCAN may show a key twice
        for ids in self._blocks_of_ids():
            yield np.array(sorted(ids - seen), np.int64)
            seen |= ids

    def _blocks_of_ids(self) -> Iterator[set[int]]:
        """The ids whose first tensor is there, as SCAN brings them. Other keys that match are not ours."""
        pattern = _glob_escape(self._head) + "*" + _glob_escape(self._tails[0])
        head, tail = self._head.encode(), self._tails[0].encode()
        for names in self._blocks_of_names(pattern):
            middles = (n[len(head) : len(n) - len(tail)] for n in names)
            yield {int(middle) for middle in middles if _is_id(middle)}

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.scan_keys())

    def clear(self) -> None:
        for ids in self._blocks_of_ids():
            self.erase(np.array(sorted(ids), np.int64))

    # ---- how they travel

    def _in_chunks(self, n: int, work: Callable[[Connection, Sequence[range]], None]) -> None:
        """work(connection, ranges) for ranges that cover 0 .. n, over all connections."""
        step = self._chunk_ids
        chunks = [range(first, min(first + step, n)) for first in range(0, n, step)]
        if not chunks:
            return
        most = max(1, CALL_BYTES // (step * self.row_bytes))  # chunks of one call, which has one deadline

        def do(lane: Sequence[range]) -> None:
            for begin in range(0, len(lane), most):
                self._retry(_with_ranges(work, lane[begin : begin + most]))

        if self._pool is None or len(chunks) == 1:
            do(chunks)
            return
        lanes = [chunks[lane :: self._options.num_threads] for lane in range(self._options.num_threads)]
        futures = [self._pool.submit(do, lane) for lane in lanes if lane]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def _blocks_of_names(self, pattern: str) -> Iterator[list[bytes]]:
        """What SCAN finds, block by block. A cursor belongs to one server process, so a scan that loses its
        connection starts over and yields everything again."""
        options = self._options
        for node in self._retry(lambda c: c.nodes()):
            for attempt in itertools.count(1):
                try:
                    with self._server.connection() as connection:
                        yield from self._scan_node(connection, node, pattern)
                    break
                except TemporaryError as error:
                    if attempt >= options.retry_limit:
                        raise ConnectionError(f"{options.where}: {error} (tried {attempt} times)") from None
                time.sleep(FIRST_PAUSE_SECONDS * attempt)

    def _scan_node(self, connection: Connection, node: Any, pattern: str) -> Iterator[list[bytes]]:
        cursor, blocks, most = 0, 0, 0
        while True:
            with call_limits(self._options.timeout):
                if blocks >= most:  # a block has about SCAN_ROWS of the keys, however many of them match
                    most = FEW_BLOCKS + 8 * connection.key_count(node) // SCAN_ROWS
                    if blocks >= most:
                        raise RuntimeError(f"{self._options.where}: SCAN has not ended after {blocks} blocks")
                cursor, names = connection.scan(node, cursor, pattern, SCAN_ROWS)
            yield names
            blocks += 1
            if cursor == 0:
                return

    def _retry(self, work: Callable[[Connection], Any], opening: bool = False) -> Any:
        """Repeats it until it works. A server that does not answer is tried retry_limit times; one that
        refuses (it may be starting) is tried as long as that would take, or retry_limit times while
        `opening`."""
        options = self._options
        deadline = None
        pause = FIRST_PAUSE_SECONDS
        misses = 0
        for attempt in itertools.count(1):
            try:
                with call_limits(options.timeout), self._server.connection() as connection:
                    return work(connection)
            except TemporaryError as error:
                now = time.monotonic()
                deadline = deadline or now + options.timeout * options.retry_limit
                misses += error.timed_out or opening
                if misses >= options.retry_limit or now + pause > deadline:
                    raise ConnectionError(f"{options.where}: {error} (tried {attempt} times)") from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def _with_ranges(
    work: Callable[[Connection, Sequence[range]], None], ranges: Sequence[range]
) -> Callable[[Connection], None]:
    return lambda connection: work(connection, ranges)


def _glob_escape(text: str) -> str:
    return "".join("\\" + c if c in "*?[]\\^-" else c for c in text)


def _is_id(text: bytes) -> bool:
    """Whether this is an int64 as we write it."""
    if not text.lstrip(b"-").isdigit() or len(text) > 20 or text.count(b"-") > 1:
        return False
    number = int(text)
    return -(2**63) <= number < 2**63 and b"%d" % number == text
