"""What is planned: tables, how they are used, and the hosts they are spread over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from embstore.optimizers import OPTIMIZERS
from embstore.options import DType, TableOptions


def _require(name: str, value: float, low: float, high: float = math.inf, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not low <= value <= high
        or value == math.inf
    ):
        what = "an integer" if whole else "a number"
        bound = f"of at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} should be {what} {bound} but is: {value!r}")


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """A table over all ranks.

    options  its name, dim, dtype and optimizer; its capacities do not matter
    rows     over all ranks
    ids      its share of the ids of a batch, beside those of the other tables
    """

    options: TableOptions
    rows: int
    ids: float = 1.0

    def __post_init__(self) -> None:
        _require(f"rows of table {self.options.name!r}", self.rows, 1, 1 << 63, whole=True)
        _require(f"ids of table {self.options.name!r}", self.ids, 0)

    @property
    def vector_bytes(self) -> int:
        """As float32, which is what travels."""
        return 4 * self.options.dim

    @property
    def row_bytes(self) -> int:
        """Vector and optimizer states in memory."""
        return (4 if self.options.dtype == DType.FLOAT32 else 2) * self.options.dim + 4 * self._state_floats

    @property
    def _state_floats(self) -> int:
        return sum(width for _, width in self.options.optimizer.state_names(self.options.dim))

    @property
    def dumped_bytes(self) -> int:
        """Of a row in a dump or an increment with states: layout v1a repeats the keys for each state."""
        return 16 + self.vector_bytes + 4 * self._state_floats + 8 * self._states

    @property
    def dumped_files(self) -> int:
        """Of a dump with states: keys, vectors, scores, arguments; keys and values of each state. An
        increment has one more, of what is gone."""
        return 4 + 2 * self._states

    @property
    def loaded_files(self) -> int:
        """Of a dump, as far as a load reads them: keys, vectors, scores, each state."""
        return 3 + self._states

    @property
    def followed_bytes(self) -> int:
        """Of a row in an increment, as far as a reader looks at it: key and vector."""
        return 8 + self.vector_bytes

    @property
    def _states(self) -> int:
        return len(self.options.optimizer.state_names(self.options.dim))


def planned_table(
    name: str, *, rows: int, dim: int, dtype: str = "float32", optimizer: str = "SGD", ids: float = 1.0
) -> PlannedTable:
    """A table by the names of its dtype and its optimizer (in any case)."""
    for rule in OPTIMIZERS:
        if rule.__name__.lower() == optimizer.lower():
            options = TableOptions(
                name=name, dim=dim, dtype=dtype, optimizer=rule(), score_strategy="timestamp"
            )
            return PlannedTable(options=options, rows=rows, ids=ids)
    known = ", ".join(rule.__name__ for rule in OPTIMIZERS)
    raise ValueError(f"optimizer should be one of {known} but is: {optimizer!r}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How the tables are used.

    batch                 ids of a step on one rank, of all tables together
    ids_per_second        wanted, over all ranks; 0: as many as possible
    distinct              share of the ids of a step, of all ranks together, that are not duplicates
    dump_every_seconds    between two dumps
    append_every_seconds  between two increments
    """

    tables: Sequence[PlannedTable]
    batch: int = 65536
    ids_per_second: float = 0.0
    distinct: float = 1.0
    dump_every_seconds: float = 3600.0
    append_every_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("tables should have at least one table but are: []")
        names = [table.options.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError(f"tables should have different names but are: {', '.join(names)}")
        if not sum(table.ids for table in self.tables) > 0:
            raise ValueError("ids of the tables should be above 0 for one of them but are all: 0")
        _require("batch", self.batch, 1, whole=True)
        _require("ids_per_second", self.ids_per_second, 0)
        _require("distinct", self.distinct, 0, 1)
        _require("dump_every_seconds", self.dump_every_seconds, 0)
        _require("append_every_seconds", self.append_every_seconds, 0)

    def ids_of(self, table: PlannedTable) -> float:
        """Of a step on one rank."""
        return self.batch * table.ids / sum(other.ids for other in self.tables)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Equal hosts. Disks are those that dumps go to, or each host's share of a shared file system."""

    hosts: int = 1
    ranks: int = 1  # of a host
    cores: int
    memory_bytes: int
    network_bytes_per_second: float  # of a host, in each direction
    latency_seconds: float
    write_bytes_per_second: float
    read_bytes_per_second: float

    def __post_init__(self) -> None:
        for field in fields(self):
            whole = field.type == "int"
            _require(field.name, getattr(self, field.name), 1 if whole else 0, whole=whole)
        for name in ("network_bytes_per_second", "write_bytes_per_second", "read_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} should be above 0 but is: {getattr(self, name)!r}")

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    @property
    def crowding(self) -> float:
        """How much longer work takes because more ranks than cores take turns."""
        return max(1.0, self.ranks / self.cores)

    @property
    def threads(self) -> int:
        """Of a rank."""
        return max(1, self.cores // self.ranks)
