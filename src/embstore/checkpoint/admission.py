"""Counters of keys that have no row yet, in files: those of a dump, and what changed of them in an increment.

    {table}_admission.rank_0.world_size_2            uint16: header | counters
    {table}_admission_changes.rank_0.world_size_2    uint16: 0x5ce8 | anew | size (4) | h | header (h) | parts

A part is 64 bytes of the counters with their number (uint32) before them. Counters do not know their keys, so
they are of use to as many ranks as wrote them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.names import file_stem
from embstore.checkpoint.parts import RowFile

if TYPE_CHECKING:
    from embstore.checkpoint.reading import DumpTable

Counters = npt.NDArray[np.uint16]

_PREFIX, _PART = 7, 34  # words before the header, and of a part with its number


def admission_file(name: str, rank: int, world: int) -> str:
    return f"{file_stem(name)}_admission.rank_{rank}.world_size_{world}"


def changes_file(name: str, rank: int, world: int) -> str:
    return f"{file_stem(name)}_admission_changes.rank_{rank}.world_size_{world}"


def stored_counters(stored: DumpTable, file: str) -> Counters | None:
    """One of the files above, None where the dump does not have it."""
    if file not in stored.files():
        return None
    words = stored.files()[file]["bytes"] // 2
    return RowFile(stored.folder / file, "<u2", words, 1).read(0, words)[:, 0]


def merged_counters(
    base: DumpTable, increments: Sequence[DumpTable], rank: int, world: int
) -> Counters | None:
    """The counters of a rank after the increments; None where they are not known."""
    counters = stored_counters(base, admission_file(base.name, rank, world))
    for increment in increments:
        changes = stored_counters(increment, changes_file(base.name, rank, world))
        if changes is not None:  # else it was written before increments had them
            counters = _with_changes(counters, changes)
    return counters


def _with_changes(counters: Counters | None, changes: Counters) -> Counters | None:
    anew, size, width = bool(changes[1]), int(changes[2:6].copy().view("<u8")[0]) // 2, int(changes[6])
    header, parts = changes[_PREFIX : _PREFIX + width], changes[_PREFIX + width :].reshape(-1, _PART)
    if anew:
        entries = np.zeros(size, np.uint16)
    elif counters is not None and len(counters) == width + size:
        entries = counters[width:].copy()
    else:
        return None
    entries.reshape(-1, _PART - 2)[np.ascontiguousarray(parts[:, :2]).view("<u4")[:, 0]] = parts[:, 2:]
    return np.concatenate([header, entries])
