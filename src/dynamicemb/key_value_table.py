"""Storage classes of the original package, for isinstance. Tables of this package keep their own rows."""

import json

from dynamicemb.types import Cache, CopyMode, Storage
from dynamicemb.unavailable import unavailable_class, unavailable_function

__all__ = [
    "Cache",
    "CopyMode",
    "DynamicEmbCache",
    "DynamicEmbStorage",
    "HybridStorage",
    "Storage",
    "eval_lookup",
    "flush_cache",
    "load_from_json",
    "save_to_json",
]

_TABLES = "use dynamicemb.batched_dynamicemb_tables.BatchedDynamicEmbeddingTables"
DynamicEmbStorage = unavailable_class("DynamicEmbStorage", __name__, _TABLES, Storage)
HybridStorage = unavailable_class("HybridStorage", __name__, _TABLES, Storage)
DynamicEmbCache = unavailable_class("DynamicEmbCache", __name__, _TABLES, Cache)
flush_cache = unavailable_function("flush_cache", "call flush() of the module")
eval_lookup = unavailable_function("eval_lookup", "call the module after eval()")


def save_to_json(data: dict[str, object], file_path: str) -> None:
    """Writes a dict as JSON, indented by 4."""
    with open(file_path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=4)


def load_from_json(file_path: str) -> dict[str, object]:
    """Reads a dict from JSON."""
    with open(file_path, encoding="utf-8") as file:
        found: dict[str, object] = json.load(file)
    return found
