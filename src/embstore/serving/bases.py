"""Serving bases: index and rows of the tables of a dump, ready to be mapped by many processes.

    base/
      serving.json          what the base was made of, sealed by a checksum
      model/user.index      key -> row number, cache lines of five entries
      model/user.rows       the vectors; absent where they are read from the dump itself
      model/user.shared     shared rows: number and vector; absent where the table has none

`Reader` keeps bases in a cache folder, so a dump is indexed once per host. `prepare` writes one to ship.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core, initializers
from embstore.arrays import address
from embstore.checkpoint import host_cache
from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import read_sealed, sealed, sync_file, write_durably
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.reading import Dump, DumpTable, open_dump
from embstore.checkpoint.shared import (
    as_records,
    combined,
    read_records,
    shared_file,
    stored_shared,
)
from embstore.checkpoint.spec import TableSpec, checked, count
from embstore.checkpoint.writing import write_array
from embstore.options import DType, as_enum
from embstore.ownership import Ownership
from embstore.rows import Rows

NAME = "serving.json"
FORMAT = "embstore-serving"
VERSION = 1
_ROWS_AT_ONCE = 1 << 16

Tables = dict[tuple[str, str], _core.ServedTable]
File = dict[str, int]  # bytes, crc32


class RowDType(enum.IntEnum):
    """Elements of served rows. INT8 keeps a minimum and a scale for each row."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3


@dataclass(frozen=True)
class Base:
    """An open base: its tables, and the dump that it stands for."""

    tables: Tables
    dump: str
    number: int
    taken_ns: int


# ---- files of a dump


def map_file(path: Path, bytes_: int = -1) -> _core.MappedFile:
    """Maps a file. Raises CheckpointError when it is missing, not a plain file or of another size."""
    try:
        return _core.MappedFile(os.fspath(path), bytes_)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def map_listed(table: DumpTable, path: Path, verify: bool = True) -> _core.MappedFile:
    """Maps a file that the manifest lists, and compares its checksum."""
    listed = table.files().get(path.name)
    if listed is None:
        raise CheckpointError(f"{path}: is not listed in the manifest of its dump")
    mapped = map_file(path, listed["bytes"])
    if verify and (crc := mapped.checksum()) != listed["crc32"]:
        raise CheckpointError(f"{path}: is damaged: expected crc32 {listed['crc32']}, found {crc}")
    return mapped


def memory_file(array: npt.NDArray[Any]) -> _core.MappedFile:
    """A mapped file in memory with the bytes of an array."""
    fd = os.memfd_create("embstore-rows", os.MFD_CLOEXEC)
    try:
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        while view:
            view = view[os.write(fd, view) :]
        return _core.MappedFile(fd, array.nbytes)
    finally:
        os.close(fd)


def encode(values: npt.NDArray[np.float32], dtype: RowDType) -> npt.NDArray[np.uint8]:
    """Rows of float32 as served rows: uint8 (n, bytes of a row)."""
    n, dim = values.shape
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty((n, _core.served_row_bytes(dim, dtype)), np.uint8)
    _core.encode_served_rows(address(values), n, dim, dtype, address(out))
    return out


def increment_parts(table: DumpTable, dtype: RowDType) -> list[tuple[Any, ...]]:
    """The rows of a table of an increment, verified, as the engine takes them."""
    parts = dump_parts(table, verify=True)
    if dtype == RowDType.FLOAT32:
        return parts
    return [
        (
            keys,
            memory_file(encode(reader.mapped_values(), dtype)),
            n,
            _core.served_row_bytes(table.dim, dtype),
            0,
        )
        for (keys, _, n, _, _), reader in zip(parts, table.readers)
    ]


def dump_parts(table: DumpTable, verify: bool) -> list[tuple[Any, ...]]:
    """(keys, rows, n, stride, offset) of each part of a table: float32 rows as they lie in the dump."""
    return [
        (
            map_listed(table, part.keys, verify),
            map_listed(table, part.values.path, verify),
            part.rows,
            4 * part.values.row_width,
            4 * part.values.begin,
        )
        for part in table.found.parts
    ]


def keys_checksum(table: DumpTable) -> int:
    """CRC-32 of the keys of all parts, one after another."""
    crc = 0
    for part in table.found.parts:
        listed = table.files()[part.keys.name]
        crc = _core.crc32_combine(crc, listed["crc32"], listed["bytes"])
    return crc


