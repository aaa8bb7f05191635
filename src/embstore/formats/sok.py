"""The files of a SparseOperationKit dump, read and written without TensorFlow.

    weights/user_0-key       296 bytes of header, then the keys
    weights/user_0-weight    header, then the vectors (float32), in the order of the keys
    weights/user_0-Adam-m    header, then one state of each row
    weights/manifest.json    checksums, the number of ranks, steps of the optimizer (ours, optional)
    weights/user_0-score     header, then the score of each row: where options decide which rows stay (ours)

A header is the name of the table (256 bytes), the kind of file (u32, big-endian), the name of the state
(32 bytes) and the element type (u32, big-endian); names are padded with spaces on the left.

    with DumpWriter("weights") as writer:
        table = writer.table("user", np.int64, optimizer="Adam", slots=("m", "v"))
        table.append(keys, values, [m, v])
    DumpReader("weights").table("user").block(0, 1000)      # keys, values, {"Adam-m": ..., "Adam-v": ...}
"""

from __future__ import annotations

import enum
import os
import string
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import (
    crc32,
    file_crc32,
    file_size,
    open_regular,
    read_into,
    read_sealed,
    sealed,
    write_durably,
)
from embstore.checkpoint.parts import RowFile
from embstore.checkpoint.spec import checked, count
from embstore.formats.dynamicemb import MOST_FLOATS

HEADER_BYTES = 296
MANIFEST = "manifest.json"
MANIFEST_FORMAT = "sparse_operation_kit dump"
_HEADER = struct.Struct(">256sI32sI")
_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")

# For each arithmetic of the engine: the name of the optimizer in files, and of its states.
STATES = {
    "momentum": ("SGD", ("momentum",)),
    "adagrad": ("Adagrad", ("accumulator",)),
    "adam": ("Adam", ("m", "v")),
    "adamax": ("Adamax", ("m", "v")),
    "adadelta": ("Adadelta", ("accum_grad", "accum_var")),
    "ftrl": ("Ftrl", ("accumulator", "linear")),
}

Array = npt.NDArray[Any]


class FileKind(enum.IntEnum):
    """What a file holds."""

    KEY = 0
    WEIGHT = 1
    STATE = 2


def file_prefix(name: str) -> str:
    """The name of a variable as it begins the names of its files: punctuation becomes "_"."""
    return name.translate(str.maketrans(string.punctuation, "_" * len(string.punctuation)))


def part_file(prefix: str, kind: str, rank: int, world: int) -> str:
    """The file of one rank that has no header, such as its "shared" rows."""
    return f"{prefix}-{kind}.rank_{rank}.world_size_{world}"


def pack_header(kind: FileKind, dtype: npt.DTypeLike, slot: str = "") -> bytes:
    """The 296 bytes in front of an array."""
    code = np.dtype(dtype).newbyteorder("<").str
    if code not in _DTYPES:
        raise ValueError(f"dtype should be one of {', '.join(_DTYPES)} but is: {np.dtype(dtype)}")
    if len(slot.encode()) > 32:
        raise ValueError(f"slot should have at most 32 bytes but is: {slot!r}")
    return _HEADER.pack(b" " * 256, kind, slot.encode().rjust(32), _DTYPES.index(code))


def parse_header(data: bytes, path: object = "") -> tuple[FileKind, np.dtype[Any], str]:
    """Kind, element type and name of the state."""
    if len(data) < HEADER_BYTES:
        raise CheckpointError(f"{path}: expected a header of {HEADER_BYTES} bytes, found {len(data)}")
    _, kind, slot, code = _HEADER.unpack(data[:HEADER_BYTES])
    if kind >= len(FileKind) or code >= len(_DTYPES):
        raise CheckpointError(f"{path}: expected a known kind and element type, found {kind} and {code}")
    return FileKind(kind), np.dtype(_DTYPES[code]), slot.decode(errors="replace").strip()


