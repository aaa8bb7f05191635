"""What a work is, what it yields, and the list of all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .machine import Limits


@dataclass(frozen=True)
class Row:
    """One line of the table, and one entry of build/bench.json."""

    work: str
    against: str
    threads: int
    ratio: float  # above 1 we are faster (or smaller)
    wanted: float | None  # the least that is acceptable; None where the line is for information only
    goal: float | None
    detail: str = ""  # the figures behind the ratio
    share: float | None = None  # of what the machine's memory can do (machine.py)

    @property
    def verdict(self) -> str:
        if self.wanted is None:
            return ""
        if self.goal is not None and self.ratio >= self.goal:
            return "goal"
        return "ok" if self.ratio >= self.wanted else "SHORT"


@dataclass(frozen=True)
class Sizes:
    rows: int = 4_000_000
    full_capacity_rows: int = 1 << 22  # of the tables that run at load factor 1.0
    batch: int = 65_536
    batches: int = 16
    rounds: int = 12
    warmup_rounds: int = 1  # all batches, so that every id is resident and every page is mapped
    slow_rounds: int = 6  # for a peer that takes seconds
    limit_keys: int = 10_000_000
    memory_keys: int = 100_000_000


QUICK = Sizes(
    rows=1 << 18,
    full_capacity_rows=1 << 17,
    batch=16_384,
    rounds=3,
    slow_rounds=2,
    limit_keys=1 << 19,
    memory_keys=1 << 20,
)


@dataclass(frozen=True)
class Run:
    """What the command line asked for."""

    threads: tuple[int, ...]
    sizes: Sizes
    limits: dict[int, Limits] = field(default_factory=dict)  # by threads; empty: not measured

    def share(self, threads: int, seconds: float, lines: float = 0, copied_bytes: float = 0) -> float | None:
        """The least time for this traffic over the time that we took."""
        limits = self.limits.get(threads)
        return None if limits is None else limits.seconds(lines, copied_bytes) / seconds


Work = Callable[[Run], Iterator[Row]]
WORKS: dict[str, Work] = {}


def register(name: str) -> Callable[[Work], Work]:
    """Adds a work to the list under a unique name."""

    def add(work: Work) -> Work:
        if name in WORKS:
            raise ValueError(f"a work should have a name of its own but there are two: {name}")
        WORKS[name] = work
        return work

    return add
