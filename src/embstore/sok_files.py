"""The files of a SparseOperationKit dump, read and written without TensorFlow.

    weights/user_0-key       296 bytes of header, then the keys
    weights/user_0-weight    header, then the vectors (float32), in the order of the keys
    weights/user_0-Adam-m    header, then one state of each row
    weights/manifest.json    checksums, the number of ranks, steps of the optimizer (ours, optional)

A header is the name of the table (256 bytes), the kind of file (u32, big-endian), the name of the state
(32 bytes) and the element type (u32, big-endian); names are padded with spaces on the left.

    with DumpWriter("weights") as writer:
        table = writer.table("user", np.int64, optimizer="Adam", slots=("m", "v"))
        table.append(keys, values, [m, v])
    DumpReader("weights").table("user").block(0, 1000)      # keys, values, {"Adam-m": ..., "Adam-v": ...}
"""

from __future__ import annotations

import ctypes
import enum
import errno
import json
import os
import shutil
import string
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 296
MANIFEST = "manifest.json"
MANIFEST_FORMAT = "sparse_operation_kit dump"
_HEADER = struct.Struct(">256sI32sI")
_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")
_VERIFY_BYTES = 1 << 24
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Array = npt.NDArray[Any]


class FileKind(enum.IntEnum):
    """What a file holds."""

    KEY = 0
    WEIGHT = 1
    STATE = 2


class DamagedDumpError(ValueError):
    """A file of a dump is missing, cut or changed."""


def file_prefix(name: str) -> str:
    """The name of a variable as it begins the names of its files: punctuation becomes "_"."""
    return name.translate(str.maketrans(string.punctuation, "_" * len(string.punctuation)))


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
        raise DamagedDumpError(f"{path} should have a header of {HEADER_BYTES} bytes but has: {len(data)}")
    _, kind, slot, code = _HEADER.unpack(data[:HEADER_BYTES])
    if kind >= len(FileKind) or code >= len(_DTYPES):
        raise DamagedDumpError(f"{path} should hold a known kind and element type but holds: {kind}, {code}")
    return FileKind(kind), np.dtype(_DTYPES[code]), slot.decode(errors="replace").strip()


def read_array(path: Path, kind: FileKind, rows: int | None = None) -> Array:
    """The array of a file, mapped: (n), or (rows, columns) where the number of rows is given."""
    try:
        with path.open("rb") as file:
            found, dtype, _ = parse_header(file.read(HEADER_BYTES), path)
    except FileNotFoundError:
        raise DamagedDumpError(f"{path} should be there but is not") from None
    if found != kind:
        raise DamagedDumpError(f"{path} should hold {kind.name} but holds: {found.name}")
    body = path.stat().st_size - HEADER_BYTES
    width = 1 if rows is None else rows
    if body % dtype.itemsize or (body // dtype.itemsize) % max(width, 1) or (rows == 0 and body):
        raise DamagedDumpError(f"{path} should hold whole rows for {rows} keys but has {body} bytes of them")
    columns = body // dtype.itemsize // max(width, 1)
    shape = (columns,) if rows is None else (rows, columns)
    if body == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", HEADER_BYTES, shape)


class TableReader:
    """The rows of one variable in a dump."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.prefix = prefix
        self.keys = read_array(directory / f"{prefix}-key", FileKind.KEY)
        self.values = read_array(directory / f"{prefix}-weight", FileKind.WEIGHT, len(self.keys))
        self.states = {
            path.name.removeprefix(f"{prefix}-"): read_array(path, FileKind.STATE, len(self.keys))
            for path in sorted(directory.glob(f"{prefix}-*-*"))
        }

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def dim(self) -> int:
        """Components of a vector; 0 where there are no rows."""
        return int(self.values.shape[1])

    def block(self, begin: int, end: int) -> tuple[Array, Array, dict[str, Array]]:
        """Rows begin to end: keys, values, and states by "<optimizer>-<slot>"."""
        states = {name: np.asarray(array[begin:end]) for name, array in self.states.items()}
        return np.asarray(self.keys[begin:end]), np.asarray(self.values[begin:end]), states


class DumpReader:
    """A dump directory: ours, with a manifest, or one of the original, without."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.exists() and _beside(self.path, "old").exists():
            self.path = _beside(self.path, "old")  # a dump was stopped between its two renames
        if not self.path.is_dir():
            raise FileNotFoundError(f"path should be the directory of a dump but is: {str(path)!r}")
        self.manifest = read_manifest(self.path)

    def tables(self) -> list[str]:
        """The variables, as they begin the names of their files."""
        return sorted(path.name.removesuffix("-key") for path in self.path.glob("*-key"))

    def table(self, name: str, *, verify: bool = True) -> TableReader:
        """The rows of a variable. Checks sizes and, where there is a manifest, checksums."""
        prefix = file_prefix(name)
        if verify and self.manifest is not None:
            for file, entry in self.manifest["files"].items():
                if file.startswith(f"{prefix}-"):
                    _verify(self.path / file, entry)
        return TableReader(self.path, prefix)


class _FileWriter:
    def __init__(self, path: Path, kind: FileKind, dtype: npt.DTypeLike, slot: str = "") -> None:
        self.name = path.name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.bytes = self.crc = 0
        self._file = path.open("wb")
        self._write(pack_header(kind, dtype, slot))

    def _write(self, data: Any) -> None:
        self._file.write(data)
        self.bytes += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def append(self, array: Array) -> None:
        if array.size:
            self._write(np.ascontiguousarray(array, self.dtype).reshape(-1).view(np.uint8).data)

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
        self, directory: Path, name: str, key_dtype: npt.DTypeLike, optimizer: str, slots: Sequence[str]
    ) -> None:
        prefix = file_prefix(name)
        self.files = [
            _FileWriter(directory / f"{prefix}-key", FileKind.KEY, key_dtype),
            _FileWriter(directory / f"{prefix}-weight", FileKind.WEIGHT, np.float32),
        ]
        for slot in slots:
            path = directory / f"{prefix}-{optimizer}-{slot}"
            self.files.append(_FileWriter(path, FileKind.STATE, np.float32, slot))

    def append(self, keys: Array, values: Array, states: Sequence[Array] = ()) -> None:
        """keys (n), values (n, dim) and one (n, width) for each slot."""
        arrays = [keys, values, *states]
        if len(arrays) != len(self.files) or any(len(array) != len(keys) for array in arrays):
            raise ValueError(f"states should be {len(self.files) - 2} arrays of {len(keys)} rows")
        for file, array in zip(self.files, arrays):
            file.append(array)