def open_array(path: Path, kind: FileKind, rows: int | None = None) -> RowFile:
    """The array of a file: one column, or as many as fit where the number of rows is given."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        header = np.empty(min(size, HEADER_BYTES), np.uint8)
        read_into(fd, path, 0, header)
    finally:
        os.close(fd)
    found, dtype, _ = parse_header(header.tobytes(), path)
    if found != kind:
        raise CheckpointError(f"{path}: expected a file of kind {kind.name}, found {found.name}")
    elements, rest = divmod(size - HEADER_BYTES, dtype.itemsize)
    if rest or (rows is not None and (elements % rows if rows else elements)):
        raise CheckpointError(
            f"{path}: expected whole rows for {rows} keys, found {size - HEADER_BYTES} bytes"
            if rows is not None
            else f"{path}: expected whole keys of {dtype.itemsize} bytes, found {size - HEADER_BYTES} bytes"
        )
    shape = (elements, 1) if rows is None else (rows, elements // max(rows, 1))
    if shape[1] > MOST_FLOATS:
        raise CheckpointError(
            f"{path}: expected at most {MOST_FLOATS} elements for each key, found {shape[1]}"
        )
    return RowFile(path, dtype, *shape, header_bytes=HEADER_BYTES)


class TableReader:
    """The rows of one variable in a dump."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.prefix = prefix
        keys = open_array(directory / f"{prefix}-key", FileKind.KEY)
        if keys.dtype.kind not in "iu":
            raise CheckpointError(f"{keys.path}: expected integers, found {keys.dtype}")
        rows = keys.shape[0]
        self._values = open_array(directory / f"{prefix}-weight", FileKind.WEIGHT, rows)
        self._states = {
            path.name.removeprefix(f"{prefix}-"): open_array(path, FileKind.STATE, rows)
            for path in sorted(directory.glob(f"{prefix}-*-*"))
        }
        self.keys: Array = keys.all()[:, 0]
        score = directory / f"{prefix}-score"
        self._scores = open_array(score, FileKind.STATE, rows) if os.path.lexists(score) else None
        if self._scores is not None and rows and (self._scores.dtype, self._scores.shape[1]) != ("<u8", 1):
            raise CheckpointError(f"{score}: expected one uint64 for each key, found {self._scores.dtype}")
        self._directory = directory

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def dim(self) -> int:
        """Components of a vector; 0 where there are no rows."""
        return self._values.shape[1]

    @cached_property
    def values(self) -> Array:
        """All vectors, mapped."""
        return self._values.mapped()

    @cached_property
    def states(self) -> dict[str, Array]:
        """All states by "<optimizer>-<slot>", mapped."""
        return {name: file.mapped() for name, file in self._states.items()}

    def block(self, begin: int, end: int) -> tuple[Array, Array, dict[str, Array]]:
        """Rows begin to end: keys, values, and states by "<optimizer>-<slot>"."""
        end = min(end, len(self))
        states = {name: file.read(begin, end) for name, file in self._states.items()}
        return self.keys[begin:end], self._values.read(begin, end), states

    def scores(self, begin: int, end: int) -> Array | None:
        """Scores of rows begin to end; None where the dump has none."""
        return None if self._scores is None else self._scores.read(begin, min(end, len(self)))[:, 0]

    def part(self, kind: str, rank: int, world: int) -> Array | None:
        """The bytes of a file of one rank, such as its "shared" rows; None where there is none."""
        path = self.part_path(kind, rank, world)
        if not os.path.lexists(path):
            return None
        return RowFile(path, "u1", file_size(path), 1).all()[:, 0]

    def part_path(self, kind: str, rank: int, world: int) -> Path:
        """Where that file is, or would be."""
        return self._directory / part_file(self.prefix, kind, rank, world)

    def engine_states(self) -> tuple[str, list[str]]:
        """The arithmetic of the engine whose states are all there, and the names of those states."""
        for engine_name, (optimizer, slots) in STATES.items():
            names = [f"{optimizer}-{slot}" for slot in slots]
            if all(name in self._states for name in names):
                return engine_name, names
        return "sgd", []


def is_sok_dump(path: Path) -> bool:
    """Whether a directory holds a dump, or what is left of one."""
    return os.path.lexists(path / MANIFEST) or any(
        p.name.endswith(("-key", "-weight")) and not p.is_dir() for p in path.iterdir()
    )


