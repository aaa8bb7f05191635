"""Dumps are written here: by all ranks at once, each row range at its agreed offset.

    call      snapshot of every table ── draft folder                                  (microseconds a table)
    writer    sizes of all ranks ── rows ──► files at offsets ── fsync ── checksums ── manifests ── rename

The first half holds the caller, the second may run in a thread while training goes on.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint import manifest
from embstore.checkpoint.admission import admission_file, changes_file, counter_files
from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.files import combine, crc32, write_at, write_durably
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.shared import as_records, shared_file
from embstore.checkpoint.sources import Source, block_rows, empty_block
from embstore.distributed.ranks import Ranks
from embstore.formats.dynamicemb import Column, arguments_file, columns_to_write
from embstore.ownership import OnRank, Ownership
from embstore.progress import Progress
from embstore.rows import Rows

Pieces = dict[str, list[tuple[int, int, int]]]  # file -> (offset, bytes, crc)


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
        if column.kind == "uses":
            assert rows.uses is not None
            return rows.uses
        if column.kind == "words":
            assert rows.uses is not None
            words = {"timestamp": rows.scores.view(np.int64), "lfu": rows.uses.astype(np.int64)}
            return np.stack([words[word] for word in column.words], axis=1)
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
class DumpOptions:
    """What is to be written, the same on all ranks."""

    layout: str
    optim: bool
    increment: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    taken_ns: int = 0  # the moment of the sources; 0: now


class DumpJob:
    """One dump: made by the call, then `run` once, in any thread.

    `parts` has the sources of each rank that this process writes for: its own as a rule, those of all
    ranks when a single process rewrites a dump. Tables come in the same order in all of them.
    """

    def __init__(
        self, path: Path, parts: dict[int, list[Source]], world: int, options: DumpOptions, ranks: Ranks
    ) -> None:
        self.path = path
        self._parts = parts
        self._world = world
        self._options = options
        self._draft: Draft | None = None
        self._written = 0
        self._counting = threading.Lock()  # several threads write
        self._progress: Progress | None = None
        self._between_blocks: Callable[[], None] | None = None
        names: dict[int, list[tuple[str, str]]] = {}
        answers = ranks.agree(
            lambda: (
                options.taken_ns or time.time_ns(),
                {r: [s.name for s in sources] for r, sources in parts.items()},
            )
        )
        self._taken_ns = answers[0][0]
        for _, answer in answers:
            names |= answer
        self._sources = next(iter(parts.values()))
        self._sizes: dict[int, list[tuple[int, int]]] = {}  # rows and tombstones, known once it runs

        def prepare() -> tuple[str, str]:
            for rank in range(world):
                if names[rank] != names[0]:
                    raise ValueError(
                        f"tables should be the same on all ranks but rank 0 has {names[0]} "
                        f"and rank {rank}: {names[rank]}"
                    )
            if not names[0]:
                raise ValueError("tables should not be empty")
            self._draft = Draft(path, overwrite=options.overwrite)
            return self._draft.path.name, secrets.token_hex(16)

        draft, self.id = ranks.lead(prepare)
        self._folder = path.parent / draft

    def _rows(self, i: int) -> list[int]:
        """Rows of table i on each rank."""
        return [self._sizes[rank][i][0] for rank in range(self._world)]

    def _removed(self, i: int) -> list[int]:
        """Tombstones of table i on each rank."""
        return [self._sizes[rank][i][1] for rank in range(self._world)]

    def _agree_on_sizes(self, ranks: Ranks) -> None:
        """Counts the rows of all ranks. That may take long over a store, so the call does not wait for it."""
        for answer in ranks.agree(
            lambda: {r: [_size(s) for s in sources] for r, sources in self._parts.items()}
        ):
            self._sizes |= answer

    def _make_files(self) -> None:
        """Rank 0 makes every file at its full size, so that the others only open them."""
        assert self._draft is not None
        root = self._draft.path
        for i, source in enumerate(self._sources):
            folder = root / file_stem(source.collection)
            folder.mkdir(exist_ok=True)
            sizes = {
                column.file: (rows if self._options.layout == "v2" else sum(self._rows(i))) * column.row_bytes
                for rank, rows in enumerate(self._rows(i))
                for column in self._columns(i, rank)
            }
            if source.removed is not None:
                sizes[removed_file(source.spec.name)] = 8 * sum(self._removed(i))
            for name, size in sizes.items():
                with open(folder / name, "xb") as file:
                    file.truncate(size)

    def _columns(self, i: int, rank: int) -> list[Column]:
        options = self._options
        return columns_to_write(self._sources[i].spec, options.layout, options.optim, rank, self._world)

    def run(
        self,
        ranks: Ranks,
        threads: int = 1,
        progress: Progress | None = None,
        between_blocks: Callable[[], None] | None = None,
    ) -> None:
        """Writes, syncs, publishes. Raises on every rank if one of them fails."""
        self._progress, self._between_blocks = progress, between_blocks
        try:
            self._agree_on_sizes(ranks)
            ranks.lead(self._make_files)
            pieces = ranks.agree(lambda: self._write(threads))
            ranks.lead(lambda: self._publish(pieces))
        except BaseException:
            if self._draft:
                self._draft.discard()
            raise
        finally:
            self.end()

    def end(self) -> None:
        for sources in self._parts.values():
            for source in sources:
                source.end()

    def _write(self, threads: int) -> list[Pieces]:
        """Everything that this process has to write; the pieces of each table."""
        pieces: list[Pieces] = [{} for _ in self._sources]
        total = sum(
            source.rows * sum(column.row_bytes for column in self._columns(i, rank))
            for rank, sources in self._parts.items()
            for i, source in enumerate(sources)
        )
        for rank, sources in self._parts.items():
            for i, source in enumerate(sources):
                first = 0 if self._options.layout == "v2" else sum(self._rows(i)[:rank])
                folder = self._folder / file_stem(source.collection)
                writer = PartWriter(folder, self._columns(i, rank), first, self._taken_ns)
                try:
                    self._copy(source, writer, threads, total)
                    writer.sync()
                finally:
                    writer.close()
                found = writer.pieces
                if source.removed is not None:
                    found |= write_removed(folder, source, sum(self._removed(i)[:rank]))
                for file_of, counters in (
                    (admission_file, source.admission),
                    (changes_file, source.admission_changes),
                ):
                    if counters is not None:
                        name = file_of(source.spec.name, rank, self._world)
                        found |= {name: [write_array(folder / name, counters)]}
                if source.shared is not None:
                    name = shared_file(source.spec.name, rank, self._world)
                    records = as_records(source.shared, self._options.optim)
                    found |= {name: [write_array(folder / name, records)]}
                for file, array in zip(
                    counter_files(source.spec.name, rank, self._world), source.counts or ()
                ):
                    found |= {file: [write_array(folder / file, np.ascontiguousarray(array, np.int64))]}
                for file, more in found.items():
                    pieces[i].setdefault(file, []).extend(more)
        return pieces

    def _copy(self, source: Source, writer: PartWriter, threads: int, total: int) -> None:
        failed = threading.Event()

        def copy() -> None:
            buffer = empty_block(source.spec, self._options.optim)
            try:
                while not failed.is_set() and (n := source.read(buffer)):
                    more = writer.write(buffer[:n])
                    with self._counting:
                        self._written += more
                        if self._progress:
                            self._progress(self._written, total)
                    if self._between_blocks:
                        self._between_blocks()
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

    def _publish(self, answers: list[list[Pieces]]) -> None:
        assert self._draft is not None
        options = self._options
        entries: dict[str, dict[str, manifest.TableEntry]] = {}
        for i, source in enumerate(self._sources):
            pieces: Pieces = {}
            for answer in answers:
                for file, more in answer[i].items():
                    pieces.setdefault(file, []).extend(more)
            files = {
                file: {"bytes": sum(size for _, size, _ in covering), "crc32": combine(covering)}
                for file, covering in pieces.items()
            }
            # The original package spreads all tables; it takes the keys of any rank's file.
            whole = isinstance(source.ownership, OnRank)
            by = (Ownership.ROUNDROBIN if whole else source.ownership).name.lower()
            arguments = arguments_file(source.spec, options.layout, options.optim, by)
            if arguments:
                name, text = arguments
                write_durably(self._draft.path / file_stem(source.collection) / name, text)
                raw = np.frombuffer(text.encode(), np.uint8)
                files[name] = {"bytes": raw.nbytes, "crc32": crc32(raw)}
            entry = manifest.TableEntry(source.spec, source.ownership, self._rows(i), files)
            entries.setdefault(source.collection, {})[source.spec.name] = entry
        for collection, tables in entries.items():
            text = manifest.Manifest(
                dump=self.id,
                collection=collection,
                collections=sorted(entries),
                layout=options.layout,
                world=self._world,
                optim=options.optim,
                taken_ns=self._taken_ns,
                tables=tables,
                increment=options.increment,
            ).text()
            write_durably(self._draft.path / file_stem(collection) / manifest.NAME, text)
        self._draft.publish()


def _size(source: Source) -> tuple[int, int]:
    """Rows and tombstones."""
    return source.rows, 0 if source.removed is None else len(source.removed)


def removed_file(name: str) -> str:
    """The tombstones of a table in an increment: int64 keys."""
    return f"{file_stem(name)}_removed"


def write_array(path: Path, array: npt.NDArray[Any]) -> tuple[int, int, int]:
    """Makes a file of an array; it is the one piece of it."""
    with open(path, "xb") as file:
        write_at(file.fileno(), array, 0)
        os.fsync(file.fileno())
    return 0, array.nbytes, crc32(array)


def write_removed(folder: Path, source: Source, first: int) -> Pieces:
    """Writes the tombstones of one rank behind those of the ranks before it."""
    assert source.removed is not None
    name = removed_file(source.spec.name)
    fd = os.open(folder / name, os.O_WRONLY)
    try:
        write_at(fd, source.removed, 8 * first)
        os.fsync(fd)
    finally:
        os.close(fd)
    return {name: [(8 * first, source.removed.nbytes, crc32(source.removed))]}
