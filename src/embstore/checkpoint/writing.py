"""Dumps are written here: by all ranks at once, each row range at its agreed offset.

    call      snapshot of every table ── sizes of all ranks ── draft folder            (microseconds a table)
    writer    rows ──► files at offsets ── fsync ── checksums of all ranks ── manifests ── rename

The first half holds the caller, the second may run in a thread while training goes on.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address
from embstore.checkpoint import manifest
from embstore.checkpoint.files import Draft, combine, crc32, write_at, write_durably
from embstore.checkpoint.layouts import WRITTEN, Column, arguments_file, columns_to_write
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.ranks import Ranks, ranks_of
from embstore.checkpoint.spec import TableSpec
from embstore.ownership import Ownership
from embstore.table import Rows, Table

Tables = Mapping[str, Mapping[str, Table]]  # collection -> table name -> table
Progress = Callable[[int, int], None]  # bytes written by this rank, and of how many
Pieces = dict[str, list[tuple[int, int, int]]]  # file -> (offset, bytes, crc)

BLOCK_BYTES = 4 << 20
MOST_THREADS = 4


class PartWriter:
    """Writes rows of one table at their place in the table's files. Threads may write together."""

    def __init__(self, folder: Path, columns: list[Column], first_row: int, taken_ns: int) -> None:
        self._columns = columns
        self._taken_ns = taken_ns
        self._first_row = first_row
        self._next = first_row
        self._lock = threading.Lock()
        self.pieces: Pieces = {column.file: [] for column in columns}
        self._fds: list[int] = []
        try:
            for column in columns:
                # Rank 0 has made the files. One that is missing here says that ranks see different folders.
                self._fds.append(os.open(folder / column.file, os.O_WRONLY))
        except BaseException:
            self.close()
            raise

    @property
    def rows_written(self) -> int:
        return self._next - self._first_row

    def write(self, rows: Rows) -> int:
        """Appends a block; returns its bytes."""
        with self._lock:
            at = self._next
            self._next += len(rows)
        total = 0
        for column, fd in zip(self._columns, self._fds):
            array = self._array(column, rows)
            offset = at * column.row_bytes
            write_at(fd, array, offset)
            self.pieces[column.file].append((offset, array.nbytes, crc32(array)))
            total += array.nbytes
        return total

    def _array(self, column: Column, rows: Rows) -> npt.NDArray[Any]:
        if column.kind == "keys":
            return rows.keys
        if column.kind == "values":
            return rows.values
        if column.kind == "scores":
            return rows.scores
        if column.kind == "ages":
            return np.int64(self._taken_ns) - rows.scores.view(np.int64)
        states = rows.states[:, column.begin : column.begin + column.width]
        return np.ascontiguousarray(states)

    def sync(self) -> None:
        for fd in self._fds:
            os.fsync(fd)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


@dataclass(frozen=True)
class Source:
    """A table's rows on this rank: how many, and a reader that several threads may call until it
    returns no rows. `read` gets a function that hands out a buffer of so many rows."""

    collection: str
    spec: TableSpec
    rows: int
    read: Callable[[Rows], int]
    end: Callable[[], None]


def table_source(collection: str, table: Table, optim: bool) -> Source:
    """The rows of a table as they are now, whatever happens to it later."""
    snapshot: list[Any] = [table.snapshot()]

    def read(buffer: Rows) -> int:
        return int(
            snapshot[0].read(
                len(buffer.keys),
                address(buffer.keys),
                address(buffer.values),
                address(buffer.states) if optim and table.state_width else 0,
                address(buffer.scores),
            )
        )

    return Source(collection, TableSpec.of(table), snapshot[0].rows, read, snapshot.clear)


