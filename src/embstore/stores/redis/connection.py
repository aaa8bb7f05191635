"""Connections to Redis, and the few commands that a store needs, many keys at a time.

redis-py opens connections, authenticates, encrypts and finds masters and cluster nodes. In a cluster, keys go
to their nodes in pipelines of single-key commands. Elsewhere commands take many keys, several are in flight
at a time, and rows move between memory and the socket through the engine's codec: a Python object for each
value would cost more than the server does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from embstore import _core
from embstore.arrays import address
from embstore.extras import missing
from embstore.stores.redis.answers import Answers
from embstore.stores.redis.deadline import limited
from embstore.stores.redis.rows import RowBatch
from embstore.stores.redis.url import RedisUrl

ON_THE_WAY = 6  # commands that were sent and not yet answered, before the next send
RECEIVED_BYTES = 1 << 18

Pack = Callable[[tuple[Any, ...]], bytes]
Command = Callable[[int, int, int], Any]  # first row, row behind the last, rows of one command


class TemporaryError(Exception):
    """The server may answer a retry. `timed_out`: finding out took the whole timeout."""

    def __init__(self, text: str, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Connection(Protocol):
    """What a store does with a server. Every operation may be repeated."""

    def call(self, *command: str | bytes | int) -> Any: ...
    def get_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None: ...
    def set_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None: ...
    def lengths(self, names: Sequence[str]) -> list[int]: ...
    def delete_many(self, chunks: Iterable[list[str]]) -> None: ...
    def nodes(self) -> list[Any]: ...
    def key_count(self, node: Any) -> int: ...
    def scan(self, node: Any, cursor: int, pattern: str, count: int) -> tuple[int, list[bytes]]: ...


class RedisServer:
    """A server by its URL. Thread-safe: every `connection` is used by one thread."""

    def __init__(self, options: RedisUrl) -> None:
        try:
            import hiredis
            import redis
        except ImportError as error:
            raise missing("a Redis store", "redis", error) from error
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._redis: Any = redis
        self._pack: Pack = hiredis.pack_command
        self._options = options
        self._common: dict[str, Any] = {
            "username": options.user,
            "password": options.password,
            "socket_timeout": options.timeout,
            "socket_connect_timeout": options.timeout,
            "socket_keepalive": True,
            "health_check_interval": options.heartbeat,
            "retry": Retry(NoBackoff(), 0),  # the store tries again, with its own deadline
            "protocol": 2,
        }
        if options.tls:
            self._common |= {
                "ssl_ca_certs": options.ca_file,
                "ssl_certfile": options.cert_file,
                "ssl_keyfile": options.key_file,
                "ssl_cert_reqs": "required" if options.verify else "none",
                "ssl_check_hostname": options.verify,
            }
        self._client: Any = None

    def _open(self) -> Any:
        """The redis-py client, created on first use: that of a cluster asks its nodes at once."""
        if self._client is not None:
            return self._client
        redis, options, common = self._redis, self._options, self._common
        kind = limited(redis.SSLConnection if options.tls else redis.Connection)
        if options.cluster:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in options.hosts]
            (host, port), *_ = options.hosts
            # With a URL, nodes make pools of their own, to which a class of connections can be given.
            url = f"redis://{f'[{host}]' if ':' in host else host}:{port}"
            self._client = redis.RedisCluster(url=url, startup_nodes=nodes, connection_class=kind, **common)
        elif options.sentinel is not None:
            tls = {"ssl": True} if options.tls else {}
            sentinels = redis.Sentinel(options.hosts, sentinel_kwargs={**self._of_sentinels(), **tls})
            for sentinel in sentinels.sentinels:
                sentinel.connection_pool.connection_class = kind
            managed = redis.sentinel
            kind = managed.SentinelManagedSSLConnection if options.tls else managed.SentinelManagedConnection
            self._client = sentinels.master_for(
                options.sentinel, db=options.db, connection_class=limited(kind), **common
            )
        else:
            host, port = options.hosts[0]
            pool = redis.ConnectionPool(host=host, port=port, db=options.db, connection_class=kind, **common)
            self._client = redis.Redis(connection_pool=pool)
        return self._client

    def _of_sentinels(self) -> dict[str, Any]:
        """Options for the Sentinels: the servers' TLS settings, and their own password."""
        options = {k: v for k, v in self._common.items() if k != "health_check_interval"}
        return options | {
            "username": self._options.sentinel_user,
            "password": self._options.sentinel_password,
        }

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection for one thread. Raises TemporaryError, PermissionError or RuntimeError for errors of
        the server; the connection is not used again after one."""
        with self._translated():
            client = self._open()
            if self._options.cluster:
                yield _ClusterConnection(client)
                return
            pool = client.connection_pool
            connection = pool.get_connection()
            try:
                yield _PlainConnection(connection, self._pack)
            except BaseException:
                connection.disconnect()  # a reply may still be in flight
                raise
            finally:
                pool.release(connection)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        errors, where = self._redis.exceptions, self._options.where
        denied = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)
        again = (
            *(errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError, errors.ClusterDownError),
            *(errors.MasterDownError, errors.TryAgainError, errors.RedisClusterException),
        )
        try:
            yield
        except denied as error:
            raise PermissionError(f"{where}: {error}") from None
        except again as error:
            raise TemporaryError(str(error), isinstance(error, errors.TimeoutError)) from None
        except (errors.MovedError, errors.ClusterCrossSlotError):
            raise RuntimeError(
                f"{where}: the server is a node of a cluster; add cluster=1 to its URL"
            ) from None
        except errors.OutOfMemoryError as error:
            raise RuntimeError(f"{where} is full: {error}") from None
        except errors.RedisError as error:
            raise RuntimeError(f"{where}: {error}") from None
        except RuntimeError as error:  # of the codec: a value that is no row of ours
            raise RuntimeError(f"{where}: {error}") from None
        except OSError as error:  # of a file of certificates, or of a socket that redis-py did not expect
            raise TemporaryError(
                f"{type(error).__name__}: {error}", isinstance(error, TimeoutError)
            ) from None


class _PlainConnection:
    def __init__(self, connection: Any, pack: Pack) -> None:
        self._connection = connection
        self._pack = pack
        self._answers = Answers(lambda: connection._sock, connection._parser.parse_error)

    def call(self, *command: str | bytes | int) -> Any:
        self._send(command)
        return self._answers.next()

    def _send(self, command: tuple[str | bytes | int, ...]) -> None:
        self._connection.send_packed_command([self._pack(command)])

    def _stream(self, commands: Iterable[tuple[Any, tuple[Any, ...]]]) -> Iterator[tuple[Any, Any]]:
        """(tag, command) in, (tag, answer) out, in the same order."""
        waiting: deque[Any] = deque()
        for tag, command in commands:
            self._send(command)
            waiting.append(tag)
            if len(waiting) >= ON_THE_WAY:
                yield waiting.popleft(), self._answers.next()
        while waiting:
            yield waiting.popleft(), self._answers.next()

    def _move(self, codec: _core.RedisRows, chunks: Sequence[range], command: Command) -> None:
        """Sends a command for every chunk and takes the answers."""
        self._connection.check_health()
        socket = self._connection._sock
        buffer = _core.empty_bytes(max(RECEIVED_BYTES, 2 * codec.most_value_bytes))
        view, begin, filled = memoryview(buffer), address(buffer), 0  # type: ignore[arg-type]
        sent = 0
        while sent < len(chunks) or codec.waiting:
            while sent < len(chunks) and codec.waiting < ON_THE_WAY:
                socket.sendall(command(chunks[sent].start, chunks[sent].stop, len(chunks[sent])))
                sent += 1
            count = socket.recv_into(view[filled:])
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            filled += count
            used = codec.receive(begin, filled)
            view[: filled - used] = view[used:filled]
            filled -= used
            if codec.error:
                raise self._connection._parser.parse_error(codec.error)

    def get_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None:
        codec = batch.codec()
        self._move(codec, chunks, codec.mget)
        # MGET also has nothing for a key that holds a list or a hash, which would pass for a new id.
        absent = (names for chunk in chunks if (names := batch.absent_names(chunk)))
        answers = self._stream((names, ("EXISTS", *names)) for names in absent)
        # All answers are taken before a question is asked about one of them.
        for names in [names for names, count in answers if count != 0]:
            self._complain_about_types(names)

    def set_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None:
        codec = batch.codec()
        self._move(codec, chunks, codec.mset)

    def _complain_about_types(self, names: list[str]) -> None:
        for name in names:
            kind = self.call("TYPE", name)
            if kind not in (b"none", b"string"):
                shown = kind.decode(errors="replace") if isinstance(kind, bytes) else repr(kind)
                raise RuntimeError(f"{name} should hold a string but holds a: {shown}")

    def delete_many(self, chunks: Iterable[list[str]]) -> None:
        for _, answer in self._stream((None, ("DEL", *names)) for names in chunks):
            _number("DEL", answer)

    def lengths(self, names: Sequence[str]) -> list[int]:
        self._connection.send_packed_command([b"".join(self._pack(("STRLEN", name)) for name in names)])
        return [_length(name, self._answers.next) for name in names]

    def nodes(self) -> list[Any]:
        return [None]

    def key_count(self, node: Any) -> int:
        return _number("DBSIZE", self.call("DBSIZE"))

    def scan(self, node: Any, cursor: int, pattern: str, count: int) -> tuple[int, list[bytes]]:
        return _block(self.call("SCAN", cursor, "MATCH", pattern, "COUNT", count))


def _length(name: str, answer: Callable[[], Any]) -> int:
    """The length of the value of a key, 0 if it does not exist."""
    try:
        return _number("STRLEN", answer())
    except Exception as error:
        if "wrong kind" in str(error) or "WRONGTYPE" in str(error):
            raise RuntimeError(f"{name} should hold a string: {error}") from None
        raise


def _number(command: str, answer: Any) -> int:
    if not isinstance(answer, int) or answer < 0:
        raise RuntimeError(f"the answer to {command} should be a number but is: {repr(answer)[:40]}")
    return answer


def _block(answer: Any) -> tuple[int, list[bytes]]:
    """Cursor and names of an answer to SCAN."""
    try:
        cursor, names = answer
        if all(isinstance(name, bytes) for name in names):
            return int(cursor), list(names)
    except (TypeError, ValueError):
        pass
    raise RuntimeError(f"the answer to SCAN should be a cursor and names but is: {repr(answer)[:40]}")


class _ClusterConnection:
    def __init__(self, client: Any) -> None:
        self._client = client

    def call(self, *command: str | bytes | int) -> Any:
        return self._client.execute_command(*command)

    def _pipeline(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline()
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute())

    def get_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None:
        for chunk in chunks:
            batch.receive(chunk, self._pipeline(("GET", name) for name in batch.names(chunk)))

    def set_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None:
        for chunk in chunks:
            named = zip(batch.names(chunk), batch.values(chunk))
            self._pipeline(("SET", name, value) for name, value in named)

    def delete_many(self, chunks: Iterable[list[str]]) -> None:
        for names in chunks:
            self._pipeline(("DEL", name) for name in names)

    def lengths(self, names: Sequence[str]) -> list[int]:
        pipeline = self._client.pipeline()
        for name in names:
            pipeline.execute_command("STRLEN", name)
        answers = pipeline.execute(raise_on_error=False)
        return [_length(name, partial(_raised, answer)) for name, answer in zip(names, answers)]

    def nodes(self) -> list[Any]:
        return list(self._client.get_primaries())

    def key_count(self, node: Any) -> int:
        return _number("DBSIZE", self._client.execute_command("DBSIZE", target_nodes=node))

    def scan(self, node: Any, cursor: int, pattern: str, count: int) -> tuple[int, list[bytes]]:
        command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        cursors, names = self._client.execute_command(*command, target_nodes=node)  # by node
        [after] = cursors.values()
        return _block((after, names))


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
