"""Stores in host memory."""

from __future__ import annotations

from embstore import _core
from embstore.stores.base import EngineStore


class MemoryStore(EngineStore):
    """Rows in host memory. Beyond `capacity_rows` (0: no limit) `put` raises and stores nothing."""

    def __init__(self, row_bytes: int, capacity_rows: int = 0) -> None:
        super().__init__(_core.memory_store(row_bytes, capacity_rows))


class NullStore(EngineStore):
    """Discards every row and finds none."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(_core.null_store(row_bytes))
