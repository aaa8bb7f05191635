"""Modules that have moved can still be imported by their documented old names.

import embstore.store_urls          # the module embstore.stores.urls
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "embstore.batch": "embstore.nn.batch",
    "embstore.device_tier": "embstore.nn.device_tier",
    "embstore.modules": "embstore.nn.modules",
    "embstore.plugin_store": "embstore.stores.plugin",
    "embstore.redis_store": "embstore.stores.redis.store",
    "embstore.redis_url": "embstore.stores.redis.url",
    "embstore.sok_files": "embstore.formats.sok",
    "embstore.store_urls": "embstore.stores.urls",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # Both names give the one module: setting an attribute through either is seen through the other.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


sys.meta_path.append(_Moved())
