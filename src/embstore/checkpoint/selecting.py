"""Rows of all ranks whose score is not below a threshold, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embstore.checkpoint.dumping import Tables
from embstore.distributed.ranks import ranks_of
from embstore.rows import Rows
from embstore.table import Table


def rows_since(
    tables: Tables, thresholds: Mapping[str, Mapping[str, int]], *, group: Any = None
) -> tuple[dict[str, dict[str, Rows]], dict[str, dict[str, int]]]:
    """For each table named in `thresholds` its rows with score >= threshold, sorted by key, and the
    score that is the threshold of the next call. Every rank gets the rows of all ranks, without states.
    """
    ranks = ranks_of(group, "rows_since()")
    rows: dict[str, dict[str, Rows]] = {}
    scores: dict[str, dict[str, int]] = {}
    for collection in sorted(thresholds):
        for name in sorted(thresholds[collection]):
            table, threshold = tables[collection][name], thresholds[collection][name]
            local: list[Rows] = []

            def collect(table: Table = table, threshold: int = threshold, out: list[Rows] = local) -> int:
                out.append(Rows.concatenate(list(table.export(min_score=threshold, with_states=False))))
                return table.score

            # One moment for all ranks: above every score so far, and not above any later one.
            score = max(ranks.agree(collect))
            table.raise_clock(score)
            keys = ranks.gather_rows(local[0].keys)
            order = np.argsort(keys, kind="stable")
            values = ranks.gather_rows(local[0].values)[order]
            stored = ranks.gather_rows(local[0].scores)[order]
            states = np.empty((len(keys), 0), np.float32)
            rows.setdefault(collection, {})[name] = Rows(keys[order], values, states, stored)
            scores.setdefault(collection, {})[name] = score
    return rows, scores
