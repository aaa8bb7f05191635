"""Replies of Redis (RESP 2) to a store's small commands, read without trusting the server.

A length is only a claim: memory is taken as data arrive, and replies longer than any valid one are refused.
Rows have their own reader in the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MOST_ITEMS = 1 << 20  # of one array
MOST_LINE_BYTES = 1 << 16
MOST_DEPTH = 3
RECEIVED_BYTES = 1 << 16

_NUMBER = re.compile(rb"-?[0-9]{1,19}")


class Answers:
    """Reads from the socket that `socket()` returns. `as_error` turns the text of an error into an
    exception."""

    def __init__(self, socket: Callable[[], Any], as_error: Callable[[str], Exception]) -> None:
        self._socket, self._as_error = socket, as_error
        self._buffer = bytearray()
        self._at = 0

    def next(self) -> Any:
        """One reply: bytes, an int, None, or a list of these. Raises error replies."""
        answer = self._read(MOST_DEPTH)
        if self._at == len(self._buffer):
            self._buffer.clear()
            self._at = 0
        return answer

    def _read(self, depth: int) -> Any:
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            raise self._as_error(text.decode(errors="replace"))
        if kind in (b":", b"$", b"*") and _NUMBER.fullmatch(text):
            number = int(text)
            if kind == b":":
                return number
            if number == -1:
                return None
            if kind == b"$" and number >= 0:
                value = self._bytes(number + 2)
                if value.endswith(b"\r\n"):
                    return value[:-2]
            elif kind == b"*" and 0 <= number <= MOST_ITEMS and depth:
                return [self._read(depth - 1) for _ in range(number)]
        raise RuntimeError(f"the answer should be one of Redis but begins with: {ascii(line[:40])[2:-1]}")

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at)) < 0:
            if len(self._buffer) - self._at > MOST_LINE_BYTES:
                raise RuntimeError(f"the answer has a line of more than {MOST_LINE_BYTES} bytes")
            self._receive()
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _bytes(self, count: int) -> bytes:
        while len(self._buffer) - self._at < count:
            self._receive()
        self._at += count
        return bytes(self._buffer[self._at - count : self._at])

    def _receive(self) -> None:
        data = self._socket().recv(RECEIVED_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._buffer += data
