"""What an entry of an increment log says about its place in the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.reading import Dump
from embstore.ownership import AnyOwnership

_ENTRY = re.compile(r"(base|increment)-(\d{12})")
Entries = dict[str, dict[int, Path]]  # "base" or "increment" -> number -> folder
RELISTINGS = 3
T = TypeVar("T")


def place_of(name: str) -> tuple[int, str] | None:
    """Number and kind of an entry of this name; None where it is no entry."""
    match = _ENTRY.fullmatch(name)
    return (int(match[2]), match[1]) if match else None


def entries_in(path: Path) -> Entries:
    """Published entries of the log in a folder."""
    found: Entries = {"base": {}, "increment": {}}
    if not path.is_dir():
        raise FileNotFoundError(f"path should be the folder of an increment log but is: {path}")
    for folder in path.iterdir():
        if place := place_of(folder.name):
            found[place[1]][place[0]] = folder
    return found


def last_of(entries: Entries) -> int:
    """The number of the newest entry, -1 where there is none."""
    return max([*entries["base"], *entries["increment"]], default=-1)


def steady(list_entries: Callable[[], Entries], work: Callable[[Entries], T]) -> T:
    """What `work` makes of the entries of a log. Entries may come and go meanwhile.

    When it fails and there is a newer base by now, that is why, and it is tried again. When only increments
    have come, it is tried again a few times: a trainer may go on appending to a log that is damaged.
    """
    left = RELISTINGS
    while True:
        entries = list_entries()
        try:
            return work(entries)
        except (CheckpointError, FileNotFoundError):
            now = list_entries()
            if now["base"].keys() == entries["base"].keys():
                left -= 1
                if now == entries or left == 0:
                    raise


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
