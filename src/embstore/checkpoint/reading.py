"""Dumps without the engine: memory-mapped keys, rows and scores.

dump = embstore.open_dump("/data/monday")
user = dump["model"]["user"]
user.keys, user.values, user.scores            # numpy, straight from the files
vectors, found = user.find([7, -1])
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint import manifest
from embstore.checkpoint.errors import CheckpointError, NotADumpError
from embstore.checkpoint.files import combine, file_crc32, file_size
from embstore.checkpoint.names import file_stem, name_of
from embstore.checkpoint.parts import PartReader, Pieces
from embstore.checkpoint.shared import combined, stored_shared
from embstore.checkpoint.spec import TableSpec
from embstore.distributed.ranks import Ranks
from embstore.formats import dynamicemb as layouts
from embstore.formats.columns import Array, Columns
from embstore.progress import Progress
from embstore.rows import Rows

VERIFY_BYTES = 32 << 20


class DumpTable(Columns):
    """One table of a dump. Arrays are mapped from the files; those of several files are joined."""

    def __init__(
        self,
        folder: Path,
        collection: str,
        stem: str,
        entry: manifest.TableEntry | None,
        of: manifest.Manifest | None,
        expected: TableSpec | None = None,
        states: bool = True,
    ) -> None:
        self.folder = folder
        self._with_states = states
        self.collection = collection
        self.manifest = of
        self.entry = entry
        self.spec: TableSpec | None = entry.spec if entry else None
        self.name = self.spec.name if self.spec else expected.name if expected else name_of(stem)
        if entry:
            self._check_sizes(entry)
        self.found = layouts.find(folder, stem, self.spec or expected, states, exact=entry is not None)
        if entry is None:
            self._refuse_local_keys()
        if entry and of:
            self._check_listed(entry)
            self._check_rows(entry, of)
        self._known = self.spec or expected

    def _refuse_local_keys(self) -> None:
        """In the original's files, the keys of each rank start at 0 where ranks own blocks of keys."""
        if self.found.arguments.get("dist_type") == "continuous" and (self.found.world or 1) > 1:
            raise CheckpointError(
                f"{self.folder / file_stem(self.name)}_opt_args.json: keys of dist_type 'continuous' from "
                f"{self.found.world} ranks are numbers within a rank, so they are ambiguous"
            )

    def _check_sizes(self, entry: manifest.TableEntry) -> None:
        for name, stored in entry.files.items():
            path = self.folder / name
            size = file_size(path)
            if size != stored["bytes"]:
                kind = "truncated" if size < stored["bytes"] else "too long"
                raise CheckpointError(f"{path}: is {kind}: expected {stored['bytes']} bytes, found {size}")

    def _check_listed(self, entry: manifest.TableEntry) -> None:
        listed = set(entry.files)
        for path in (path for part in self.found.parts for path in part.files):
            if path.name not in listed:
                raise CheckpointError(f"{path}: is not in {manifest.NAME}, so dumps are mixed")

    def _check_rows(self, entry: manifest.TableEntry, of: manifest.Manifest) -> None:
        rows = [part.rows for part in self.found.parts]
        expected = entry.rows_of_rank if self.found.world else [entry.rows]
        if (self.found.world or of.world) != of.world or rows != expected:
            raise CheckpointError(
                f"{self.folder / manifest.NAME}: rows_of_rank of table {self.name!r} expects {entry.rows} "
                f"rows of {of.world} ranks, found {sum(rows)}"
            )

        self._check_states(entry.spec, of.optim)

    def _check_states(self, spec: TableSpec, optim: bool) -> None:
        wanted = {name: width for name, _, width in spec.file_states()} if optim else {}
        for part in self.found.parts if self._with_states else []:
            found = {name: state.width for name, state in part.states.items()}
            if found.keys() != wanted.keys() or (part.rows and found != wanted):
                raise CheckpointError(
                    f"{self.folder / manifest.NAME}: expected the optimizer states {wanted} of table "
                    f"{self.name!r}, found {found}"
                )

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.found.parts)

    @property
    def dim(self) -> int:
        return max(part.values.width for part in self.found.parts)

    @property
    def layout(self) -> str:
        return self.found.layout

    @property
    def world(self) -> int:
        return self.manifest.world if self.manifest else self.found.world or 0

    @property
    def bytes(self) -> int:
        """Of all files of the table."""
        if self.entry:
            return sum(stored["bytes"] for stored in self.entry.files.values())
        return sum(path.stat().st_size for part in self.found.parts for path in part.files)

    @property
    def shared(self) -> Rows | None:
        found = stored_shared(self)
        return None if found is None else combined(found)

    @property
    def state_names(self) -> list[str]:
        """Optimizer states by their names in files, in the order of a row."""
        present = self.found.parts[0].states
        if self._known:
            return [name for name, _, _ in self._known.file_states() if name in present]
        return list(present)

    @property
    def keeps_ages(self) -> bool:
        if self.found.world is None:
            return False
        strategy = self.found.arguments.get("evict_strategy")
        if strategy is None:
            return bool(self._known and self._known.keeps_ages)
        return "KLru" in str(strategy)

    @property
    def has_scores(self) -> bool:
        return all(part.scores is not None for part in self.found.parts)

    @cached_property
    def readers(self) -> list[PartReader]:
        """One for each part; with all optimizer states that there are."""
        ages_from = (self.manifest.taken_ns if self.manifest else time.time_ns()) if self.keeps_ages else None
        return [
            PartReader(part, self.state_names, ages_from, self.entry is not None) for part in self.found.parts
        ]

    def _joined(self, arrays: list[Array]) -> Array:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    @cached_property
    def keys(self) -> npt.NDArray[np.int64]:
        return self._joined([reader.mapped_keys() for reader in self.readers])

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        return self._joined([reader.mapped_values() for reader in self.readers])

    @cached_property
    def scores(self) -> npt.NDArray[np.uint64]:
        """0 where the dump has no scores."""
        return self._joined([reader.scores(0, reader.part.rows) for reader in self.readers])

    def _state(self, i: int) -> npt.NDArray[np.float32]:
        return self._joined([reader.mapped_state(i) for reader in self.readers])

    def blocks(self, block_rows: int = 65536) -> Iterator[Rows]:
        """All rows with states and scores, in the order of the files."""
        for reader in self.readers:
            for begin in range(0, reader.part.rows, block_rows):
                yield reader.read(begin, min(begin + block_rows, reader.part.rows))

    @property
    def is_increment(self) -> bool:
        """Whether it has what changed since another entry of a log."""
        return self.manifest is not None and "previous" in self.manifest.increment

    def files(self) -> dict[str, dict[str, int]]:
        """Every file of the table with its size and checksum, as the manifest has them."""
        return self.entry.files if self.entry else {}