class DumpWriter:
    """Writes a dump beside its place, and puts it there in one step when all is on the disk.

    Files of variables that this dump does not write stay as they are.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._new = _beside(self.path, "new")
        self._tables: list[TableWriter] = []
        self._prefixes: list[str] = []
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> DumpWriter:
        if self.path.exists():
            odd = [entry.name for entry in self.path.iterdir() if not entry.is_file()]
            if odd:
                raise ValueError(f"path should hold a dump alone but {str(self.path)!r} holds: {odd[0]!r}")
        elif _beside(self.path, "old").exists():
            os.rename(_beside(self.path, "old"), self.path)
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir(parents=True)
        return self

    def table(
        self, name: str, key_dtype: npt.DTypeLike, *, optimizer: str = "", slots: Sequence[str] = ()
    ) -> TableWriter:
        """A variable to write."""
        if file_prefix(name) in self._prefixes:
            raise ValueError(f"names of variables should differ in the dump but two are: {file_prefix(name)}")
        self._prefixes.append(file_prefix(name))
        self._tables.append(TableWriter(self._new, name, key_dtype, optimizer, slots))
        return self._tables[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for table in self._tables:
                for file in table.files:
                    file.abandon()
            shutil.rmtree(self._new, ignore_errors=True)
            return
        files = {file.name: file.close() for table in self._tables for file in table.files}
        files = {**self._keep_others(), **files}
        manifest = {"format": MANIFEST_FORMAT, "version": 1, **self.facts, "files": files}
        with (self._new / MANIFEST).open("w") as text:
            json.dump(manifest, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        _sync_directory(self._new)
        publish(self._new, self.path)

    def _keep_others(self) -> dict[str, Any]:
        """Links what belongs to other variables; returns their entries of the old manifest."""
        if not self.path.exists():
            return {}
        old = read_manifest(self.path) or {"files": {}}
        kept = {}
        for entry in self.path.iterdir():
            if entry.name == MANIFEST or any(entry.name.startswith(f"{p}-") for p in self._prefixes):
                continue
            os.link(entry, self._new / entry.name)
            if entry.name in old["files"]:
                kept[entry.name] = old["files"][entry.name]
        return kept


def publish(new: Path, path: Path) -> None:
    """Puts the directory `new` in the place of `path`, in one step where the file system can."""
    if path.exists():
        old = _beside(path, "old")
        shutil.rmtree(old, ignore_errors=True)
        if _exchange(new, path):
            os.rename(new, old)
        else:
            os.rename(path, old)  # stopped here, a reader takes `old`
            os.rename(new, path)
        _sync_directory(path.parent)
        shutil.rmtree(old)
    else:
        os.rename(new, path)
    _sync_directory(path.parent)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a dump; None for a dump of the original."""
    try:
        text = (directory / MANIFEST).read_text()
    except FileNotFoundError:
        return None
    try:
        manifest = json.loads(text)
        if manifest["format"] != MANIFEST_FORMAT or manifest["version"] != 1:
            raise ValueError
        return dict(manifest)
    except (ValueError, KeyError, TypeError):
        raise DamagedDumpError(f"{directory / MANIFEST} should be a manifest of version 1") from None


def _verify(path: Path, entry: dict[str, int]) -> None:
    crc = size = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_VERIFY_BYTES):
                crc = zlib.crc32(block, crc)
                size += len(block)
    except FileNotFoundError:
        raise DamagedDumpError(f"{path} should be there but is not") from None
    if size != entry["bytes"]:
        raise DamagedDumpError(f"{path} should have {entry['bytes']} bytes but has: {size}")
    if crc != entry["crc32"]:
        raise DamagedDumpError(f"{path} should have the checksum {entry['crc32']:08x} but has: {crc:08x}")


def _beside(path: Path, suffix: str) -> Path:
    path = Path(os.path.abspath(path))
    return path.with_name(f".{path.name}.{suffix}")


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names atomically; False where the system has no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
