"""Counters of keys that have no row yet, in files: those of a dump, and what changed of them in an increment.

    {table}_admission.rank_0.world_size_2            uint16: header | counters
    {table}_admission_changes.rank_0.world_size_2    uint16: 0x5ce8 | from_zero | size (4) | h |
                                                             header (h) | parts

A part is 64 bytes of the counters with their number (uint32) before them. Counters do not know their keys, so
they are of use to as many ranks as wrote them alone.

    {table}_counter_keys.rank_0.world_size_2         int64: keys
    {table}_counter_frequencies.rank_0.world_size_2  int64: how often each was seen

These are of Table.exact_counts, for any number of ranks. In an increment they have what changed, and 0 says
that a key was forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore.arrays import address
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import file_size
from embstore.checkpoint.names import file_stem
from embstore.checkpoint.parts import RowFile
from embstore.exact_counts import Counts, with_changes
from embstore.table import Table

if TYPE_CHECKING:
    from embstore.checkpoint.reading import DumpTable

Counters = npt.NDArray[np.uint16]

_FORM, _PREFIX, _PART = 0x5CE8, 7, 34  # words: the first, those before the header, a part with its number
_CONTENTS = _PART - 2
MOST_FROM_ZERO = 1 << 24  # counters that a log may begin without saying what most of them are


def admission_file(name: str, rank: int, world: int) -> str:
    return f"{file_stem(name)}_admission.rank_{rank}.world_size_{world}"


def changes_file(name: str, rank: int, world: int) -> str:
    return f"{file_stem(name)}_admission_changes.rank_{rank}.world_size_{world}"


def counter_files(name: str, rank: int, world: int) -> tuple[str, str]:
    """The exact counts of one rank: int64 keys and frequencies."""
    tail = f".rank_{rank}.world_size_{world}"
    return f"{file_stem(name)}_counter_keys{tail}", f"{file_stem(name)}_counter_frequencies{tail}"


def stored_counts(stored: DumpTable) -> Counts:
    """The exact counts of all ranks; none where the dump has no such files.

    Raises CheckpointError where some of its files are missing or damaged.
    """
    world = stored.world or 1
    names = [counter_files(stored.name, rank, world) for rank in range(world)]
    if not any(os.path.lexists(stored.folder / name) for pair in names for name in pair):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    least = 0 if stored.is_increment else 1
    read = [_counts_of(stored.folder / keys, stored.folder / counts, least) for keys, counts in names]
    keys, counts = (np.concatenate(column) for column in zip(*read))
    order = np.argsort(keys, kind="stable")
    return keys[order], counts[order]


def _counts_of(keys: Path, counts: Path, least: int) -> Counts:
    sizes = [file_size(path) for path in (keys, counts)]
    if sizes[0] != sizes[1] or sizes[0] % 8:
        raise CheckpointError(
            f"{counts}: expected as many int64 as {keys.name} has keys, found {sizes[1]} bytes"
        )
    read = [RowFile(path, "<i8", sizes[0] // 8, 1).all()[:, 0] for path in (keys, counts)]
    if (read[1] < least).any():
        raise CheckpointError(f"{counts}: frequencies should be at least {least} but one is: {read[1].min()}")
    return read[0], read[1]


def merged_counts(base: DumpTable, increments: Sequence[DumpTable]) -> Counts | None:
    """The exact counts after the increments; None where no entry has any."""
    if not any("_counter_keys." in file for entry in (base, *increments) for file in entry.files()):
        return None
    counts = stored_counts(base)
    for increment in increments:  # those written before increments had counts change nothing
        counts = with_changes(counts, stored_counts(increment))
    return counts


def stored_counters(stored: DumpTable, file: str) -> Counters | None:
    """One of the files above, None where the dump does not have it."""
    if file not in stored.files():
        return None
    words = stored.files()[file]["bytes"] // 2
    return RowFile(stored.folder / file, "<u2", words, 1).all()[:, 0]


def require_counters(table: Table, counters: Counters | None, changes: bool, whence: object) -> None:
    """Raises CheckpointError where the counters, or what changed of them, are none that a table gave."""
    try:
        if counters is not None:
            table._core.require_counters(address(counters), len(counters), changes)
    except ValueError as error:
        raise CheckpointError(f"{whence}: {error}") from error


def restore_counters(table: Table, counters: npt.NDArray[Any], whence: object) -> bool:
    """`Table.restore_admission_counters` of what a file holds. Raises CheckpointError where it is damaged."""
    try:
        return table.restore_admission_counters(counters.view(np.uint16))
    except ValueError as error:
        raise CheckpointError(f"{whence}: {error}") from error


def merged_counters(
    base: DumpTable, increments: Sequence[DumpTable], rank: int, world: int
) -> Counters | None:
    """The counters of a rank after the increments; None where they are not known."""
    counters = stored_counters(base, admission_file(base.name, rank, world))
    for increment in increments:
        file = changes_file(base.name, rank, world)
        changes = stored_counters(increment, file)
        if changes is not None:  # else it was written before increments had them
            counters = _with_changes(counters, changes, increment.folder / file)
    return counters


def _with_changes(counters: Counters | None, changes: Counters, path: Path) -> Counters | None:
    width = int(changes[6]) if len(changes) >= _PREFIX else 0
    if len(changes) < _PREFIX + width or (len(changes) - _PREFIX - width) % _PART or changes[0] != _FORM:
        raise CheckpointError(
            f"{path}: is not what changed of counters: {len(changes)} words of another form"
        )
    from_zero, size = bool(changes[1]), int(changes[2:6].copy().view("<u8")[0]) // 2
    header, parts = changes[_PREFIX : _PREFIX + width], changes[_PREFIX + width :].reshape(-1, _PART)
    numbers = np.ascontiguousarray(parts[:, :2]).view("<u4")[:, 0]
    if size % _CONTENTS or (numbers >= size // _CONTENTS).any():
        raise CheckpointError(f"{path}: has parts outside of its {size} counters")
    if from_zero:
        # A few words may say that all other counters are 0, and how many there are is only a claim.
        if size > max(MOST_FROM_ZERO, 64 * len(counters if counters is not None else ())):
            return None
        entries = np.zeros(size, np.uint16)
    elif counters is not None and len(counters) == width + size:
        entries = counters[width:].copy()
    else:
        return None
    entries.reshape(-1, _CONTENTS)[numbers] = parts[:, 2:]
    return np.concatenate([header, entries])
