"""Dynamic tables of a model to files and back: `DynamicEmbDump` and `DynamicEmbLoad`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

import embstore
from dynamicemb.discovery import (
    check_emb_collection_modules,
    find_collections,
    find_sharded_modules,
    get_dynamic_emb_module,
    resolve,
)
from dynamicemb.tables import DynamicTable
from embstore.checkpoint import DumpHandle

__all__ = [
    "DynamicEmbDump",
    "DynamicEmbLoad",
    "check_emb_collection_modules",
    "find_sharded_modules",
    "get_dynamic_emb_module",
]

logger = logging.getLogger(__name__)

LAYOUT_VARIABLE = "DYNAMICEMB_LAYOUT"
_warned: set[str] = set()  # clients call at every save, whatever the model: one warning a process

Selection = dict[str, dict[str, DynamicTable]]
TableNames = Mapping[str, Sequence[str]] | Sequence[str] | None


def DynamicEmbDump(
    path: str,
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool | None = False,
    counter: bool | dist.ProcessGroup | None = None,
    pg: dist.ProcessGroup | None = None,
    allow_overwrite: bool = False,
    *,
    async_: bool = False,
    layout: str | None = None,
) -> DumpHandle | None:
    """Writes the dynamic tables of a model to a folder, by all ranks together.

    Each collection has its folder, named after its path with "model" as the root; a table is a file of
    int64 keys and a file of float32 vectors, and so is each optimizer state. See docs/formats.md.

    Args:
        path: the folder; it appears when the dump is complete.
        model: a module with sharded collections, usually a DistributedModelParallel. One without dynamic
            tables warns, and nothing is written.
        table_names: {collection: [tables]}, by the collection's path or its last component. None: all.
        optim: optimizer states too.
        counter: True or False: the dump is for current readers, in layout v2. Counts of keys without a row
            are kept in any case. A process group in this place is taken as `pg`.
        pg: the ranks that take part. None: those that share the tables.
        allow_overwrite: replaces a folder that has files, in one step.
        async_: returns a handle at once; training may go on while the state of now is written.
        layout: "v1a" (the documented one) or "v2" (that of newer versions of the original package). None:
            what the environment variable DYNAMICEMB_LAYOUT says, else v2 if `counter` is given.

    Returns:
        A handle with `async_`, whose `wait` returns when the dump is complete; else None.

    Raises:
        FileExistsError: path has files and allow_overwrite is False.
        OSError: the files cannot be written; on every rank, and path stays what it was.
        ValueError: table_names or layout is not allowed.

    Examples:
        >>> import tempfile
        >>> from dynamicemb import DynamicEmbDump, DynamicEmbLoad
        >>> folder = tempfile.mkdtemp()
        >>> DynamicEmbDump(f"{folder}/monday", model, optim=True)
        >>> DynamicEmbLoad(f"{folder}/monday", model, optim=True)
    """
    counter, pg = _counter_or_group(counter, pg)
    layout = _layout(layout, counter)
    selected = _select(model, table_names, "DynamicEmbDump")
    if not selected:
        return None
    _note_counters(counter, selected)
    for table in _tables(selected):
        table.optimizer_args()  # lets the learning rate of a scheduler reach the table
    return embstore.dump(
        path,
        {c: {n: t.table for n, t in named.items()} for c, named in selected.items()},
        optim=bool(optim),
        group=pg or _tables(selected)[0].process_group,
        ownership={c: {n: t.ownership for n, t in named.items()} for c, named in selected.items()},
        layout=layout,
        async_=async_,
        overwrite=allow_overwrite,
        counts=counter is not False,
    )


def DynamicEmbLoad(
    path: str,
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool = False,
    counter: bool | dist.ProcessGroup | None = None,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Reads the dynamic tables of a model from a dump of any layout and world size.

    Rows of keys that are there are replaced, others are added. A dump that is damaged, or that does not fit
    the tables, raises on all ranks before any row changes.

    Args:
        path: the folder of a dump.
        model: a module with sharded collections. One without dynamic tables warns, and nothing is read.
        table_names: {collection: [tables]}, by the collection's path or its last component. None: all that
            the dump has.
        optim: with optimizer states: training continues as if it had not stopped. Without, they start fresh.
        counter: False leaves the counts of keys without a row alone. A process group is taken as `pg`.
        pg: the ranks that take part. None: those that share the tables.

    Raises:
        embstore.CheckpointError: the dump is damaged, or lacks a table that was asked for by name.
        ValueError: it does not fit the tables, or table_names is not allowed.

    Examples:
        >>> import tempfile
        >>> from dynamicemb import DynamicEmbDump, DynamicEmbLoad
        >>> folder = tempfile.mkdtemp()
        >>> DynamicEmbDump(f"{folder}/monday", model)
        >>> DynamicEmbLoad(f"{folder}/monday", model, {"ebc": ["user"]})
    """
    counter, pg = _counter_or_group(counter, pg)
    selected = _select(model, table_names, "DynamicEmbLoad")
    if not selected:
        return
    _note_counters(counter, selected)
    embstore.load(
        path,
        {c: {n: t.table for n, t in named.items()} for c, named in selected.items()},
        optim=bool(optim),
        group=pg or _tables(selected)[0].process_group,
        ownership={c: {n: t.ownership for n, t in named.items()} for c, named in selected.items()},
        allow_missing=table_names is None,
        allow_other_optimizer=True,
        counts=counter is not False,
    )
    if optim:
        for table in _tables(selected):
            table.load_optimizer_args({"lr": table.table.learning_rate})