class DumpReader:
    """A dump directory: ours, with a manifest, or one of the original, without."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"path should be the directory of a dump but is: {str(path)!r}")
        self.manifest = read_manifest(self.path)

    def tables(self) -> list[str]:
        """The variables, as they begin the names of their files; also those of which a file is lost."""
        names = [path.name for path in self.path.iterdir()] + list((self.manifest or {"files": {}})["files"])
        parts = [name.partition("-") for name in names]
        return sorted({prefix for prefix, _, rest in parts if rest in ("key", "weight")})

    def table(self, name: str, *, verify: bool = True) -> TableReader:
        """The rows of a variable. Checks sizes and, where there is a manifest, checksums."""
        prefix = file_prefix(name)
        files = (self.manifest or {"files": {}})["files"]
        listed = {file: entry for file, entry in files.items() if file.startswith(f"{prefix}-")}
        for file, entry in listed.items() if verify else ():
            _verify(self.path / file, entry)
        strangers = [p.name for p in self.path.glob(f"{prefix}-*") if p.name not in listed]
        if listed and strangers:
            raise CheckpointError(f"{self.path / strangers[0]}: is not in {MANIFEST}, so dumps are mixed")
        return TableReader(self.path, prefix)


class _FileWriter:
    def __init__(self, path: Path, kind: FileKind | None, dtype: npt.DTypeLike, slot: str = "") -> None:
        """`kind` None: without a header."""
        self.name = path.name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.bytes = self.crc = 0
        self._file = path.open("wb")
        if kind is not None:
            self._write(np.frombuffer(pack_header(kind, dtype, slot), np.uint8))

    def _write(self, data: Array) -> None:
        self._file.write(data.data)
        self.bytes += data.nbytes
        self.crc = crc32(data, self.crc)

    def append(self, array: Array) -> None:
        if array.size:
            self._write(np.ascontiguousarray(array, self.dtype).reshape(-1).view(np.uint8))

    def close(self) -> dict[str, int]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "crc32": self.crc}

    def abandon(self) -> None:
        self._file.close()


class TableWriter:
    """Takes the rows of one variable, block by block."""

    def __init__(
        self,
        directory: Path,
        name: str,
        key_dtype: npt.DTypeLike,
        optimizer: str,
        slots: Sequence[str],
        with_scores: bool = False,
    ) -> None:
        prefix = file_prefix(name)
        self._directory, self._prefix = directory, prefix
        self.parts: list[_FileWriter] = []
        self.files = [
            _FileWriter(directory / f"{prefix}-key", FileKind.KEY, key_dtype),
            _FileWriter(directory / f"{prefix}-weight", FileKind.WEIGHT, np.float32),
        ]
        for slot in slots:
            path = directory / f"{prefix}-{optimizer}-{slot}"
            self.files.append(_FileWriter(path, FileKind.STATE, np.float32, slot))
        if with_scores:
            path = directory / f"{prefix}-score"
            self.files.append(_FileWriter(path, FileKind.STATE, np.uint64, "score"))

    def append(self, keys: Array, values: Array, states: Sequence[Array] = ()) -> None:
        """keys (n), values (n, dim), one (n, width) for each slot and, with scores, these (n)."""
        arrays = [keys, values, *states]
        if len(arrays) != len(self.files) or any(len(array) != len(keys) for array in arrays):
            raise ValueError(f"states should be {len(self.files) - 2} arrays of {len(keys)} rows")
        for file, array in zip(self.files, arrays):
            file.append(array)

    def add_part(self, kind: str, rank: int, world: int, data: Array) -> None:
        """A file of one rank, see `part_file`."""
        path = self._directory / part_file(self._prefix, kind, rank, world)
        self.parts.append(_FileWriter(path, None, np.uint8))
        self.parts[-1].append(data)


class DumpWriter:
    """Writes a dump beside its place, and puts it there in one step when all is on the disk.

    Files of variables that this dump does not write stay as they are.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.facts: dict[str, Any] = {}  # for the manifest
        self._draft: Draft | None = None
        self._tables: dict[str, TableWriter] = {}
        self._facts: dict[str, dict[str, Any]] = {}  # by variable

    def __enter__(self) -> DumpWriter:
        odd = [e.name for e in self.path.iterdir() if not e.is_file()] if self.path.is_dir() else []
        if odd:
            raise ValueError(f"path should hold a dump alone but {str(self.path)!r} holds: {odd[0]!r}")
        self._draft = Draft(self.path, overwrite=True)
        return self

    def table(
        self,
        name: str,
        key_dtype: npt.DTypeLike,
        *,
        optimizer: str = "",
        slots: Sequence[str] = (),
        facts: dict[str, Any] | None = None,
    ) -> TableWriter:
        """A variable to write; with `facts`, which the manifest gets, its rows have scores. REQUIRES that the
        writer was entered."""
        assert self._draft is not None
        prefix = file_prefix(name)
        if prefix in self._tables:
            raise ValueError(f"names of variables should differ in the dump but two are: {prefix}")
        with_scores = facts is not None
        self._tables[prefix] = TableWriter(self._draft.path, name, key_dtype, optimizer, slots, with_scores)
        if facts is not None:
            self._facts[prefix] = facts
        return self._tables[prefix]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._draft is not None
        opened = [file for table in self._tables.values() for file in (*table.files, *table.parts)]
        try:
            if error is None:
                files = {file.name: file.close() for file in opened}
                files = {**self._keep_others(self._draft.path), **files}
                if tables := {**self._facts_of_others(), **self._facts}:
                    self.facts["tables"] = tables
                manifest = {"format": MANIFEST_FORMAT, "version": 1, **self.facts, "files": files}
                write_durably(self._draft.path / MANIFEST, sealed(manifest))
                self._draft.publish()
                return
        except BaseException:
            self._abandon(opened)
            raise
        self._abandon(opened)

    def _abandon(self, opened: list[_FileWriter]) -> None:
        assert self._draft is not None
        for file in opened:
            file.abandon()
        self._draft.discard()

    def _facts_of_others(self) -> dict[str, Any]:
        old = (read_manifest(self.path) or {}) if self.path.exists() else {}
        return {name: facts for name, facts in old.get("tables", {}).items() if name not in self._tables}

    def _keep_others(self, folder: Path) -> dict[str, Any]:
        """Links what belongs to other variables; returns their entries of the old manifest."""
        if not self.path.exists():
            return {}
        old = read_manifest(self.path) or {"files": {}}
        kept = {}
        for entry in self.path.iterdir():
            if entry.name == MANIFEST or any(entry.name.startswith(f"{p}-") for p in self._tables):
                continue
            os.link(entry, folder / entry.name)
            if entry.name in old["files"]:
                kept[entry.name] = old["files"][entry.name]
        return kept


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a dump; None for a dump of the original."""
    path = directory / MANIFEST
    if not os.path.lexists(path):
        return None
    manifest = read_sealed(path)
    if (manifest.get("format"), manifest.get("version")) != (MANIFEST_FORMAT, 1):
        raise CheckpointError(
            f"{path}: expected a manifest of version 1 of a {MANIFEST_FORMAT}, found "
            f"{manifest.get('format')!r} of version {manifest.get('version')!r}"
        )
    try:
        if "iterations" in manifest:
            count(manifest, "iterations")
        for facts in checked({"tables": manifest.get("tables", {})}, "tables", dict).values():
            checked({"facts": facts}, "facts", dict)
            if "score" in facts:
                count(facts, "score", 1, (1 << 64) - 1)
            if "shared_rows" in facts:
                count(facts, "shared_rows", 1, 1 << 16)
                count(facts, "state_width", most=MOST_FLOATS)
        for name, entry in checked(manifest, "files", dict).items():
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise ValueError(f"files should be names in the folder but one is: {name!r}")
            count(entry, "bytes")
            count(entry, "crc32", most=0xFFFF_FFFF)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return manifest


def _verify(path: Path, entry: dict[str, int]) -> None:
    size = file_size(path)
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: expected {entry['bytes']} bytes, found {size}")
    crc = file_crc32(path)
    if crc != entry["crc32"]:
        raise CheckpointError(
            f"{path}: its checksum is wrong: expected {entry['crc32']:08x}, found {crc:08x}"
        )
