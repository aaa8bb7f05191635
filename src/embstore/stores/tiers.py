"""Two stores as one: an upper tier that caches a lower one."""

from __future__ import annotations

from embstore import _core
from embstore.stores.base import EngineStore, Store


class TieredStore(EngineStore):
    """Two stores as one: new rows go to `upper`; beyond about `upper_rows` rows the oldest move to `lower`.
    Either may be a TieredStore itself.

    >>> from embstore.stores import MemoryStore, NullStore
    >>> store = TieredStore(MemoryStore(8), NullStore(8), upper_rows=1000)
    """

    def __init__(self, upper: Store, lower: Store, upper_rows: int) -> None:
        self.upper, self.lower = upper, lower
        super().__init__(_core.tiered_store(upper.handle(), lower.handle(), upper_rows))
