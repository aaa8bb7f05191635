"""A store in files on a local disk. docs/stores.md describes the files."""

from __future__ import annotations

import os

from embstore import _core
from embstore.stores.base import EngineStore


class SsdStore(EngineStore):
    """Rows in files under a directory, with an index of at most 24 bytes a key in memory.

    path                  the directory; made where there is none. One process at a time writes to it
    key_bytes             8, or 4 where keys fit int32
    physical_block_bytes  4096 or 512: what the device reads at once
    capacity_rows         beyond it `put` raises and takes nothing (0: no bound)
    direct                reads and writes go past the page cache, where the filesystem can do that
    create                False: only read snapshots of a store that is there. Any number of processes may do
                          that at once, also beside the one that writes
    flush_snapshot        `flush` publishes the rows under this name, for whoever opens the directory next
                          ("": it only writes them)

    Only snapshots outlive the process: a directory that is opened is empty until `load_snapshot`.
    Several live side by side; the rows of a snapshot are neither overwritten nor moved until
    `delete_snapshot`, or until the last process that reads it has closed it. Files that cannot be read or
    written raise OSError, damaged ones RuntimeError.

    >>> import tempfile
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
        """Removes a snapshot. Its space is used again once no process reads it."""
        self._ssd.delete_snapshot(name)

    def stats(self) -> _core.SsdStoreStats:
        """Rows, bytes in memory and in files, and bytes put and written since it was opened."""
        return self._ssd.stats()

    def close(self) -> None:
        """Waits for running reads, then releases the directory. Rows that no snapshot names are gone; every
        other use raises RuntimeError afterwards."""
        self._ssd.close()

    def __enter__(self) -> SsdStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
