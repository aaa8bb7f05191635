"""Connections to Redis, and the few commands that a store needs, many keys at a time.

redis-py opens, authenticates, encrypts and finds masters and cluster nodes. In a cluster keys go to their
nodes in pipelines of single-key commands, elsewhere commands take many keys and several of them are on their
way at a time. There rows go from memory to the socket and back through the engine's codec, since an object
for each value would cost more than the server does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from embstore import _core
from embstore.arrays import address
from embstore.extras import missing
from embstore.redis_rows import RowBatch
from embstore.redis_url import RedisUrl

ON_THE_WAY = 6  # commands that were sent and not yet answered, before the next send
RECEIVED_BYTES = 1 << 18

Pack = Callable[[tuple[Any, ...]], bytes]
Command = Callable[[int, int, int], Any]  # first row, row behind the last, rows of one command


class TemporaryError(Exception):
    """The server may answer when it is tried again. `timed_out`: it took the whole timeout to find out."""

    def __init__(self, text: str, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Connection(Protocol):
    """What a store does with a server. Everything may be done twice."""

    def call(self, *command: str | bytes | int) -> Any: ...
    def get_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None: ...
    def set_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None: ...
    def delete_many(self, chunks: Iterable[list[str]]) -> None: ...
    def scan_keys(self, pattern: str, count: int) -> Iterator[list[bytes]]: ...


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
        """The redis-py client; made when first used, since that of a cluster asks its nodes at once."""
        if self._client is not None:
            return self._client
        redis, options = self._redis, self._options
        tls: dict[str, Any] = {"ssl": True} if options.tls else {}
        if options.cluster:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in options.hosts]
            self._client = redis.RedisCluster(startup_nodes=nodes, **self._common, **tls)
        elif options.sentinel is not None:
            sentinels = redis.Sentinel(options.hosts, sentinel_kwargs=self._sentinel_options())
            self._client = sentinels.master_for(options.sentinel, db=options.db, **self._common, **tls)
        else:
            host, port = options.hosts[0]
            self._client = redis.Redis(host=host, port=port, db=options.db, **self._common, **tls)
        return self._client

    def _sentinel_options(self) -> dict[str, Any]:
        names = ("socket_timeout", "socket_connect_timeout", "retry", "protocol")
        return {name: self._common[name] for name in names}

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection for one thread. Errors of the server come out as TemporaryError, PermissionError or
        RuntimeError; after one of them the connection is not used again."""
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
                connection.disconnect()  # an answer may still be on its way
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

    def call(self, *command: str | bytes | int) -> Any:
        self._send(command)
        return self._connection.read_response()

    def _send(self, command: tuple[str | bytes | int, ...]) -> None:
        self._connection.send_packed_command([self._pack(command)])

    def _stream(self, commands: Iterable[tuple[Any, tuple[Any, ...]]]) -> Iterator[tuple[Any, Any]]:
        """(tag, command) in, (tag, answer) out, in the same order."""
        waiting: deque[Any] = deque()
        for tag, command in commands:
            self._send(command)
            waiting.append(tag)
            if len(waiting) >= ON_THE_WAY:
                yield waiting.popleft(), self._connection.read_response()
        while waiting:
            yield waiting.popleft(), self._connection.read_response()

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
        for names, count in self._stream((names, ("EXISTS", *names)) for names in absent):
            if count:
                self._complain_about_types(names)

    def set_rows(self, batch: RowBatch, chunks: Sequence[range]) -> None:
        codec = batch.codec()
        self._move(codec, chunks, codec.mset)

    def _complain_about_types(self, names: list[str]) -> None:
        for name in names:
            kind = self.call("TYPE", name).decode()
            if kind not in ("none", "string"):
                raise RuntimeError(f"{name} should hold a string but holds a: {kind}")

    def delete_many(self, chunks: Iterable[list[str]]) -> None:
        for _ in self._stream((None, ("DEL", *names)) for names in chunks):
            pass

    def scan_keys(self, pattern: str, count: int) -> Iterator[list[bytes]]:
        cursor: Any = b"0"
        blocks = []
        while True:
            cursor, names = self.call("SCAN", cursor, "MATCH", pattern, "COUNT", count)
            blocks.append(names)
            if cursor in (b"0", 0):
                return iter(blocks)


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

    def scan_keys(self, pattern: str, count: int) -> Iterator[list[bytes]]:
        return iter([list(self._client.scan_iter(match=pattern, count=count, target_nodes="primaries"))])