class Dump(Mapping[str, dict[str, DumpTable]]):
    """The collections of a dump: `dump[collection][table]`."""

    def __init__(
        self, path: Path, expected: dict[str, dict[str, TableSpec]] | None = None, states: bool = True
    ) -> None:
        self.path = path
        self._states = states
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise FileNotFoundError(f"path should be the folder of a dump but {what}: {path}")
        self._tables: dict[str, dict[str, DumpTable]] = {}
        folders = collection_folders(path)
        if not folders:
            raise NotADumpError(what_it_is(path))
        identities: dict[str, str] = {}
        for folder in folders:
            of = manifest.Manifest.read(folder)
            renamed = folder != path and (of is None or folder.name != file_stem(of.collection))
            collection = of.collection if of and not renamed else name_of(folder.name)
            if of and not folder.is_symlink():  # who links folders together knows which
                identities[folder.name] = of.dump
                self._check_collections(of, folder, whole=folder != path and not renamed)
            if collection in self._tables:
                raise CheckpointError(f"{folder}: collection {collection!r} is there twice")
            self._tables[collection] = self._open(folder, collection, of, (expected or {}).get(collection))
        if len(set(identities.values())) > 1:
            raise CheckpointError(f"{path}: collections of different dumps are mixed: {identities}")

    def _check_collections(self, of: manifest.Manifest, folder: Path, whole: bool) -> None:
        for other in of.collections if whole else []:
            if not (folder.parent / file_stem(other) / manifest.NAME).is_file():
                raise CheckpointError(
                    f"{folder.parent / file_stem(other)}: is missing, a collection of the dump"
                )

    def _open(
        self,
        folder: Path,
        collection: str,
        of: manifest.Manifest | None,
        expected: dict[str, TableSpec] | None,
    ) -> dict[str, DumpTable]:
        if of:
            return {
                name: DumpTable(folder, collection, file_stem(name), entry, of, states=self._states)
                for name, entry in of.tables.items()
            }
        if expected is not None:
            stems = layouts.stems_in(folder)
            return {
                name: DumpTable(folder, collection, file_stem(name), None, None, spec, self._states)
                for name, spec in expected.items()
                if file_stem(name) in stems
            }
        tables = (DumpTable(folder, collection, stem, None, None) for stem in layouts.stems_in(folder))
        return {table.name: table for table in tables}

    def __getitem__(self, collection: str) -> dict[str, DumpTable]:
        return self._tables[collection]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def tables(self) -> list[DumpTable]:
        return [table for tables in self._tables.values() for table in tables.values()]

    @property
    def manifest(self) -> manifest.Manifest | None:
        """Of the first collection; dumps of other tools have none."""
        return next((table.manifest for table in self.tables), None)

    def verify(self, ranks: Ranks | None = None, progress: Progress | None = None) -> int:
        """Reads every file and compares its checksum; returns how many bytes were right.

        Raises CheckpointError naming the file. Ranks share the work; `progress` counts bytes of this one.
        """
        return verify(self.tables, ranks or Ranks(), progress=progress)


