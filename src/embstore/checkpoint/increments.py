"""An increment log: a base dump and numbered increments, by which a serving process follows training.

    log/base-000000000000/         a dump
    log/increment-000000000001/    rows that changed since, and keys that are gone
    log/increment-000000000002/

    trainer                                     server
    log = IncrementLog.create(path, tables)     log = IncrementLog(path); log.load(tables)
    log.append(tables)  # now and then          log.follow(tables)  # applies what is new
    log.compact()       # a new base

Every entry is published by rename and names its number and the entry before it, so a gap, a duplicate or
an entry of another log is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from embstore.checkpoint.dumping import OwnershipOf, Tables, ownership_of, snapshot_all, start
from embstore.checkpoint.files import sync_folder
from embstore.checkpoint.loading import fresh_state, load, place_blocks, require_fit, restore_counters
from embstore.checkpoint.merging import removed_keys, rewrite
from embstore.checkpoint.ranks import CheckpointError, Ranks, ranks_of
from embstore.checkpoint.reading import Dump, verify
from embstore.checkpoint.sources import Source, block_source
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.writing import Order, Progress
from embstore.ownership import Ownership, owner

_ENTRY = re.compile(r"(base|increment)-(\d{12})")


class IncrementLog:
    """A log in a folder. `applied` is the number that this process's tables are at, -1 for none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.applied = -1

    # ---- what there is

    def entries(self) -> dict[str, dict[int, Path]]:
        """Published entries by kind ("base", "increment") and number."""
        found: dict[str, dict[int, Path]] = {"base": {}, "increment": {}}
        if not self.path.is_dir():
            raise FileNotFoundError(f"path should be the folder of an increment log but is: {self.path}")
        for folder in self.path.iterdir():
            match = _ENTRY.fullmatch(folder.name)
            if match:
                found[match[1]][int(match[2])] = folder
        return found

    def chain(self) -> list[Dump]:
        """The newest base and all increments after it, in order; each is the successor of the one before.

        Raises CheckpointError when a number is missing, or when an entry is not what its name says.
        """
        entries = self.entries()
        if not entries["base"]:
            raise CheckpointError(f"{self.path}: has no base")
        first = max(entries["base"])
        chain = [Dump(entries["base"][first])]
        newer = sorted(number for number in entries["increment"] if number > first)
        for expected, number in enumerate(newer, first + 1):
            if number != expected:
                raise CheckpointError(f"{self._entry('increment', expected)}: is missing, the log has a gap")
            chain.append(Dump(entries["increment"][number]))
        for number, dump in enumerate(chain, first):
            self._check(dump, number, chain[number - first - 1] if number > first else None)
        return chain

    def _check(self, dump: Dump, number: int, previous: Dump | None) -> None:
        facts = _facts(dump)
        if facts.get("number") != number:
            raise CheckpointError(
                f"{dump.path}: should be number {number} of its log but says: {facts.get('number')}"
            )
        if previous is None:
            return
        before = _facts(previous)
        if facts["log"] != before["log"]:
            raise CheckpointError(f"{dump.path}: belongs to another log")
        if facts["previous"] not in (_identity(previous), before.get("stands_for")):
            raise CheckpointError(f"{dump.path}: does not follow {previous.path.name}, the order is wrong")

    def _entry(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:012d}"

    def last(self) -> int:
        """The number of the newest entry."""
        entries = self.entries()
        return max([*entries["base"], *entries["increment"]], default=-1)

    # ---- the trainer

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        tables: Tables,
        *,
        optim: bool = True,
        group: Any = None,
        ownership: OwnershipOf = Ownership.ROUNDROBIN,
    ) -> IncrementLog:
        """Writes the tables as number 0 of a new log and keeps track of their changes from now on."""
        log, ranks = IncrementLog(path), ranks_of(group, "IncrementLog.create()")

        def check() -> str:
            if log.path.is_dir() and any(_ENTRY.fullmatch(p.name) for p in log.path.iterdir()):
                raise FileExistsError(f"path should not have an increment log yet but has: {log.path}")
            return secrets.token_hex(16)

        facts = {"log": ranks.lead(check), "number": 0}
        ranks.together(lambda: track(tables))
        order = Order("v1a", optim, facts)
        sources = snapshot_all(tables, optim, ranks, ownership)
        start(log._entry("base", 0), {ranks.rank: sources}, ranks.world, order, ranks).run(ranks)
        log.applied = 0
        return log

    def append(self, tables: Tables, *, group: Any = None) -> int:
        """Writes what changed since the last call as the next increment; returns its number.

        The tables are those that `create` or `load` was called with. On failure every rank raises, the
        log is as it was, and the changes are part of the next increment.
        """
        ranks = ranks_of(group, "IncrementLog.append()")

        def successor() -> tuple[dict[str, Any], bool, dict[str, dict[str, Ownership]]]:
            last = self.chain()[-1]
            facts = _facts(last)
            if facts["number"] != self.applied:
                raise CheckpointError(
                    f"{last.path}: tables are at number {self.applied} but the log is at: {facts['number']}"
                )
            of = last.manifest
            assert of is not None
            following = {"log": facts["log"], "number": facts["number"] + 1, "previous": of.dump}
            return following, of.optim, _ownership(last)

        facts, optim, ownership = ranks.lead(successor)
        sources: list[Source] = []
        taken: list[tuple[Any, Any, Any]] = []

        def take() -> None:
            for collection in sorted(tables):
                for _, table in sorted(tables[collection].items()):
                    spec = TableSpec.of(table)
                    rows, removed = table.take_changes()
                    taken.append((table, rows.keys, removed))
                    by = ownership_of(ownership, collection, table.name)
                    sources.append(block_source(collection, spec, len(rows), [rows], removed, by))

        try:
            ranks.agree(take)
            order = Order("v1a", optim, facts)
            path = self._entry("increment", facts["number"])
            start(path, {ranks.rank: sources}, ranks.world, order, ranks).run(ranks)
        except BaseException:
            for table, changed, removed in taken:
                table.restore_changes(changed, removed)
            raise
        self.applied = int(facts["number"])
        return self.applied

    # ---- the server, or a trainer that starts again

    def load(self, tables: Tables, *, group: Any = None, writable: bool = False) -> int:
        """Makes the tables what the log says; returns the number they are at.

        Rows that were in the tables before are removed. With `writable` their changes are tracked from
        now on, so that `append` may follow.
        """
        ranks = ranks_of(group, "IncrementLog.load()")
        base, optim, ownership = ranks.lead(self._base)

        def clear() -> None:
            for named in tables.values():
                for table in named.values():
                    table.clear()

        ranks.together(clear)
        load(self._entry("base", base), tables, optim=optim, group=ranks, ownership=ownership)
        self.applied = base
        self.follow(tables, group=ranks)
        if writable:
            ranks.together(lambda: track(tables))
        return self.applied

    def _base(self) -> tuple[int, bool, dict[str, dict[str, Ownership]]]:
        base = self.chain()[0]
        return int(_facts(base)["number"]), _optim(base), _ownership(base)

    def follow(self, tables: Tables, *, group: Any = None) -> list[int]:
        """Applies the increments that are new; returns their numbers."""
        ranks = ranks_of(group, "IncrementLog.follow()")

        def plan() -> list[int] | None:
            chain = self.chain()
            numbers = [int(_facts(dump)["number"]) for dump in chain]
            if self.applied < numbers[0]:
                return None  # compacted away: start from the base again
            return [number for number in numbers[1:] if number > self.applied]

        numbers = ranks.lead(plan)
        if numbers is None:
            before = self.applied
            self.load(tables, group=ranks)
            return list(range(before + 1, self.applied + 1))
        for number in numbers:
            self._apply(self._entry("increment", number), tables, ranks)
            self.applied = number
        return numbers

    def _apply(self, path: Path, tables: Tables, ranks: Ranks) -> None:
        increment: list[Dump] = []

        def open_increment() -> None:
            increment.append(Dump(path))
            for collection, named in tables.items():
                for name, table in named.items():
                    if collection not in increment[0] or name not in increment[0][collection]:
                        raise CheckpointError(f"{path}: table {name!r} of {collection!r} is missing")
                    require_fit(increment[0][collection][name], TableSpec.of(table), _optim(increment[0]))

        ranks.agree(open_increment)
        verify(increment[0].tables, ranks)

        def apply() -> None:
            ownership, optim = _ownership(increment[0]), _optim(increment[0])
            for collection, named in tables.items():
                for name, table in named.items():
                    stored = increment[0][collection][name]
                    removed = removed_keys(stored)
                    by = ownership[collection][name]
                    table.erase(removed[owner(removed, ranks.world, by) == ranks.rank])
                    place_blocks(stored, table, optim, ranks, by, fresh_state(TableSpec.of(table)))
                    restore_counters(stored, table, optim)

        ranks.agree(apply)

    # ---- upkeep, by one process

    def compact(self, progress: Progress | None = None) -> int:
        """Merges the base and its increments into a new base and removes what it replaces.

        Returns its number. May run beside the trainer and its servers; those that are behind start
        from the new base.
        """
        chain = self.chain()
        for dump in chain:
            dump.verify()
        facts = _facts(chain[-1])
        number = int(facts["number"])
        if len(chain) > 1:
            # An increment after the new base names the entry that this one stands for.
            following = {"log": facts["log"], "number": number, "stands_for": _identity(chain[-1])}
            rewrite(chain[0], chain[1:], self._entry("base", number), increment=following, progress=progress)
        self.clean()
        return number

    def clean(self) -> None:
        """Removes entries that a newer base replaces."""
        entries = self.entries()
        newest = max(entries["base"], default=-1)
        old = [path for number, path in entries["base"].items() if number < newest]
        old += [path for number, path in sorted(entries["increment"].items()) if number <= newest]
        for path in old:
            # First out of sight, so that a half removed folder is never taken for an entry.
            hidden = path.with_name(f".{path.name}.partial-removed")
            shutil.rmtree(hidden, ignore_errors=True)
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
        sync_folder(self.path)

    def verify(self) -> int:
        """Reads everything that counts; returns how many bytes were right."""
        return sum(dump.verify() for dump in self.chain())


def track(tables: Tables) -> None:
    for named in tables.values():
        for table in named.values():
            table.track_changes()


def _facts(dump: Dump) -> dict[str, Any]:
    of = dump.manifest
    if of is None or not of.increment:
        raise CheckpointError(f"{dump.path}: is not an entry of an increment log")
    return of.increment


def _identity(dump: Dump) -> str:
    of = dump.manifest
    assert of is not None
    return of.dump


def _ownership(dump: Dump) -> dict[str, dict[str, Ownership]]:
    return {
        collection: {name: t.entry.ownership for name, t in dump[collection].items() if t.entry}
        for collection in dump
    }


def _optim(dump: Dump) -> bool:
    of = dump.manifest
    assert of is not None
    return of.optim
