"""Sharded collections of a model and views of their dynamic tables, for tools."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dynamicemb.model_walk import Collection, find_collections, resolve, walk_modules
from dynamicemb.tables import HoldsDynamicTables
from dynamicemb.views import TablesByName, view_of

__all__ = [
    "Collection",
    "check_emb_collection_modules",
    "find_collections",
    "find_sharded_modules",
    "get_dynamic_emb_module",
    "resolve",
]

SHARDED = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)


def find_sharded_modules(module: nn.Module, path: str = "") -> list[tuple[str, str, nn.Module]]:
    """(path, name, module) of every sharded collection, of static ones too. The root is called "model", or
    as `path` says; the name is the last component of the path."""
    found: list[tuple[str, str, nn.Module]] = []
    for child_path, child in walk_modules(module, path or "model", SHARDED):
        if isinstance(child, SHARDED):
            found.append((child_path, child_path.rpartition(".")[2], child))
    return found


def check_emb_collection_modules(module: nn.Module, ret_list: list[TablesByName]) -> list[TablesByName]:
    """Adds the views of the dynamic tables in `module` to the list, each once, and returns it."""
    for _, child in walk_modules(module, "model", HoldsDynamicTables):
        if isinstance(child, HoldsDynamicTables) and child.dynamic_tables:
            view = view_of(child, child.dynamic_tables)
            if not any(known is view for known in ret_list):
                ret_list.append(view)
    return ret_list


def get_dynamic_emb_module(model: nn.Module) -> list[TablesByName]:
    """A view of the dynamic tables of each collection, the same objects at every call."""
    return check_emb_collection_modules(model, [])