def _is_collection(path: Path) -> bool:
    if not path.is_dir() or ".partial-" in path.name:
        return False
    return os.path.lexists(path / manifest.NAME) or bool(layouts.stems_in(path))


def collection_folders(path: Path) -> list[Path]:
    """The folders of the collections of a dump; none where there is no dump."""
    return [path] if _is_collection(path) else sorted(p for p in path.iterdir() if _is_collection(p))


def collection_in(folder: Path) -> str:
    """The collection whose folder this is. Raises FileNotFoundError, or CheckpointError where it is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"path should be the folder of a collection but is: {folder}")
    if not _is_collection(folder):
        raise CheckpointError(what_it_is(folder))
    of = manifest.Manifest.read(folder)
    return of.collection if of else name_of(folder.name)


def is_log(path: Path) -> bool:
    """Whether a folder holds an increment log."""
    return path.is_dir() and any(re.fullmatch(r"(base|increment)-\d{12}", p.name) for p in path.iterdir())


def what_it_is(path: Path) -> str:
    """Why a folder cannot be opened as a dump."""
    if is_log(path):
        return f"{path}: is an increment log, not a dump; IncrementLog reads it"
    return f"{path}: is not a dump: it has neither {manifest.NAME} nor files of keys and values"


def verify_all(dumps: Sequence[Dump], progress: Progress | None = None) -> int:
    """Checks the files of several dumps as one work."""
    return verify([table for dump in dumps for table in dump.tables], Ranks(), progress=progress)


def verify(
    tables: list[DumpTable],
    ranks: Ranks,
    known: list[Pieces] | None = None,
    progress: Progress | None = None,
) -> int:
    """Checks the files of some tables, shared out among the ranks. Those of which `known` has the checksums,
    from all ranks, are not read again."""
    pieces: Pieces = {}
    for answer in known or []:
        for name, more in answer.items():
            pieces.setdefault(name, []).extend(more)
    units = [
        (table.folder / name, offset, min(VERIFY_BYTES, stored["bytes"] - offset))
        for table in tables
        for name, stored in table.files().items()
        for offset in range(0, stored["bytes"], VERIFY_BYTES)
        if str(table.folder / name) not in pieces
    ]
    mine = units[ranks.rank :: ranks.world]

    def read() -> list[tuple[str, tuple[int, int, int]]]:
        with ThreadPoolExecutor(2) as pool:
            total, done, sums = sum(size for _, _, size in mine), 0, []
            for (_, _, size), crc in zip(mine, pool.map(lambda unit: file_crc32(*unit), mine)):
                sums.append(crc)
                done += size
                if progress:
                    progress(done, total)
        return [(str(path), (offset, size, crc)) for (path, offset, size), crc in zip(mine, sums)]

    for found in ranks.agree(read):
        for name, piece in found:
            pieces.setdefault(name, []).append(piece)
    total = 0
    for table in tables:
        for name, stored in table.files().items():
            path = table.folder / name
            crc = combine(pieces.get(str(path), []))
            if crc != stored["crc32"]:
                raise CheckpointError(
                    f"{path}: its checksum is wrong: expected {stored['crc32']:08x}, found {crc:08x}"
                )
            total += stored["bytes"]
    return total


def open_dump(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Dump:
    """Opens a dump of any layout for reading, without building tables.

    Args:
        path: the folder that was given to `dump`, or the folder of one collection in it. A URL of fsspec is
            downloaded to the cache of this host first.
        storage_options: with a URL, passed to fsspec.

    Returns:
        A mapping: `open_dump(path)[collection][table]` has keys, values, scores, `find` and `to_arrow`.

    Raises:
        FileNotFoundError: `path` is no folder.
        NotADumpError: the folder holds something else.
        CheckpointError: the dump is damaged or incomplete.

    Examples:
        >>> import embstore, tempfile
        >>> folder = tempfile.mkdtemp() + "/monday"
        >>> table = embstore.Table("user", dim=2)
        >>> table.insert_or_assign([7], [[1.0, 2.0]])
        >>> embstore.dump(folder, {"model": {"user": table}})
        >>> vectors, found = embstore.open_dump(folder)["model"]["user"].find([7, 5])
        >>> vectors.tolist(), found.tolist()
        ([[1.0, 2.0], [0.0, 0.0]], [True, False])
    """
    from embstore.checkpoint.remote import RemoteFolder, is_remote, local_copy

    if not is_remote(path):
        return Dump(Path(path))
    with local_copy(RemoteFolder(str(path), **(storage_options or {}))) as folder:
        return Dump(folder)
