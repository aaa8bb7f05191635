"""embstore.json: what a collection's folder holds, and the checksum of every file in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embstore.checkpoint.files import read_sealed, sealed
from embstore.checkpoint.ranks import CheckpointError
from embstore.checkpoint.spec import TableSpec
from embstore.ownership import Ownership

NAME = "embstore.json"
FORMAT = "embstore-dump"
VERSION = 1


@dataclass(frozen=True)
class TableEntry:
    """One table: its description, how many rows each rank wrote, and its files."""

    spec: TableSpec
    ownership: Ownership
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
        if not path.is_file():
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
            known = {f.name: document[f.name] for f in fields(Manifest)}
            known["tables"] = {
                name: TableEntry(
                    TableSpec.from_dict(entry),
                    Ownership[entry["ownership"].upper()],
                    entry["rows_of_rank"],
                    entry["files"],
                )
                for name, entry in document["tables"].items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: is incomplete: {error!r}") from error
        return Manifest(**known)