def _counter_or_group(
    counter: object, pg: dist.ProcessGroup | None
) -> tuple[bool | None, dist.ProcessGroup | None]:
    """The fifth argument is `pg` in the older documents and `counter` in the newer ones."""
    if isinstance(counter, dist.ProcessGroup):
        if pg is not None:
            raise TypeError(f"counter should be a bool beside a pg but is a process group: {counter!r}")
        return None, counter
    if counter is not None and not isinstance(counter, bool):
        raise TypeError(f"counter should be a bool, None or a process group but is: {counter!r}")
    if pg is not None and not isinstance(pg, dist.ProcessGroup):
        raise TypeError(f"pg should be None or a process group but is: {pg!r}")
    return counter, pg


def _layout(layout: str | None, counter: bool | None) -> str:
    if layout is not None:
        return layout
    wanted = os.environ.get(LAYOUT_VARIABLE)
    if not wanted:
        return "v1a" if counter is None else "v2"
    if wanted not in ("v1a", "v2"):
        raise ValueError(f"{LAYOUT_VARIABLE} should be v1a or v2 but is: {wanted!r}")
    return wanted


def _note_counters(counter: bool | None, selected: Selection) -> None:
    if counter and not any(table.options.admit_strategy for table in _tables(selected)):
        logger.info("counter=True: no table has an admit_strategy, so there are no counts")


def _tables(selected: Selection) -> list[DynamicTable]:
    return [table for named in selected.values() for table in named.values()]


def _select(model: nn.Module, table_names: TableNames, caller: str) -> Selection:
    collections = find_collections(model)
    if not collections and caller not in _warned:
        _warned.add(caller)
        warnings.warn(f"{caller} found no dynamic table in the model", UserWarning, stacklevel=3)
    if table_names is None:
        return {path: dict(collection.tables) for path, collection in collections.items()}
    if isinstance(table_names, str) or not isinstance(table_names, (Mapping, Sequence)):
        raise ValueError(f"table_names should be {{collection: [tables]}} but is: {table_names!r}")
    wanted = table_names if isinstance(table_names, Mapping) else {path: table_names for path in collections}
    selected: Selection = {}
    missing = []
    for name, tables in wanted.items():
        collection = resolve(collections, name)
        if collection is None:
            missing.append(f"collection {name!r}")
            continue
        if isinstance(table_names, Mapping):
            missing += [f"table {t!r} of {name!r}" for t in tables if t not in collection.tables]
        found = {t: collection.tables[t] for t in tables if t in collection.tables}
        if found:
            selected[collection.path] = found
    for what in missing:
        warnings.warn(f"{caller} found no dynamic {what} in the model", UserWarning, stacklevel=3)
    return selected
