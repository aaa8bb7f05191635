"""What an entry of an increment log says about its place in the log."""

from __future__ import annotations

from typing import Any

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.reading import Dump
from embstore.ownership import AnyOwnership


def facts_of(dump: Dump, number: int | None = None) -> dict[str, Any]:
    """`increment` of its manifest. Raises CheckpointError when the entry is another than that number."""
    of = dump.manifest
    if of is None or not of.increment:
        raise CheckpointError(f"{dump.path}: is not an entry of an increment log")
    if number is not None and of.increment["number"] != number:
        raise CheckpointError(
            f"{dump.path}: should be number {number} of its log but says: {of.increment['number']}"
        )
    return of.increment


def identity(dump: Dump) -> str:
    """The name of the dump, which no other dump has."""
    of = dump.manifest
    assert of is not None
    return of.dump


def identities(dump: Dump, number: int) -> frozenset[str]:
    """The names of the state after an entry: its own and, of a base, that of the increment it stands for."""
    stands_for = facts_of(dump, number).get("stands_for")
    return frozenset({identity(dump)} | ({stands_for} if stands_for else set()))


def ownership_in(dump: Dump) -> dict[str, dict[str, AnyOwnership]]:
    """How the keys of each table were spread over the ranks."""
    return {
        collection: {name: t.entry.ownership for name, t in dump[collection].items() if t.entry}
        for collection in dump
    }


def optim_of(dump: Dump) -> bool:
    of = dump.manifest
    assert of is not None
    return of.optim
