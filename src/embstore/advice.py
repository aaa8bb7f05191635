"""How large should a table be? What a table of another size would find.

    table.sample_misses()
    ...                                  # train for a while
    print(table.advise())

A curve says which share of the ids of training batches has a row already when it is asked for:

    by recency     if the table keeps the ids that were used last ("timestamp", "step")
    by frequency   if it keeps those that are used most ("lfu" and strategies that admit by frequency)
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.readable import bytes_text, share_text

BINS_PER_DOUBLING = 8  # of reuse distances, as the engine's MissSampler counts them
_MULTIPLES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class Point:
    """A capacity in rows, the bytes of such a table, and its hit rates (None: not known)."""

    rows: int
    bytes: int
    by_recency: float | None
    by_frequency: float | None


@dataclass(frozen=True)
class Advice:
    """What tables of several sizes would find. Prints as a table of at most 80 columns.

    rows      that the table has now
    capacity  that it may have at most
    hit_rate  measured so far, None where nothing was
    based_on  what the curve was estimated from
    ids       different ids, about
    evicted, returned  rows that were evicted while misses were sampled, and how many of their ids came back
    points    the curve, by ascending capacity
    notes     what else there is to know
    """

    table: str
    rows: int
    capacity: int
    hit_rate: float | None
    based_on: str
    ids: int
    evicted: int
    returned: int
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f", hit rate so far {share_text(self.hit_rate)}"
        lines = [
            f"table {self.table!r}: {self.rows:,} rows, at most {self.capacity:,}{rate}",
            *textwrap.wrap(f"based on: {self.based_on}", WIDTH, subsequent_indent="  "),
        ]
        if self.points:
            lines += ["", f"   {'rows':>15} {'bytes':>10} {'by recency':>12} {'by frequency':>14}"]
        for point in self.points:
            mark = "->" if point.rows == self.capacity else ""
            rates = f"{share_text(point.by_recency):>12} {share_text(point.by_frequency):>14}"
            lines.append(f"{mark:2} {point.rows:>15,} {bytes_text(point.bytes):>10} {rates}")
        if self.evicted:
            share = share_text(self.returned / self.evicted)
            lines += ["", f"evicted: about {self.evicted:,} rows; of these {share} were asked for again"]
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


@dataclass(frozen=True)
class MissSample:
    """What the engine has counted of a sample of the ids, with weights of the whole stream.

    distances[b]  uses whose id came back after 2^(b/8) - 1 or more other ids, and fewer than 2^((b+1)/8) - 1
    counts        uses of each id that is known, largest first
    """

    rate: float
    uses: float
    first_uses: float
    evicted: float
    returned: float
    distances: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]

    @property
    def ids(self) -> float:
        """Different ids that are known, about."""
        return len(self.counts) / self.rate

    def by_recency(self, capacity: Sequence[float]) -> npt.NDArray[np.float64]:
        """Uses that a table of the last `capacity` ids finds."""
        edges = 2.0 ** (np.arange(len(self.distances) + 1) / BINS_PER_DOUBLING) - 1
        return _interpolated(capacity, edges, np.cumsum(self.distances))

    def by_frequency(self, capacity: Sequence[float]) -> npt.NDArray[np.float64]:
        """Uses that a table of the `capacity` most used ids finds, after the first use of each."""
        found = np.maximum(self.counts - 1 / self.rate, 0.0)
        ids = np.arange(len(found) + 1) / self.rate
        return _interpolated(capacity, ids, np.cumsum(np.sort(found)[::-1]))


def _interpolated(
    at: Sequence[float], x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """y is 0 at x[0], and y[i] at x[i + 1]."""
    return np.asarray(np.interp(at, x, np.concatenate([[0.0], y])), np.float64)


def capacities(now: int, most: float) -> list[int]:
    """Capacities to tell about: multiples of the present one, none far above what there are ids for."""
    return [max(round(now * m), 1) for m in _MULTIPLES if m <= 1 or now * m / 2 < most]


def curve(sample: MissSample, rows: Sequence[int], row_bytes: float) -> tuple[Point, ...]:
    uses = max(sample.uses, 1e-9)
    return tuple(
        Point(n, round(n * row_bytes), float(recency), float(frequency))
        for n, recency, frequency in zip(
            rows, sample.by_recency(rows) / uses, sample.by_frequency(rows) / uses, strict=True
        )
    )


def notes_on(
    points: Sequence[Point], capacity: int, evicted: float, returned: float, keeps_frequent: bool
) -> tuple[str, ...]:
    """What follows from a curve, in words, for a table that keeps the most used ids or the last used ones."""
    notes = []
    here = next((p for p in points if p.rows == capacity), None)
    if here and here.by_recency is not None and here.by_frequency is not None:
        if here.by_frequency > here.by_recency + 0.02 and evicted and not keeps_frequent:
            notes.append("keeping the most used ids would find more than keeping the last used ones")
        if here.by_recency > here.by_frequency + 0.02 and evicted and keeps_frequent:
            notes.append("keeping the last used ids would find more: a shorter half_life, or 'timestamp'")
        best = max(max(p.by_recency or 0, p.by_frequency or 0) for p in points)
        enough = next(p for p in points if max(p.by_recency or 0, p.by_frequency or 0) >= best - 0.01)
        if enough.rows != capacity:
            notes.append(f"{enough.rows:,} rows come within 1 % of the best hit rate above")
    if evicted and returned > 0.2 * evicted:
        wrong = "" if keeps_frequent else ", or evicts the wrong ones"
        notes.append(f"many evicted ids come back: the table is too small{wrong}")
    return tuple(notes)


def advice_from(sample: MissSample, now: int, row_bytes: float, keeps_frequent: bool, **facts: Any) -> Advice:
    """The advice of a sample, for a table of `now` rows of so many bytes. `facts` are the other fields."""
    points = curve(sample, capacities(now, sample.ids), row_bytes)
    return Advice(
        ids=round(sample.ids),
        evicted=round(sample.evicted),
        returned=round(sample.returned),
        points=points,
        notes=notes_on(points, now, sample.evicted, sample.returned, keeps_frequent),
        **facts,
    )
