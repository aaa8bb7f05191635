"""Scores of the tables of a model: reading the current ones, setting customized ones."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

import embstore
from dynamicemb.model_walk import Collection, find_collections, resolve
from dynamicemb.tables import DynamicTable

_CUSTOMIZED = embstore.ScoreStrategy.CUSTOMIZED


def get_score(model: nn.Module) -> dict[str, dict[str, int]] | None:
    """The score that the next training forward will give its keys, by collection path and table.

    Every dynamic table has one: TIMESTAMP and NO_EVICTION the time, STEP the next step, CUSTOMIZED what
    `set_score` said last (0 before), LFU and IMPORTANCE 1.

    Args:
        model: a module with sharded collections.

    Returns:
        {collection: {table: score}}, or None when the model has no dynamic table.

    Raises:
        RuntimeError: a table is closed.

    Examples:
        >>> from dynamicemb.incremental_dump import get_score
        >>> get_score(model)
        {'model.ebc': {'user': 2}}
    """
    scores = {
        path: {name: shown_score(t.table, t.table.score) for name, t in collection.tables.items()}
        for path, collection in find_collections(model).items()
    }
    return scores or None


def shown_score(table: embstore.Table, score: int) -> int:
    """1 where scores grow with use: the threshold that every row reaches."""
    return 1 if table.options.score_strategy.keeps_frequent else score


def set_score(model: nn.Module, table_score: int | Mapping[str, Mapping[str, int]]) -> None:
    """Sets the score that CUSTOMIZED tables give to the keys of the following training forwards.

    Stored scores stay. Everything is checked before anything is set. A score below the table's last one
    warns, unless the environment says DYNAMICEMB_CSTM_SCORE_CHECK=0.

    Args:
        model: a module with sharded collections.
        table_score: an int for all tables, or {collection: {table: score}} for those it names.

    Raises:
        ValueError: a score is no integer from 1 to 2^64 - 1, or a table has another strategy.

    Examples:
        >>> from dynamicemb.incremental_dump import get_score, set_score
        >>> set_score(customized_model, {"model.ebc": {"user": 20261115}})
        >>> get_score(customized_model)
        {'model.ebc': {'user': 20261115}}
    """
    set_scores(list(_wanted(find_collections(model), table_score)))


def set_scores(wanted: Sequence[tuple[DynamicTable, int]]) -> None:
    """Sets scores of CUSTOMIZED tables, as `set_score` does."""
    for table, score in wanted:
        if isinstance(score, bool) or not isinstance(score, int) or not 0 < score < 1 << 64:
            raise ValueError(
                f"the score of table {table.name!r} should be an integer from 1 to 2^64 - 1 but is: {score!r}"
            )
        if table.table.options.score_strategy != _CUSTOMIZED:
            raise ValueError(
                f"the score of table {table.name!r} should not be set: its score strategy is "
                f"{table.table.options.score_strategy.name}, not CUSTOMIZED"
            )
    check = os.environ.get("DYNAMICEMB_CSTM_SCORE_CHECK") != "0"
    for table, score in wanted:
        if check and score < table.table.score:
            warnings.warn(
                f"the new score of table {table.name!r}, {score}, is below its last one, {table.table.score}",
                UserWarning,
                stacklevel=3,
            )
        table.table.score = score


def _wanted(
    collections: Mapping[str, Collection], table_score: int | Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[DynamicTable, int]]:
    if not isinstance(table_score, Mapping):
        for collection in collections.values():
            for table in collection.tables.values():
                yield table, table_score
        return
    for name, of_tables in table_score.items():
        collection = resolve(collections, name)
        if collection is None:
            warnings.warn(
                f"set_score found no collection {name!r}; there are: {', '.join(collections) or 'none'}",
                UserWarning,
                stacklevel=3,
            )
            continue
        if not isinstance(of_tables, Mapping):
            raise ValueError(f"the scores of {name!r} should be a dict by table but are: {of_tables!r}")
        for table_name, score in of_tables.items():
            if table_name not in collection.tables:
                warnings.warn(
                    f"set_score found no dynamic table {table_name!r} in {collection.path!r}; there are: "
                    f"{', '.join(collection.tables)}",
                    UserWarning,
                    stacklevel=3,
                )
                continue
            yield collection.tables[table_name], score
