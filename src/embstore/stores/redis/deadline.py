"""Sockets of redis-py that keep to one deadline and one size, whatever the server does.

redis-py, like most clients, limits each `recv`, so a server that sends a byte a second makes a call endless.
The limits here cover a whole call: connecting, sending and all replies.

    with call_limits(seconds=10):
        ...                         # sockets of this thread raise TimeoutError when the time is over
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_BYTES = 256 << 20  # received by one call; a store asks for far less at a time


class _Limits(threading.local):
    def __init__(self) -> None:
        self.until = float("inf")
        self.bytes_left = float("inf")

    def seconds_left(self, most: float | None) -> float | None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return most if left == float("inf") else min(left, most or left)

    def received(self, count: int) -> None:
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise ConnectionError(f"the answer to this call is longer than {MOST_BYTES} bytes")


_limits = _Limits()


@contextmanager
def call_limits(seconds: float) -> Iterator[None]:
    """Limits all socket operations of this thread inside the block to this time in total."""
    before = _limits.until, _limits.bytes_left
    _limits.until, _limits.bytes_left = time.monotonic() + seconds, MOST_BYTES
    try:
        yield
    finally:
        _limits.until, _limits.bytes_left = before


class _LimitedSocket:
    """A connected socket, plain or TLS, subject to the limits of the current call."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._timeout: float | None = socket.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self._socket.settimeout(seconds)

    def _limit(self) -> None:
        if self._timeout != 0:  # a poll stays one
            self._socket.settimeout(_limits.seconds_left(self._timeout))

    def sendall(self, data: Any, *flags: int) -> None:
        self._limit()
        self._socket.sendall(data, *flags)  # its timeout is that of all the data

    def recv(self, size: int, *flags: int) -> bytes:
        self._limit()
        data: bytes = self._socket.recv(size, *flags)
        _limits.received(len(data))
        return data

    def recv_into(self, buffer: Any, *more: int) -> int:
        self._limit()
        count: int = self._socket.recv_into(buffer, *more)
        _limits.received(count)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def limited(connection_class: type[Any]) -> type[Any]:
    """Subclasses a connection class of redis-py so that its sockets obey the limits."""

    class Limited(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            before: float | None = getattr(self, "socket_connect_timeout", None)
            self.socket_connect_timeout = _limits.seconds_left(before)
            try:
                socket = super()._connect()
            finally:
                self.socket_connect_timeout = before
            socket.settimeout(self.socket_timeout)
            return _LimitedSocket(socket)

    return Limited
