"""A store in files on a local disk. docs/stores.md describes the files."""

from __future__ import annotations

import os

from embstore import _core
from embstore.stores.base import EngineStore


class SsdStore(EngineStore):
    """Rows in files under a directory, with an index of at most 24 bytes a key in memory.

    path                  the directory, created if missing. One process at a time writes to it
    key_bytes             8, or 4 where keys fit int32
    physical_block_bytes  4096 or 512: the block size of the device
    capacity_rows         beyond it `put` raises and stores nothing (0: no limit)
    direct                bypass the page cache, where the filesystem supports that
    create                False: only read snapshots of an existing store. Any number of processes may do
                          that, also beside the writer
    flush_snapshot        `flush` publishes the rows as a snapshot of this name ("": it only writes them)

    Only snapshots outlive the process: a newly opened store is empty until `load_snapshot`. There may be
    several snapshots; their rows are neither overwritten nor moved until `delete_snapshot`, and until the
    last process that reads them has closed the store. Files that cannot be read or written raise OSError,
    damaged ones RuntimeError.

    >>> import tempfile
    >>> import numpy as np
    >>> with SsdStore(tempfile.mkdtemp(), row_bytes=8) as store:
    ...     store.put([7], np.ones((1, 2), np.float32))
    ...     store.snapshot("monday")
    ...     store.snapshots()
    ['monday']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        row_bytes: int,
        *,
        key_bytes: int = 8,
        physical_block_bytes: int = 4096,
        capacity_rows: int = 0,
        direct: bool = True,
        create: bool = True,
        flush_snapshot: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self._ssd = _core.ssd_store(
            self.path,
            row_bytes,
            key_bytes,
            physical_block_bytes,
            capacity_rows,
            direct,
            create,
            flush_snapshot,
        )
        super().__init__(self._ssd)

    def snapshots(self) -> list[str]:
        """The names of all snapshots."""
        return self._ssd.snapshots()

    def delete_snapshot(self, name: str) -> None:
        """Removes a snapshot. Its space is reused once no process reads it."""
        self._ssd.delete_snapshot(name)

    def stats(self) -> _core.SsdStoreStats:
        """Rows, bytes in memory and in files, and bytes put and written since the store was opened."""
        return self._ssd.stats()

    def close(self) -> None:
        """Waits for running reads, then releases the directory. Rows outside of snapshots are gone; any later
        use of the store raises RuntimeError."""
        self._ssd.close()

    def __enter__(self) -> SsdStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
