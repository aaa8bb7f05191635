"""Tables for the tests of dumps: trained a little, and compared row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import embstore

FIELDS = ("keys", "values", "states", "scores")
EXTREMES = np.array([0, -1, -4, 7, np.iinfo(np.int64).min, np.iinfo(np.int64).max])


def make(name: str = "user", **options: Any) -> embstore.Table:
    given = {"dim": 5, "optimizer": embstore.Adam(lr=0.1), "score_strategy": "step", "seed": 3}
    return embstore.Table(name, **{**given, **options})


def keys_of(seed: int, n: int = 97) -> np.ndarray:
    """Keys from everywhere, the extremes among them."""
    anywhere = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, max(n - len(EXTREMES), 0))
    return np.concatenate([EXTREMES, anywhere])[:n]


def train(table: embstore.Table, steps: int, first: int = 0, n: int = 97) -> np.ndarray:
    """Steps that depend on their number alone; returns the vectors of the last one."""
    vectors = np.empty((0, table.dim), np.float32)
    for step in range(first, first + steps):
        if table.options.score_strategy == embstore.ScoreStrategy.CUSTOMIZED:
            table.score = 100 + step
        keys = keys_of(step % 3, n)
        vectors = table.find_or_insert(keys)
        gradients = np.random.default_rng(1000 + step).standard_normal((len(keys), table.dim))
        table.apply_gradients(keys, gradients)
    return vectors


def require_same(ours: Any, theirs: Any, states: bool = True) -> None:
    """Two tables, or what `Table.rows` gave."""
    a, b = (x.rows() if isinstance(x, embstore.Table) else x for x in (ours, theirs))
    for name in FIELDS:
        if name != "states" or states:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def files_in(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
