"""Miss-ratio curve: which share of the lookups a table of a given size would miss, if it evicts what was
used longest ago.

A lookup hits if fewer different ids than the table has rows came since the last lookup of its id: its reuse
distance. The distances are exact for a sample of the ids, chosen by hash; a distance in a sample of one in k
stands for k times that distance in the stream.
"""

from __future__ import annotations

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
NEVER = np.iinfo(np.int64).max


def reuse_distances(ids: np.ndarray) -> np.ndarray:
    """For each lookup how many different ids came since the last of the same id; NEVER for a first one.

    ids        7  8  7  7  9  8
    distance   -  -  1  0  -  2
    """
    n = len(ids)
    tree = [0] * (n + 1)  # Fenwick tree over places: 1 where the latest lookup of an id stands

    def add(place: int, what: int) -> None:
        while place <= n:
            tree[place] += what
            place += place & -place

    def count(place: int) -> int:
        total = 0
        while place:
            total += tree[place]
            place -= place & -place
        return total

    latest: dict[int, int] = {}
    distances = np.full(n, NEVER)
    for place, key in enumerate(ids.tolist(), 1):
        before = latest.get(key)
        if before is not None:
            distances[place - 1] = len(latest) - count(before)
            add(before, -1)
        add(place, 1)
        latest[key] = place
    return distances


def curve(columns: list[np.ndarray], most: int = 60_000) -> Curve:
    """Rows of each table and the share of the lookups that miss. `columns` are the ids of each table, `most`
    how many lookups are looked at over all of them."""
    one_in = max(1, sum(map(len, columns)) // most)
    sampled = []
    for column in columns:
        mixed = column.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        sampled.append(column[mixed % np.uint64(one_in) == 0])
    distances = np.concatenate([reuse_distances(column) for column in sampled])
    scaled = np.sort(distances[distances != NEVER]) * one_in
    smallest = max(64, 2 * one_in)  # below, the sample has nothing to tell apart
    largest = max(smallest, int(scaled[-1]) if len(scaled) else 0)
    rows = np.unique(np.geomspace(smallest, 2 * largest, 60).astype(np.int64))
    misses = len(distances) - np.searchsorted(scaled, rows, side="left")  # a hit: a distance below the rows
    # Frequent ids nearly always hit, so it is the misses that a sample counts well, whoever is in it.
    return rows, np.minimum(1, misses * one_in / sum(map(len, columns)))
