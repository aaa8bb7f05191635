"""How long dumps, loads and appends took: counted always, read by `embstore.metrics`.

with measured("dump"): ...
durations()["dump"]          # Duration(count=1, failures=0, seconds=2.5, last_seconds=2.5)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

CALLS = ("dump", "load", "append", "compact")


@dataclass(frozen=True)
class Duration:
    """Calls that ended, those of them that raised, and the time they took."""

    count: int = 0
    failures: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0


_lock = threading.Lock()
_durations = {call: Duration() for call in CALLS}


@contextlib.contextmanager
def measured(call: str) -> Iterator[None]:
    """Counts the block as one call of this kind."""
    begin = time.perf_counter()
    failed = True
    try:
        yield
        failed = False
    finally:
        record(call, time.perf_counter() - begin, failed)


def record(call: str, seconds: float, failed: bool) -> None:
    """Counts a call that took so long."""
    with _lock:
        of = _durations[call]
        _durations[call] = Duration(of.count + 1, of.failures + failed, of.seconds + seconds, seconds)


def durations() -> dict[str, Duration]:
    """What was counted in this process so far, by call."""
    with _lock:
        return dict(_durations)
