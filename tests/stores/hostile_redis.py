"""A server that speaks RESP badly, on a real socket: every answer comes from a function of the command."""

import contextlib
import socket
import threading
import time


class HostileRedis:
    """`answer(command)` gets a list of bytes and returns what to send: bytes, an iterable of bytes that is
    sent piece by piece, or None to close the connection."""

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = []
        self.commands = []
        self._stopping = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def where(self):
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def stop(self):
        self._stopping = True
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            while True:
                command = []
                for _ in range(int(stream.readline()[1:])):
                    command.append(stream.read(int(stream.readline()[1:])))
                    stream.read(2)
                self.commands.append(command)
                usual = {b"CLIENT": b"+OK\r\n", b"SELECT": b"+OK\r\n", b"PING": b"+PONG\r\n"}
                answer = self._answer(command)
                if answer == "usual":
                    answer = usual[command[0]]
                if answer is None:
                    return
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    if self._stopping:
                        return
                    connection.sendall(piece)


def slowly(data, seconds=0.05):
    """A byte at a time."""
    for byte in data:
        yield bytes([byte])
        time.sleep(seconds)
