"""embstore.json: what a collection's folder holds, and the checksum of every file in it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import read_sealed, sealed
from embstore.checkpoint.spec import TableSpec, checked, count
from embstore.formats.dynamicemb import WRITTEN
from embstore.ownership import AnyOwnership, Blocks, OnRank, Ownership

NAME = "embstore.json"
FORMAT = "embstore-dump"
VERSION = 1


@dataclass(frozen=True)
class TableEntry:
    """One table: its description, how many rows each rank wrote, and its files."""

    spec: TableSpec
    ownership: AnyOwnership
    rows_of_rank: list[int]
    files: dict[str, dict[str, int]]  # name -> {"bytes": ..., "crc32": ...}

    @property
    def rows(self) -> int:
        return sum(self.rows_of_rank)


@dataclass(frozen=True)
class Manifest:
    """One collection.

    dump         the same for all collections of a dump, and for no other dump
    collections  of the whole dump
    taken_ns     when the dump was asked for; ages of scores are counted from here
    increment    of an increment log: its number and what it follows, else empty
    """

    dump: str
    collection: str
    collections: list[str]
    layout: str
    world: int
    optim: bool
    taken_ns: int
    tables: dict[str, TableEntry]
    increment: dict[str, Any]

    def text(self) -> str:
        document: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tables"}
        document |= {"format": FORMAT, "version": VERSION}
        document["tables"] = {
            name: {
                **entry.spec.to_dict(),
                "ownership": entry.ownership.name.lower(),
                **({"ownership_rows": entry.ownership.rows} if isinstance(entry.ownership, Blocks) else {}),
                "rows": entry.rows,
                "rows_of_rank": entry.rows_of_rank,
                "files": entry.files,
            }
            for name, entry in self.tables.items()
        }
        return sealed(document)

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a collection's folder, or None where there is none."""
        path = folder / NAME
        if not os.path.lexists(path):
            return None
        document = read_sealed(path)
        if document.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format should be {FORMAT!r} but is: {document.get('format')!r}")
        if document.get("version") != VERSION:
            raise CheckpointError(
                f"{path}: version should be {VERSION} but is: {document.get('version')!r} "
                f"(written by a newer embstore?)"
            )
        try:
            return _parsed(document)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: is not a manifest: {error}") from error


def _parsed(document: dict[str, Any]) -> Manifest:
    tables = checked(document, "tables", dict)
    if not tables:
        raise ValueError("tables should not be empty")
    names = checked(document, "collections", list)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"collections should be names but are: {names!r}")
    world = count(document, "world", 1)
    layout = checked(document, "layout", str)
    if layout not in WRITTEN:
        raise ValueError(f"layout should be one of {', '.join(WRITTEN)} but is: {layout!r}")
    return Manifest(
        dump=checked(document, "dump", str),
        collection=checked(document, "collection", str),
        collections=names,
        layout=layout,
        world=world,
        optim=checked(document, "optim", bool),
        taken_ns=count(document, "taken_ns"),
        tables={name: _entry(name, entry, world) for name, entry in tables.items()},
        increment=_increment(checked(document, "increment", dict)),
    )


def _entry(name: str, document: Any, world: int) -> TableEntry:
    spec = TableSpec.from_dict(document)
    if spec.name != name:
        raise ValueError(f"name of table {name!r} should be the same but is: {spec.name!r}")
    rows = checked(document, "rows_of_rank", list)
    for i in range(len(rows)):
        count({"rows_of_rank": rows[i]}, "rows_of_rank")
    if len(rows) != world:
        raise ValueError(f"rows_of_rank should have {world} numbers but has: {len(rows)}")
    files = checked(document, "files", dict)
    for file, stored in files.items():
        if "/" in file or "\0" in file or file in ("", ".", ".."):
            raise ValueError(f"files should be names in the folder but one is: {file!r}")
        count(stored, "bytes")
        count(stored, "crc32", most=0xFFFF_FFFF)
    ownership = checked(document, "ownership", str)
    if ownership.upper() == Blocks.name:
        return TableEntry(spec, Blocks(count(document, "ownership_rows", 1)), rows, files)
    whole = OnRank.named(ownership.upper())
    return TableEntry(spec, whole or Ownership[ownership.upper()], rows, files)


def _increment(document: dict[str, Any]) -> dict[str, Any]:
    if document:
        count(document, "number")
        checked(document, "log", str)
        for name in ("previous", "stands_for"):
            if name in document:
                checked(document, name, str)
        if "previous" not in document and document["number"] and "stands_for" not in document:
            raise ValueError("previous should name the entry before but is missing")
    return document
