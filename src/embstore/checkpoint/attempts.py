"""Changes of tables: tracked, taken at one moment, and put back when they could not be used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from embstore.checkpoint.dumping import Tables
from embstore.checkpoint.files import interrupts_held
from embstore.checkpoint.sources import Taken
from embstore.checkpoint.spec import TableSpec


@dataclass
class Attempt:
    """Changes of tables on their way into the log. When this process has not seen the end of it, `settle`
    finds out whether they are on the disk."""

    number: int = -1
    identity: str = ""
    taken_ns: int = 0
    taken: list[Taken] = field(default_factory=list)

    def take(self, tables: Tables) -> None:
        """Takes the changes of all tables. Costs a swap for each, whatever their number."""
        self.taken_ns = time.time_ns()
        for collection in sorted(tables):
            for _, table in sorted(tables[collection].items()):
                with interrupts_held():  # what is taken and not noted down would be lost
                    taken = Taken(collection, TableSpec.of(table), table, table.snapshot_changes())
                    self.taken.append(taken)
                    taken.counters = table.take_admission_changes()
                    if table.exact_counts is not None:
                        taken.counts = table.exact_counts.take_changes()

    def restore(self) -> None:
        """Makes the changes part of the next attempt."""
        while self.taken:
            taken = self.taken[-1]
            taken.rows.restore()
            if taken.counters is not None:
                taken.table.return_admission_changes(taken.counters)
            if taken.counts is not None and taken.table.exact_counts is not None:
                taken.table.exact_counts.return_changes(taken.counts[0])
            self.taken.pop()


def track(tables: Tables, on: bool = True) -> None:
    for named in tables.values():
        for table in named.values():
            table.track_changes(on)
            if table.exact_counts is not None:
                table.exact_counts.track_changes(on)
