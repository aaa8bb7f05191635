"""The dynamic tables of a model, by the path of their collection.

    find_collections(dmp)     {"model.sparse.ebc": Collection(path, tables={"user": DynamicTable, ...})}

The root of a path is called "model"; wrappers (DMP, DDP, FSDP) do not show in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from dynamicemb.tables import DynamicTable, HoldsDynamicTables

WRAPPERS = (DistributedModelParallel, DistributedDataParallel, FullyShardedDataParallel)


@dataclass(eq=False)
class Collection:
    """A sharded collection that has dynamic tables."""

    path: str
    tables: dict[str, DynamicTable] = field(default_factory=dict)


def find_collections(model: nn.Module) -> dict[str, Collection]:
    """Every collection with dynamic tables, keyed by its full path, in the order of the model."""
    found: dict[str, Collection] = {}
    for path, module in walk_modules(model, "model", HoldsDynamicTables):
        if isinstance(module, HoldsDynamicTables) and module.dynamic_tables:
            found[path] = Collection(path, dict(module.dynamic_tables))
    return found


def walk_modules(model: nn.Module, root: str, leaves: Any) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, once, wrappers left out; what is inside of `leaves` is not looked at."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        while isinstance(module, WRAPPERS):
            module = module.module
        if id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        if not isinstance(module, leaves):
            for name, child in module.named_children():
                yield from walk(child, f"{path}.{name}")

    yield from walk(model, root)


def resolve(collections: Mapping[str, Collection], name: str) -> Collection | None:
    """The collection of this full path, or else the one whose last component it is.

    None when there is none. Raises ValueError when several have this last component.
    """
    if name in collections:
        return collections[name]
    matches = [c for path, c in collections.items() if path.rpartition(".")[2] == name]
    if len(matches) > 1:
        paths = ", ".join(c.path for c in matches)
        raise ValueError(f"the collection {name!r} should be named by its full path, one of {paths}")
    return matches[0] if matches else None
