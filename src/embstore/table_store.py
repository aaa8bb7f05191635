"""A table over a store: rows that are brought up and written down, and checkpoints of the store."""

from __future__ import annotations

from embstore import _core
from embstore.arrays import as_keys
from embstore.table_training import TableTraining


class TableOverStore(TableTraining):
    """Base of `Table`."""

    def prefetch(self, keys: object) -> _core.SlotList:
        """Brings rows that are only in the store below up into memory.

        Args:
            keys: integers; those without a row are skipped.

        Returns:
            A handle; the rows stay in memory while it lives.

        Raises:
            TypeError: keys are not integers.
            OSError: the store cannot be read.
            RuntimeError: the table is closed, or has no store.
        """
        k = as_keys(keys)
        return self._table._core.prefetch(k.address, k.n)

    def flush(self) -> None:
        """Writes changed rows down to the store, and flushes it.

        Raises:
            OSError: the store cannot take them.
            RuntimeError: the table is closed, or has no store.
        """
        self._table._core.flush()

    def save_snapshot(self, name: str) -> None:
        """Writes changed rows down and lets the store keep its contents under a name.

        Args:
            name: of the new checkpoint of the store.

        Raises:
            OSError: the store cannot keep it.
            RuntimeError: the table is closed, or has no store.
        """
        self._table._core.snapshot(name)

    def load_snapshot(self, name: str) -> None:
        """Replaces everything with a checkpoint of the store; changes nothing if it cannot be read.

        Args:
            name: as given to `save_snapshot`.

        Raises:
            FileNotFoundError: the store has none of that name.
            RuntimeError: the table is closed, or has no store.
        """
        self._table._core.load_snapshot(name)
