"""Stores: what keeps rows by key below a table.

base      Store, the base class of your own stores, and what all stores share
memory    MemoryStore, NullStore
ssd       SsdStore
tiers     TieredStore
plugin    stores in a shared library, through the C ABI
redis/    rows in Redis: URLs, connections, layouts
urls      any of them by URL
"""

from embstore.stores.base import (
    EngineStore,
    FoundArray,
    KeyArray,
    RowArray,
    ScoreArray,
    Store,
    row_bytes,
    scan_handle,
)
from embstore.stores.memory import MemoryStore, NullStore
from embstore.stores.ssd import SsdStore
from embstore.stores.tiers import TieredStore

__all__ = [
    "EngineStore",
    "FoundArray",
    "KeyArray",
    "MemoryStore",
    "NullStore",
    "RowArray",
    "ScoreArray",
    "SsdStore",
    "Store",
    "TieredStore",
    "row_bytes",
    "scan_handle",
]
