"""Numbers as people read them.

bytes_text(123456789)               "117.7 MiB"
time_text(1_763_357_891 * 10**9)    "2025-11-17 05:38:11"       a score of nanoseconds
duration_text(5400)                 "90.0 minutes"
float_text(0.123456789)             "0.1235"
spark_text([0, 1, 4, 8])            "▁▄▇█"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
AGED = ("aged_lfu", "importance")  # sums that lose half of their worth with every half-life: docs/formats.md
AGED_FRACTION_BITS, AGED_BIAS = 40, 1 << 20
# Scores that are read as times: nanoseconds from 1980 to 2200.
TIMES = range(315_532_800 * 10**9, 7_258_118_400 * 10**9)


def bytes_text(size: int) -> str:
    """With a unit, to one digit behind the point."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            break
    return f"{value:,.1f} {unit}"


def float_text(value: float) -> str:
    """Four digits, no trailing zeros."""
    return f"{value:.4g}"


def share_text(share: float | None) -> str:
    """A percentage; "-" where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def time_text(score: int, digits: int = 0) -> str:
    """The UTC time of a score that counts nanoseconds, with so many digits of the second."""
    moment = datetime.fromtimestamp(score // 10**9, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M:%S}" + (f".{score % 10**9:09}"[: digits + 1] if digits else "")


def score_text(score: int, digits: int = 0, *, strategy: str = "", now: int = 0) -> str:
    """A score of this strategy ("": not known). An aged sum is shown as what it is worth `now`, the score of
    the table; others as a time where they can be one, else as the number."""
    if strategy in AGED:
        halvings = (now >> AGED_FRACTION_BITS or AGED_BIAS) - (score >> AGED_FRACTION_BITS)
        fraction = score % (1 << AGED_FRACTION_BITS) / (1 << AGED_FRACTION_BITS)
        return float_text(math.ldexp(1 + fraction, -halvings))
    counts = strategy in ("lfu", "step")
    return time_text(score, digits) if score in TIMES and not counts else str(score)


def duration_text(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def spark_heights(counts: Sequence[int]) -> list[float]:
    """From 0 (none) to 1 (the largest count), logarithmic: uses of keys differ by powers of ten."""
    most = max(counts, default=0)
    return [math.log1p(count) / math.log1p(most) if count else 0.0 for count in counts]


def spark_text(counts: Sequence[int]) -> str:
    """A bar for each count; the lowest only for 0."""
    return "".join(BARS[math.ceil(7 * height)] for height in spark_heights(counts))


def histogram(scores: Any, bins: int = 8) -> list[tuple[int, int, int]]:
    """(lowest score, highest score, rows) of at most `bins` ranges of equal width."""
    if len(scores) == 0:
        return []
    low, high = int(scores.min()), int(scores.max())
    edges = [low + (high + 1 - low) * i // bins for i in range(bins + 1)]
    return [
        (a, b - 1, int(((scores >= np.uint64(a)) & (scores <= np.uint64(b - 1))).sum()))
        for a, b in zip(edges, edges[1:])
        if b > a
    ]