def block_rows(spec: TableSpec) -> int:
    return max(1024, min(65536, BLOCK_BYTES // (4 * (spec.dim + spec.state_width) + 16)))


def _buffer(spec: TableSpec, optim: bool) -> Rows:
    n = block_rows(spec)
    return Rows(
        np.empty(n, np.int64),
        np.empty((n, spec.dim), np.float32),
        np.empty((n, spec.state_width if optim else 0), np.float32),
        np.empty(n, np.uint64),
    )


def _head(buffer: Rows, n: int) -> Rows:
    return Rows(buffer.keys[:n], buffer.values[:n], buffer.states[:n], buffer.scores[:n])


@dataclass(frozen=True)
class Order:
    """What is to be written, the same on all ranks."""

    layout: str
    optim: bool
    ownership: Ownership
    increment: dict[str, Any]
    overwrite: bool = False


class DumpJob:
    """One dump: made by the call, then `run` once, in any thread."""

    def __init__(self, path: Path, sources: list[Source], order: Order, ranks: Ranks) -> None:
        self.path = path
        self._sources = sources
        self._order = order
        self._ranks = ranks
        self._draft: Draft | None = None
        self._written = 0
        taken = time.time_ns()
        specs = [(source.collection, source.spec.name, source.rows, taken) for source in sources]
        everyone = ranks.agree(lambda: specs)
        self._rows = [[answer[i][2] for answer in everyone] for i in range(len(sources))]
        self._taken_ns = everyone[0][0][3] if sources else taken
        names = [[entry[:2] for entry in answer] for answer in everyone]

        def prepare() -> tuple[str, str]:
            for rank, other in enumerate(names):
                if other != names[0]:
                    raise ValueError(
                        f"tables should be the same on all ranks but rank 0 has {names[0]} "
                        f"and rank {rank}: {other}"
                    )
            self._draft = Draft(path, overwrite=order.overwrite)
            self._make_files(self._draft.path)
            return self._draft.path.name, secrets.token_hex(16)

        draft, self._id = ranks.lead(prepare)
        self._folder = path.parent / draft

    def _make_files(self, root: Path) -> None:
        """Rank 0 makes every file at its full size, so that the others only open them."""
        for i, source in enumerate(self._sources):
            folder = root / file_stem(source.collection)
            folder.mkdir(exist_ok=True)
            for rank in range(self._ranks.world):
                for column, rows in self._columns(i, rank):
                    path = folder / column.file
                    if not path.exists():
                        with open(path, "wb") as file:
                            file.truncate(rows * column.row_bytes)

    def _columns(self, i: int, rank: int) -> list[tuple[Column, int]]:
        """The files that a rank writes, and how many rows each has in the end."""
        order = self._order
        columns = columns_to_write(
            self._sources[i].spec, order.layout, order.optim, rank, self._ranks.world
        )
        rows = self._rows[i][rank] if order.layout == "v2" else sum(self._rows[i])
        return [(column, rows) for column in columns]

    def run(self, ranks: Ranks, threads: int, progress: Progress | None = None) -> None:
        """Writes, syncs, publishes. Raises on every rank if one of them fails."""
        try:
            parts = ranks.agree(lambda: self._write(threads, progress))
            ranks.lead(lambda: self._publish(parts))
        except BaseException:
            if self._draft:
                self._draft.discard()
            raise
        finally:
            for source in self._sources:
                source.end()

    def _write(self, threads: int, progress: Progress | None) -> list[Pieces]:
        rank, pieces = self._ranks.rank, []
        total = sum(
            source.rows * sum(column.row_bytes for column, _ in self._columns(i, rank))
            for i, source in enumerate(self._sources)
        )
        for i, source in enumerate(self._sources):
            first = 0 if self._order.layout == "v2" else sum(self._rows[i][:rank])
            writer = PartWriter(
                self._folder / file_stem(source.collection),
                [column for column, _ in self._columns(i, rank)],
                first,
                self._taken_ns,
            )
            try:
                self._copy(source, writer, threads, total, progress)
                writer.sync()
            finally:
                writer.close()
            pieces.append(writer.pieces)
        return pieces

    def _copy(
        self, source: Source, writer: PartWriter, threads: int, total: int, progress: Progress | None
    ) -> None:
        failed = threading.Event()

        def copy() -> None:
            buffer = _buffer(source.spec, self._order.optim)
            try:
                while not failed.is_set() and (n := source.read(buffer)):
                    self._written += writer.write(_head(buffer, n))
                    if progress:
                        progress(self._written, total)
            except BaseException:
                failed.set()
                raise

        threads = max(1, min(threads, source.rows // block_rows(source.spec)))
        if threads == 1:
            copy()
        else:
            with ThreadPoolExecutor(threads) as pool:
                for future in [pool.submit(copy) for _ in range(threads)]:
                    future.result()
        if writer.rows_written != source.rows:
            raise AssertionError(
                f"table {source.spec.name!r} should have given {source.rows} rows but gave: "
                f"{writer.rows_written}"
            )

    def _publish(self, parts: list[list[Pieces]]) -> None:
        assert self._draft is not None
        order = self._order
        entries: dict[str, dict[str, manifest.TableEntry]] = {}
        for i, source in enumerate(self._sources):
            pieces: Pieces = {}
            for answer in parts:
                for file, more in answer[i].items():
                    pieces.setdefault(file, []).extend(more)
            files = {
                file: {"bytes": sum(size for _, size, _ in covering), "crc32": combine(covering)}
                for file, covering in pieces.items()
            }
            folder = self._draft.path / file_stem(source.collection)
            arguments = arguments_file(
                source.spec, order.layout, order.optim, order.ownership.name.lower()
            )
            if arguments:
                name, text = arguments
                write_durably(folder / name, text)
                raw = np.frombuffer(text.encode(), np.uint8)
                files[name] = {"bytes": raw.nbytes, "crc32": crc32(raw)}
            entry = manifest.TableEntry(source.spec, self._rows[i], files)
            entries.setdefault(source.collection, {})[source.spec.name] = entry
        for collection, tables in entries.items():
            text = manifest.Manifest(
                dump=self._id,
                collection=collection,
                collections=sorted(entries),
                layout=order.layout,
                world=self._ranks.world,
                ownership=order.ownership.name.lower(),
                optim=order.optim,
                taken_ns=self._taken_ns,
                tables=tables,
                increment=order.increment,
            ).text()
            write_durably(self._draft.path / file_stem(collection) / manifest.NAME, text)
        self._draft.publish()


class DumpHandle:
    """A dump that is being written. Training may go on; what is written is the state at the call."""

    def __init__(self, job: DumpJob, ranks: Ranks) -> None:
        self.path = job.path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job, ranks), name="embstore-dump")
        self._thread.start()

    def _run(self, job: DumpJob, ranks: Ranks) -> None:
        # Only with what training leaves of the machine, until somebody waits for it.
        set_idle(0, True)
        try:
            job.run(ranks, threads=1)
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is published, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when the dump is published; raises what went wrong on any rank."""
        if self._thread.is_alive() and self._thread.native_id:
            set_idle(self._thread.native_id, False)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the dump to {self.path} is not complete after {timeout_seconds} seconds")
        if self._error is not None:
            raise self._error


def set_idle(thread: int, idle: bool) -> None:
    """Lets a thread run only where no other wants to, or as usual again."""
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        pass  # a hint: where it is refused the dump is as fast, and training a little slower


_running: list[DumpHandle] = []


def dump(
    path: str | os.PathLike[str],
    tables: Tables,
    *,
    optim: bool = False,
    group: Any = None,
    ownership: Ownership = Ownership.ROUNDROBIN,
    layout: str = "v1a",
    async_: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DumpHandle | None:
    """Writes tables to a folder: {path}/{collection}/{table}_keys, _values and so on.

    Called on all ranks of `group` (a torch process group; None is the default one, or this process
    alone), each with its own tables. With optim, optimizer states are written too. The folder appears
    when it is complete; on failure every rank raises and nothing is left. A folder that has files is
    refused unless `overwrite`, which swaps it in one step.

    With async_, returns a `DumpHandle` at once: training may go on, and what is written are the rows,
    states and scores at the call.

        embstore.dump("/data/monday", {"model": {"user": table}}, optim=True)
    """
    if layout not in WRITTEN:
        raise ValueError(f"layout should be one of {', '.join(WRITTEN)} but is: {layout!r}")
    while _running:
        _running[-1]._thread.join()  # one snapshot of a table at a time
        _running.pop()
    ranks = ranks_of(group)
    order = Order(layout, bool(optim), Ownership(ownership), {}, overwrite)
    sources = snapshot_all(tables, order.optim, ranks)
    job = start(Path(path), sources, order, ranks)
    if async_:
        handle = DumpHandle(job, ranks.background())
        _running.append(handle)
        return handle
    job.run(ranks, min(_core.get_num_threads(), MOST_THREADS), progress)
    return None


def snapshot_all(tables: Tables, optim: bool, ranks: Ranks) -> list[Source]:
    """A source for every table, in an order that is the same on all ranks."""
    sources: list[Source] = []

    def take() -> None:
        for collection in sorted(tables):
            for name in sorted(tables[collection]):
                if tables[collection][name].name != name:
                    raise ValueError(f"tables should be named as they are but {name!r} is not")
                sources.append(table_source(collection, tables[collection][name], optim))

    try:
        ranks.agree(take)
    except BaseException:
        for source in sources:
            source.end()
        raise
    return sources


def start(path: Path, sources: list[Source], order: Order, ranks: Ranks) -> DumpJob:
    """Agrees on sizes and makes the draft folder."""
    try:
        return DumpJob(path, sources, order, ranks)
    except BaseException:
        for source in sources:
            source.end()
        raise