def served_table(
    spec: TableSpec, dtype: RowDType, missing: str, parts: list[Any], index: Path | None, keys_crc: int
) -> _core.ServedTable:
    """A table of the engine over mapped parts. Raises CheckpointError when they do not fit together."""
    initializer, values = -1, [0.0] * 5
    if missing == "initial":
        of = initializer_of(spec)
        initializer, values = of.code, of.values()
    try:
        return _core.ServedTable(
            spec.name,
            spec.dim,
            dtype,
            spec.seed,
            DType[spec.dtype.upper()],
            initializer,
            values,
            parts,
            "" if index is None else os.fspath(index),
            keys_crc,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error


def initializer_of(spec: TableSpec) -> initializers.Initializer:
    values = dict(spec.initializer)
    kind = getattr(initializers, str(values.pop("name", "")), None)
    if not (isinstance(kind, type) and issubclass(kind, initializers.Initializer)):
        raise CheckpointError(f"table {spec.name!r}: unknown initializer {spec.initializer!r}")
    return kind(**values)


# ---- writing


def prepare(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: object = "float32"
) -> Path:
    """Writes a serving base of a dump: an index and rows of the given dtype, without optimizer states.

    `target` appears by rename once it is complete. `Reader(target)` opens it without the dump.

    Raises CheckpointError when the dump is damaged or has no manifest, FileExistsError when `target`
    has files.

        embstore.serving.prepare("/data/monday", "/data/monday-int8", dtype="int8")
    """
    kind = as_enum(RowDType, "dtype", dtype)
    write_base(open_dump(source), Path(target), kind, rows_inside=True, durable=True)
    return Path(target)


def write_base(dump: Dump, target: Path, dtype: RowDType, *, rows_inside: bool, durable: bool) -> None:
    """Verifies the keys and vectors of a dump, indexes them and publishes a base.

    One that is not durable may be torn by a power failure, which `open_base` notices.
    """
    of = dump.manifest
    if of is None:
        raise CheckpointError(f"{dump.path}: has no manifest, so its files cannot be verified")
    draft = Draft(target)
    with draft.publishing():
        tables: dict[str, dict[str, Any]] = {}
        for table in dump.tables:
            folder = draft.path / file_stem(table.collection)
            folder.mkdir(exist_ok=True)
            tables.setdefault(table.collection, {})[table.name] = _write_table(
                table, folder, dtype, rows_inside
            )
        if durable:
            for file in draft.path.glob("*/*"):
                sync_file(file)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "dump": of.dump,
            "number": int(of.increment.get("number", 0)),
            "taken_ns": of.taken_ns,
            "dtype": dtype.name.lower(),
            "tables": tables,
        }
        write_durably(draft.path / NAME, sealed(document))


def _write_table(table: DumpTable, folder: Path, dtype: RowDType, rows_inside: bool) -> dict[str, Any]:
    assert table.spec is not None
    stem = file_stem(table.name)
    parts, keys_crc = dump_parts(table, verify=True), keys_checksum(table)
    files: dict[str, File] = {}
    if rows_inside:
        rows_path = folder / f"{stem}.rows"
        files[rows_path.name] = _write_rows(table, rows_path, dtype)
        rows = map_file(rows_path, files[rows_path.name]["bytes"])
        keys = memory_file(np.asarray(table.keys))
        parts = [(keys, rows, table.rows, _core.served_row_bytes(table.dim, dtype), 0)]
    built = served_table(table.spec, dtype, "zero", parts, None, keys_crc)
    built.save_index(os.fspath(folder / f"{stem}.index"), keys_crc)
    if table.spec.shared_rows:
        records = as_records(shared_of(table), optim=False)
        _, size, crc = write_array(folder / f"{stem}.shared", records)
        files[f"{stem}.shared"] = {"bytes": size, "crc32": crc}
    return {
        "spec": table.spec.to_dict(),
        "rows": table.rows,
        "keys_crc32": keys_crc,
        "files": files,
        "seen": {} if rows_inside else _identities(table),
    }


def _write_rows(table: DumpTable, path: Path, dtype: RowDType) -> File:
    crc = written = 0
    with open(path, "xb") as file:
        for reader in table.readers:
            values = reader.mapped_values()
            for begin in range(0, len(values), _ROWS_AT_ONCE):
                block = encode(values[begin : begin + _ROWS_AT_ONCE], dtype)
                file.write(block.data)
                crc, written = _core.crc32(address(block), block.nbytes, crc), written + block.nbytes
    return {"bytes": written, "crc32": crc}


def _identities(table: DumpTable) -> dict[str, list[int]]:
    """What tells that a file is still the one that was verified: size, time of change, inode, device."""
    found = {}
    for part in table.found.parts:
        for path in (part.keys, part.values.path):
            facts = path.stat()
            found[path.name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_dev]
    return found


# ---- opening


def is_base(path: Path) -> bool:
    return (path / NAME).is_file()


