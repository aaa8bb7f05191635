"""Snapshots of OneEmbedding's persistent tables as dumps, and back. docs/stores.md has the files.

    target/user/0-1/{keys,values,snapshots,...}      the table "user", for one rank

A row of such a table is [vector | optimizer state], and its files do not say where the one ends and the other
begins: who reads them names the dimension and the optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import open_regular
from embstore.checkpoint.names import file_stem, name_of
from embstore.formats.columns import Columns
from embstore.progress import Progress
from embstore.rows import Rows
from embstore.stores import SsdStore

BLOCK_ROWS = 65536


def _directories(path: Path) -> list[Path]:
    """The directories of the ranks of one table, or none."""
    if (path / "VALUE_SIZE").is_file():
        return [path]
    return sorted(p for p in path.iterdir() if (p / "VALUE_SIZE").is_file()) if path.is_dir() else []


def tables_in(path: Path) -> dict[str, list[Path]]:
    """The directories of every table: of `path` itself, or of the folders in it."""
    own = _directories(path)
    if own:
        return {name_of(path.name): own}
    folders = sorted(path.iterdir()) if path.is_dir() else []
    return {name_of(p.name): found for p in folders if (found := _directories(p))}


def _number(directory: Path, name: str) -> int:
    fd = open_regular(directory / name)
    try:
        text = os.read(fd, 64).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CheckpointError(f"{directory / name}: should hold a number but holds: {text!r}")
    return int(text)


@contextmanager
def _damage_named(directory: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


class StoredTable:
    """A snapshot over the directories of all ranks, open until the stack is closed."""

    def __init__(self, directories: list[Path], snapshot: str | None, stack: ExitStack) -> None:
        self._stores: list[SsdStore] = []
        for directory in directories:
            sizes = [_number(directory, name) for name in ("VALUE_SIZE", "KEY_SIZE", "PHYSICAL_BLOCK_SIZE")]
            with _damage_named(directory):
                store = SsdStore(
                    directory, sizes[0], key_bytes=sizes[1], physical_block_bytes=sizes[2], create=False
                )
                stack.callback(store.close)
                names = store.snapshots()
            chosen = self._choose(directory, names, snapshot)
            with _damage_named(directory):
                store.load_snapshot(chosen)
            self._stores.append(store)
        widths = {store.row_bytes // 4 for store in self._stores}
        if len(widths) != 1:
            raise CheckpointError(f"{directories[0].parent}: ranks have rows of different widths: {widths}")
        (self.width,) = widths

    @staticmethod
    def _choose(directory: Path, names: list[str], wanted: str | None) -> str:
        if wanted is None and len(names) != 1:
            raise ValueError(f"--snapshot should name one of those of {directory}, which are: {names}")
        if wanted is not None and wanted not in names:
            raise ValueError(f"--snapshot should be one of {names}, those of {directory}, but is: {wanted!r}")
        return names[0] if wanted is None else wanted

    def __len__(self) -> int:
        return sum(len(store) for store in self._stores)

    def blocks(self, dim: int) -> Iterator[Rows]:
        """All rows; what is behind the first `dim` floats is state."""
        for store in self._stores:
            with _damage_named(Path(store.path)):
                for keys, raw, scores in store.scan(BLOCK_ROWS):
                    rows = raw.view(np.float32).reshape(len(keys), self.width)
                    values, states = rows[:, :dim].copy(), rows[:, dim:].copy()
                    yield Rows(keys, values, states, np.maximum(scores, np.uint64(1)))


def write(target: Path, tables: Sequence[Columns], snapshot: str, progress: Progress | None) -> None:
    """One directory for each table, as for one rank, with the rows of the dump in a snapshot."""
    names = [table.name for table in tables]
    if len(set(names)) != len(names):
        raise ValueError(f"tables should have names of their own as directories but are: {names}")
    draft = Draft(target)
    with draft.publishing():
        for number, table in enumerate(tables):
            width = table.dim + table.spec.state_width if table.spec and table.state_names else table.dim
            directory = draft.path / file_stem(table.name) / "0-1"
            with SsdStore(directory, 4 * width) as store:
                for rows in table.blocks():
                    row = np.concatenate([rows.values, rows.states], axis=1, dtype=np.float32)
                    store.put(rows.keys, row, rows.scores)
                store.snapshot(snapshot)
            if progress:
                progress(number + 1, len(tables))
