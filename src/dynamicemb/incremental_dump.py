"""Rows that were used since a score, from all ranks, in memory.

tensors, scores = incremental_dump(model, last_scores)     # last_scores: of the call before
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from dynamicemb.discovery import find_collections, resolve
from dynamicemb.scores import get_score, set_score, shown_score
from embstore.arrays import torch_dtype
from embstore.checkpoint.selecting import rows_since

__all__ = ["get_score", "incremental_dump", "set_score"]

Tensors = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
Scores = dict[str, dict[str, int]]
Threshold = int | Mapping[str, Mapping[str, int]]


def incremental_dump(
    model: nn.Module, score_threshold: Threshold, pg: dist.ProcessGroup | None = None
) -> tuple[Tensors, Scores] | None:
    """Keys and vectors of all ranks whose score is not less than a threshold. All ranks call it.

    Args:
        model: a module with sharded collections.
        score_threshold: an int for all tables, or {collection: {table: threshold}} for those it names.
        pg: the ranks that take part. None: those that share the tables.

    Returns:
        ({collection: {table: (keys, values)}}, {collection: {table: score}}) on the host, sorted by key, the
        values (n, dim) in the dtype of the table. The score is that of the next forward and thus the
        threshold of the next call. None when the model has no dynamic table.

    Raises:
        ValueError: score_threshold is something else. A name that is not in the model warns.

    Examples:
        >>> from dynamicemb.incremental_dump import incremental_dump
        >>> tensors, scores = incremental_dump(model, 0)
        >>> keys, values = tensors["model.ebc"]["user"]
        >>> keys.tolist(), tuple(values.shape)
        ([5, 7], (2, 4))
    """
    _check(score_threshold)
    collections = find_collections(model)
    if not collections:
        warnings.warn("incremental_dump found no dynamic table in the model", UserWarning, stacklevel=2)
        return None
    thresholds: Scores = {}
    if isinstance(score_threshold, Mapping):
        for name, of_tables in score_threshold.items():
            collection = resolve(collections, name)
            known = collection.tables if collection else {}
            for table in [t for t in of_tables if t not in known] if collection else [None]:
                what = f"collection {name!r}" if table is None else f"table {table!r} in {name!r}"
                warnings.warn(f"incremental_dump found no {what}", UserWarning, stacklevel=2)
            if collection:
                thresholds[collection.path] = {t: v for t, v in of_tables.items() if t in known}
    else:
        thresholds = {path: dict.fromkeys(c.tables, score_threshold) for path, c in collections.items()}
    tables = {path: {n: t.table for n, t in c.tables.items()} for path, c in collections.items()}
    group = pg or next(t.process_group for c in collections.values() for t in c.tables.values())
    rows, scores = rows_since(tables, thresholds, group=group)
    tensors: Tensors = {
        path: {
            name: (
                torch.from_numpy(found.keys),
                torch.from_numpy(found.values).to(torch_dtype(tables[path][name].options.dtype)),
            )
            for name, found in of_tables.items()
        }
        for path, of_tables in rows.items()
    }
    shown = {
        path: {name: shown_score(tables[path][name], score) for name, score in of_tables.items()}
        for path, of_tables in scores.items()
    }
    return tensors, shown


def _check(threshold: Threshold) -> None:
    def is_score(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64

    nested = isinstance(threshold, Mapping) and all(
        isinstance(name, str)
        and isinstance(of_tables, Mapping)
        and all(isinstance(table, str) and is_score(value) for table, value in of_tables.items())
        for name, of_tables in threshold.items()
    )
    if not nested and not is_score(threshold):
        raise ValueError(
            f"score_threshold should be an int from 0 to 2^64 - 1 or {{collection: {{table: int}}}} "
            f"but is: {threshold!r}"
        )
