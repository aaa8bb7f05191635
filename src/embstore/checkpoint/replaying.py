"""What a log says, as tables: its base with every increment after it applied.

log = open_any("/data/log")      # or a dump
log.tables[0].find([7, -1])
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.increments import IncrementLog
from embstore.checkpoint.log_entries import optim_of
from embstore.checkpoint.merging import Merged, merge_tables
from embstore.checkpoint.reading import Dump, is_log, open_dump, verify_all
from embstore.formats.columns import Columns
from embstore.progress import Progress, Wanted, shown
from embstore.rows import Rows


class LogTable(Columns):
    """One table of a log. Its rows are read into memory when they are first asked for."""

    layout = "log"
    has_scores = True

    def __init__(self, merged: Merged, optim: bool, size: int) -> None:
        self._merged = merged
        self._optim = optim
        self._bytes = size
        self.collection = merged.collection
        self.spec = merged.spec
        self.name = merged.spec.name

    @cached_property
    def rows(self) -> int:
        return self._merged.rows_of_rank(1)[0]

    @property
    def dim(self) -> int:
        return self._merged.spec.dim

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def world(self) -> int:
        return self._merged.world

    @property
    def state_names(self) -> list[str]:
        return [name for name, _, _ in self._merged.spec.file_states()] if self._optim else []

    @property
    def shared(self) -> Rows | None:
        return self._merged.shared()

    @cached_property
    def _whole(self) -> Rows:
        return Rows.concatenate([self._merged.empty(), *self._merged.blocks()])

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        return self._whole.keys

    @property
    def values(self) -> npt.NDArray[np.float32]:
        return self._whole.values

    @property
    def scores(self) -> npt.NDArray[np.uint64]:
        return self._whole.scores

    def _state(self, i: int) -> npt.NDArray[np.float32]:
        _, begin, width = self._merged.spec.file_states()[i]
        return self._whole.states[:, begin : begin + width]

    def blocks(self, block_rows: int = 65536) -> Iterator[Rows]:
        yield from self._merged.blocks()


class Replay:
    """A dump, or a log as if its state had been dumped.

    entries    the dump, or the base of the log and its increments
    tables     what they say together
    """

    def __init__(self, entries: list[Dump]) -> None:
        self.entries = entries
        self.tables: list[Columns] = list(entries[0].tables)
        if len(entries) > 1:
            self.tables = [
                LogTable(table, optim_of(entries[0]), size) for table, size in merge_tables(entries)
            ]

    def verify(self, progress: Progress | None = None) -> int:
        """Reads every file and compares its checksum; returns how many bytes were right."""
        return verify_all(self.entries, progress)


def open_any(path: Path) -> Replay:
    """Opens a dump of any layout, or a log. Raises CheckpointError where it is damaged, NotADumpError or
    FileNotFoundError where there is neither."""
    return Replay(IncrementLog(path).chain() if is_log(path) else [open_dump(path)])


def open_verified(path: Path, progress: Wanted) -> Replay:
    """`open_any`, with every file checked."""
    stored = open_any(path)
    with shown(progress, "verifying") as report:
        stored.verify(report)
    return stored