def open_base(path: Path, missing: str, dump: Dump | None = None) -> Base:
    """Maps a base. Its rows are in the base, or in `dump`, the dump that it was made of."""
    document = read_sealed(path / NAME)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise CheckpointError(f"{path / NAME}: is not a serving base of version {VERSION}")
    try:
        dtype = as_enum(RowDType, "dtype", document["dtype"])
        tables = {
            (collection, name): _open_table(path, collection, TableSpec.from_dict(facts["spec"]),
                                            facts, dtype, missing, dump)
            for collection, named in document["tables"].items()
            for name, facts in named.items()
        }  # fmt: skip
        number, taken_ns = count(document, "number"), count(document, "taken_ns")
        return Base(tables, checked(document, "dump", str), number, taken_ns)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / NAME}: is incomplete: {error!r}") from error


def _open_table(
    path: Path, collection: str, spec: TableSpec, facts: dict[str, Any], dtype: RowDType, missing: str,
    dump: Dump | None,
) -> _core.ServedTable:  # fmt: skip
    folder, stem = path / file_stem(collection), file_stem(spec.name)
    index, rows = folder / f"{stem}.index", count(facts, "rows")
    keys_crc = count(facts, "keys_crc32", most=0xFFFF_FFFF)
    if dump is not None:
        table = dump[collection][spec.name]
        parts = dump_parts(table, verify=_identities(table) != facts["seen"])
        served = served_table(spec, dtype, missing, parts, index, keys_crc)
        return _with_shared_file(served, spec, folder, facts)
    mapped = _map_own(folder / f"{stem}.rows", facts)
    part = (None, mapped, rows, _core.served_row_bytes(spec.dim, dtype), 0)
    served = served_table(spec, dtype, missing, [part], index, keys_crc)
    return _with_shared_file(served, spec, folder, facts)


def _map_own(path: Path, facts: dict[str, Any]) -> _core.MappedFile:
    """A file of the base itself."""
    listed = facts["files"][path.name]
    mapped = map_file(path, count(listed, "bytes"))
    if (crc := mapped.checksum()) != listed["crc32"]:
        raise CheckpointError(f"{path}: is damaged: expected crc32 {listed['crc32']}, found {crc}")
    return mapped


# ---- shared rows, which ids without a row of their own read


def shared_of(table: DumpTable) -> Rows:
    """The shared rows of all ranks, verified."""
    assert table.manifest is not None
    for rank in range(table.manifest.world):
        name = shared_file(table.name, rank, table.manifest.world)
        if name in table.files():
            map_listed(table, table.folder / name)
    return combined(stored_shared(table) or [])


def with_shared(served: _core.ServedTable, spec: TableSpec, shared: Rows) -> _core.ServedTable:
    """The same table; ids without a row of their own read these."""
    numbers, values = shared.keys, np.ascontiguousarray(shared.values, np.float32)
    by = Ownership[spec.shared_by.upper()]
    return served.with_shared(spec.shared_rows, int(by), address(numbers), len(numbers), address(values))


def _with_shared_file(
    served: _core.ServedTable, spec: TableSpec, folder: Path, facts: dict[str, Any]
) -> _core.ServedTable:
    if not spec.shared_rows:
        return served
    path = folder / f"{file_stem(spec.name)}.shared"
    _map_own(path, facts)
    return with_shared(served, spec, read_records(np.fromfile(path, np.uint8), spec, 0, path))


# ---- the cache of a host


def cached_base(dump: Dump, dtype: RowDType, missing: str, cache: Path) -> Base:
    """The base of a dump from the cache, made first where it is missing or damaged.

    One process of a host makes it while the others wait; all of them share its pages.
    """
    of = dump.manifest
    if of is None:
        raise CheckpointError(f"{dump.path}: has no manifest, so its files cannot be verified")
    if not re.fullmatch(r"[0-9a-f]{1,64}", of.dump):
        raise CheckpointError(f"{dump.path}: its manifest names the dump {of.dump!r}, not hex digits")
    folder = cache / f"{of.dump}-{dtype.name.lower()}"
    rows_inside = dtype != RowDType.FLOAT32
    host_cache.sweep(cache)
    with host_cache.locked(folder):
        try:
            return open_base(folder, missing, None if rows_inside else dump)
        except (CheckpointError, FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
        # A reader that drops the base of an older state may have removed the lock file meanwhile.
        with contextlib.suppress(FileExistsError):
            write_base(dump, folder, dtype, rows_inside=rows_inside, durable=False)
        return open_base(folder, missing, None if rows_inside else dump)


def drop_cached(dump_id: str, dtype: RowDType, cache: Path) -> None:
    """Removes a base that its log has replaced. Processes that still map it are not disturbed."""
    host_cache.remove(cache / f"{dump_id}-{dtype.name.lower()}")
