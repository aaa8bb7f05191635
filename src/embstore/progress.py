"""Progress of long work: a bar of tqdm, a function of the caller, or nothing.

embstore.dump(path, tables, progress=True)                                  # a bar, in notebooks too
embstore.dump(path, tables, progress=lambda done, total: print(done, total))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from embstore.extras import missing

Progress = Callable[[int, int], None]  # done so far, and of how many; bytes unless the work says otherwise
Wanted = bool | Progress | None


@contextmanager
def shown(wanted: Wanted, what: str, *, rank: int = 0, unit: str = "B") -> Iterator[Progress | None]:
    """What a work reports to: with True a bar named `what`, on rank 0 alone.

    Raises TypeError where `wanted` is something else than a bool or a function, and ImportError when tqdm is
    missing.
    """
    if wanted is None or wanted is False:
        yield None
    elif callable(wanted):
        yield wanted
    elif wanted is not True:
        raise TypeError(f"progress should be True, False or a function but is: {wanted!r}")
    else:
        drawn = bar(what, unit, disable=rank != 0)  # made on all ranks, so that all raise without tqdm
        try:
            yield drawn.report
        finally:
            drawn.close()


class Bar:
    """A bar of tqdm as a progress function."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def report(self, done: int, total: int) -> None:
        if self._bar.total != total:
            self._bar.reset(total)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.refresh()  # it may come too soon after the last drawing

    def close(self) -> None:
        self._bar.close()


def bar(what: str, unit: str, **options: Any) -> Bar:
    """A bar of tqdm.auto: text on a terminal, a widget in a notebook."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise missing("progress=True", "cli", error) from error
    scale = {"unit": unit, "unit_scale": True, "unit_divisor": 1024 if unit == "B" else 1000}
    return Bar(tqdm(desc=what, total=0, **scale, **options))
