"""Dumps without the engine: memory-mapped keys, rows and scores.

dump = embstore.open_dump("/data/monday")
user = dump["model"]["user"]
user.keys, user.values, user.scores            # numpy, straight from the files
vectors, found = user.find([7, -1])
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint import layouts, manifest
from embstore.checkpoint.files import combine, file_crc32, file_size
from embstore.checkpoint.names import file_stem, name_of
from embstore.checkpoint.parts import PartReader, Pieces
from embstore.checkpoint.ranks import CheckpointError, Ranks
from embstore.checkpoint.spec import TableSpec
from embstore.table import Rows

if TYPE_CHECKING:
    import pyarrow

Array = npt.NDArray[Any]
VERIFY_BYTES = 32 << 20


class DumpTable:
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
        self.collection = collection
        self.manifest = of
        self.entry = entry
        self.spec: TableSpec | None = entry.spec if entry else None
        self.name = self.spec.name if self.spec else expected.name if expected else name_of(stem)
        if entry:
            self._check_sizes(entry)
        self.found = layouts.find(folder, stem, self.spec or expected, states)
        if entry:
            self._check_listed(entry)
        self._known = self.spec or expected

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

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.found.parts)

    @property
    def dim(self) -> int:
        return self.found.parts[0].values.width

    @property
    def layout(self) -> str:
        return self.found.layout

    @property
    def bytes(self) -> int:
        """Of all files of the table."""
        if self.entry:
            return sum(stored["bytes"] for stored in self.entry.files.values())
        return sum(path.stat().st_size for part in self.found.parts for path in part.files)

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
        if self.spec or strategy is None:
            return bool(self._known and self._known.keeps_ages)
        return "KLru" in strategy

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

    def state(self, name: str) -> npt.NDArray[np.float32]:
        """An optimizer state by its name in files, such as "m"."""
        if name not in self.state_names:
            raise KeyError(f"state should be one of {', '.join(self.state_names) or 'none'} but is: {name!r}")
        i = self.state_names.index(name)
        return self._joined([reader.mapped_state(i) for reader in self.readers])

    def blocks(self, block_rows: int = 65536) -> Iterator[Rows]:
        """All rows with states and scores, in the order of the files."""
        for reader in self.readers:
            for begin in range(0, reader.part.rows, block_rows):
                yield reader.read(begin, min(begin + block_rows, reader.part.rows))

    @cached_property
    def _order(self) -> Array:
        return np.argsort(self.keys, kind="stable")

    def locate(self, keys: object) -> Array:
        """The row number of each key, -1 where it is not there. The first call sorts the keys."""
        wanted = np.asarray(keys, np.int64)
        if self.rows == 0:
            return np.full(wanted.shape, -1)
        at = np.searchsorted(self.keys, wanted, sorter=self._order)
        at = self._order[np.minimum(at, self.rows - 1)]
        return np.where(self.keys[at] == wanted, at, -1)

    def find(self, keys: object) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Vectors of the keys and which of them are there; others read 0.0."""
        at = self.locate(keys)
        found = at >= 0
        vectors = np.zeros((*at.shape, self.dim), np.float32)
        vectors[found] = self.values[at[found]]
        return vectors, found

    def to_arrow(self) -> pyarrow.Table:
        """Columns key, vector (a list of fixed size), score, and one for each optimizer state."""
        import pyarrow as pa

        def vectors(array: Array) -> Any:
            flat = pa.array(np.ascontiguousarray(array).reshape(-1))
            return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])

        columns = {"key": pa.array(self.keys), "vector": vectors(self.values), "score": pa.array(self.scores)}
        columns |= {name: vectors(self.state(name)) for name in self.state_names}
        return pa.table(columns)

    def tensors(self) -> dict[str, Array]:
        """keys, values, scores and states by name: what goes into a safetensors file."""
        arrays: dict[str, Array] = {"keys": self.keys, "values": self.values, "scores": self.scores}
        return arrays | {f"state.{name}": self.state(name) for name in self.state_names}

    def files(self) -> dict[str, dict[str, int]]:
        """Every file of the table with its size and checksum, as the manifest has them."""
        return self.entry.files if self.entry else {}

    def __repr__(self) -> str:
        return f"DumpTable({self.name!r}, rows={self.rows}, dim={self.dim}, layout={self.layout!r})"


class Dump(Mapping[str, dict[str, DumpTable]]):
    """The collections of a dump: `dump[collection][table]`."""

    def __init__(
        self, path: Path, expected: dict[str, dict[str, TableSpec]] | None = None, states: bool = True
    ) -> None:
        self.path = path
        self._states = states
        if not path.is_dir():
            raise FileNotFoundError(f"path should be the folder of a dump but is: {path}")
        self._tables: dict[str, dict[str, DumpTable]] = {}
        folders = [path] if _is_collection(path) else sorted(p for p in path.iterdir() if _is_collection(p))
        if not folders:
            raise CheckpointError(f"{path}: has no tables of a dump")
        identities: dict[str, str] = {}
        for folder in folders:
            of = manifest.Manifest.read(folder)
            collection = of.collection if of else name_of(folder.name)
            if of:
                identities[folder.name] = of.dump
                self._check_collections(of, folder, whole=folder != path)
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
            return {
                name: DumpTable(folder, collection, file_stem(name), None, None, spec, self._states)
                for name, spec in expected.items()
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

    def verify(self, ranks: Ranks | None = None) -> int:
        """Reads every file and compares its checksum; returns how many bytes were right.

        Raises CheckpointError naming the file. Ranks share the work.
        """
        return verify(self.tables, ranks or Ranks())


def _is_collection(path: Path) -> bool:
    if not path.is_dir() or ".partial-" in path.name:
        return False
    return (path / manifest.NAME).is_file() or bool(layouts.stems_in(path))


def verify(tables: list[DumpTable], ranks: Ranks, known: list[Pieces] | None = None) -> int:
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
            sums = list(pool.map(lambda unit: file_crc32(*unit), mine))
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
                    f"{path}: its checksum is wrong: crc32 should be {stored['crc32']} but is: {crc}"
                )
            total += stored["bytes"]
    return total


def open_dump(path: str | os.PathLike[str]) -> Dump:
    """Opens a dump of any layout for reading, without building tables.

    `path` is the folder that was given to `dump`, or the folder of one collection in it.
    """
    return Dump(Path(path))
