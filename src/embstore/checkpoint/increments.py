"""An increment log: a base dump and numbered increments, by which a serving process follows training.

    log/base-000000000000/         a dump
    log/increment-000000000001/    rows that changed since, and keys that are gone
    log/increment-000000000002/

    trainer                                     server
    log = IncrementLog.create(path, tables)     log = IncrementLog(path); log.load(tables)
    log.append(tables)  # now and then          log.follow(tables)  # applies what is new
    log.append_every(tables, seconds=1.0)       # or in the background
    log.compact()       # a new base

Every entry is published by rename and names its number and the entry before it, so a gap, a duplicate or
an entry of another log is refused. docs/formats.md says what a reader may rely on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embstore import _core
from embstore.checkpoint import host_cache
from embstore.checkpoint.applying import Change, Replacement
from embstore.checkpoint.attempts import Attempt, track
from embstore.checkpoint.drafts import drafts_in, is_unconfirmed, remove_published, remove_unlocked
from embstore.checkpoint.dumping import (
    MOST_THREADS,
    OwnershipOf,
    Tables,
    ownership_of,
    snapshot_all,
    start,
)
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import sync_folder
from embstore.checkpoint.log_entries import (
    Entries,
    entries_in,
    facts_of,
    identities,
    identity,
    last_of,
    ownership_in,
    place_of,
    steady,
)
from embstore.checkpoint.merging import rewrite
from embstore.checkpoint.publishing import Publisher
from embstore.checkpoint.reading import Dump, verify_all
from embstore.checkpoint.remote import Mirror, is_remote, key_of, shown_url
from embstore.checkpoint.sources import changes_source
from embstore.checkpoint.writing import DumpOptions
from embstore.distributed.ranks import Ranks, ranks_of
from embstore.durations import measured
from embstore.ownership import AnyOwnership, Ownership
from embstore.progress import Wanted, shown

# Of the next increment: its facts, whether it has optimizer states, and how keys are spread over ranks.
Place = tuple[dict[str, Any], bool, dict[str, dict[str, AnyOwnership]]]


class IncrementLog:
    """A base dump and the increments after it, in a folder: how servers follow a trainer.

    `applied` is the number that this process's tables are at, -1 for none.

    Args:
        path: folder of the log, or a URL of fsspec such as "s3://bucket/log"; `IncrementLog.create` makes a
            new one.
        local: with a URL, the folder that keeps a copy and that all ranks see; by default in ~/.cache.
        storage_options: with a URL, passed to fsspec.

    Raises:
        CheckpointError: an entry is damaged, missing or of another log (in its methods).
        FileExistsError: `create` finds a log.

    Examples:
        >>> import embstore, tempfile
        >>> trained = {"model": {"user": embstore.Table("user", dim=2)}}
        >>> folder = tempfile.mkdtemp() + "/log"
        >>> log = embstore.IncrementLog.create(folder, trained)
        >>> vectors = trained["model"]["user"].find_or_insert([7])
        >>> log.append(trained)
        1
        >>> served = {"model": {"user": embstore.Table("user", dim=2)}}
        >>> embstore.IncrementLog(folder).load(served), list(served["model"]["user"])
        (1, [7])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not is_remote(path) and (local is not None or storage_options):
            raise TypeError(f"local and storage_options should be given with a URL alone but path is: {path}")
        self._mirror: Mirror | None = None
        self._is_writer = False  # the local folder of a remote log is ahead of it, if they differ
        self.path = Path(path)
        if is_remote(path):
            url = str(path)
            self.path = Path(local) if local else host_cache.private_folder("logs") / key_of(url)
            self._mirror = Mirror(url, self.path, **(storage_options or {}))
        self.applied = -1
        self._state: frozenset[str] = frozenset()  # identities of what the tables are at
        self._attempt: Attempt | None = None
        self._publisher: Publisher | None = None  # while `append_every` runs
        self._optim = True  # whether the tables get the optimizer states

    # ---- what there is

    def entries(self) -> Entries:
        """Published entries by kind ("base", "increment") and number."""
        return entries_in(self.path)

    def refresh(self) -> None:
        """Makes the local copy of a remote log and the log alike. A process that appends is ahead of it."""
        if self._mirror is None:
            return
        if self._is_writer:
            self._mirror.push()
        else:
            self._mirror.pull()

    def chain(self) -> list[Dump]:
        """The newest base and all increments after it, in order; each is the successor of the one before.

        Raises CheckpointError when a number is missing, or when an entry is not what its name says. May be
        called while others append and compact.
        """
        self.refresh()
        return steady(self.entries, self._chain)

    def _chain(self, entries: Entries) -> list[Dump]:
        first = self._newest_base(entries)
        base = Dump(entries["base"][first])
        log = str(facts_of(base, first)["log"])
        return [base, *self._increments(entries, first, identities(base, first), log)]

    def _newest_base(self, entries: Entries) -> int:
        if not entries["base"]:
            lost = "its base is missing" if entries["increment"] else "is not an increment log"
            raise CheckpointError(f"{self.path}: {lost}")
        return max(entries["base"])

    def _increments(self, entries: Entries, after: int, state: frozenset[str], log: str = "") -> list[Dump]:
        """The increments after a number, checked to follow each other and the state at that number."""
        found: list[Dump] = []
        for number in range(after + 1, max(entries["increment"], default=after) + 1):
            if number not in entries["increment"]:
                raise CheckpointError(f"{self._entry('increment', number)}: is missing, the log has a gap")
            dump = Dump(entries["increment"][number])
            facts = facts_of(dump, number)
            if log and facts["log"] != log:
                raise CheckpointError(f"{dump.path}: belongs to another log")
            # A base that was made of the entry before stands for it.
            base = entries["base"].get(number - 1)
            standing = identities(Dump(base), number - 1) if base else frozenset()
            if standing & state:
                state |= standing
            if facts.get("previous") not in state:
                before = self._entry(
                    "increment" if number - 1 in entries["increment"] else "base", number - 1
                )
                raise CheckpointError(f"{dump.path}: does not follow {before.name}, the order is wrong")
            found.append(dump)
            log, state = facts["log"], identities(dump, number)
        return found

    def _entry(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:012d}"

    def last(self) -> int:
        """The number of the newest entry."""
        self.refresh()
        return last_of(self.entries())

    # ---- the trainer

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        tables: Tables,
        *,
        optim: bool = True,
        group: Any = None,
        ownership: OwnershipOf = Ownership.ROUNDROBIN,
        local: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> IncrementLog:
        """Writes the tables as number 0 of a new log and keeps track of their changes from now on."""
        ranks = ranks_of(group, "IncrementLog.create()")
        log = ranks.together(lambda: IncrementLog(path, local=local, storage_options=storage_options))
        base = log._entry("base", 0)

        def check() -> str:
            if log._mirror is not None:
                if log._mirror.published():
                    raise FileExistsError(
                        f"path should not have an increment log yet but has: {shown_url(path)}"
                    )
                if local is None:  # of a log that was there before
                    shutil.rmtree(log.path, ignore_errors=True)
            names = [p.name for p in log.path.iterdir()] if log.path.is_dir() else []
            if any(place_of(n) and n != base.name for n in names) or (
                base.name in names and not is_unconfirmed(base)
            ):
                raise FileExistsError(f"path should not have an increment log yet but has: {log.path}")
            return secrets.token_hex(16)

        facts = {"log": ranks.lead(check), "number": 0}
        try:
            ranks.agree(lambda: track(tables))
            sources = snapshot_all(tables, optim, ranks, ownership)
            options = DumpOptions("v1a", optim, facts)
            job = start(base, {ranks.rank: sources}, ranks.world, options, ranks)
            job.run(ranks, min(_core.get_num_threads(), MOST_THREADS))
            log._is_writer = True
            ranks.lead(log.refresh)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a table that is closed
                track(tables, False)
            raise
        log._at(0, frozenset({job.id}))
        return log

    def _at(self, number: int, state: frozenset[str]) -> None:
        self.applied, self._state, self._attempt = number, state, None

    def append(self, tables: Tables, *, group: Any = None) -> int:
        """Writes what changed since the last call as the next increment; returns its number.

        The tables are those that `create` or `load` was called with. On failure every rank raises and the
        changes are part of the next increment, unless the increment was published nevertheless, which the
        next call finds out.
        """
        self._require_no_publisher("append")
        ranks = ranks_of(group, "IncrementLog.append()")
        self.settle(ranks)
        place = self.place(ranks)
        attempt = self._attempt = Attempt()
        ranks.agree(lambda: attempt.take(tables))
        return self.publish(attempt, place, ranks, min(_core.get_num_threads(), MOST_THREADS))

    def place(self, ranks: Ranks) -> Place:
        """Of the next increment. Raises CheckpointError when the tables are not at the last entry."""
        return ranks.lead(lambda: steady(self.entries, self._successor))

    def publish(
        self,
        attempt: Attempt,
        place: Place,
        ranks: Ranks,
        threads: int = 1,
        between_blocks: Callable[[], None] | None = None,
    ) -> int:
        """Writes changes that were taken at one moment on all ranks; returns the number of the increment."""
        self._attempt = attempt
        with measured("append"):
            facts, optim, ownership = place
            attempt.number = int(facts["number"])
            sources = [
                changes_source(of, ownership_of(ownership, of.collection, of.spec.name))
                for of in attempt.taken
            ]
            options = DumpOptions("v1a", optim, facts, taken_ns=attempt.taken_ns)
            path = self._entry("increment", attempt.number)
            job = start(path, {ranks.rank: sources}, ranks.world, options, ranks)
            attempt.identity = job.id
            job.run(ranks, threads, between_blocks=between_blocks)
            self._at(attempt.number, frozenset({job.id}))
            ranks.lead(self.refresh)  # what fails to get there goes with the next one
        return self.applied

    def append_every(
        self,
        tables: Tables,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        compact_after: int | None = None,
        group: Any = None,
    ) -> Publisher:
        """Appends in the background, on all ranks: after so many steps or seconds, whichever comes first.

        `step()` of the result is called after each training step, by all ranks alike. At a step that the
        ranks agreed on it notes which rows changed, without copying them; a thread writes them while
        training goes on. An append that takes longer than the interval delays the next one. `close`, or the
        end of the block, appends what is left.

        Args:
            tables: those that `create` or `load` was called with.
            steps: training steps between two appends.
            seconds: time between two appends.
            compact_after: another process compacts the log when so many increments have come since the base.
            group: a torch process group; None is the default one, or this process alone.

        Raises:
            ValueError: neither steps nor seconds is given, or one of them is out of range.
            CheckpointError: raised by `step`, at one step on all ranks, or else by `close`, when an append or
                a compaction failed. The changes are part of the next increment.

        Examples:
            >>> import embstore, tempfile
            >>> user = embstore.Table("user", dim=2)
            >>> tables = {"model": {"user": user}}
            >>> log = embstore.IncrementLog.create(tempfile.mkdtemp() + "/log", tables)
            >>> with log.append_every(tables, seconds=1.0, compact_after=100) as publisher:
            ...     for key in range(10):
            ...         vectors = user.find_or_insert([key])
            ...         publisher.step()
            >>> log.last() >= 1
            True
        """
        self._require_no_publisher("append_every")
        self._publisher = Publisher(self, tables, steps, seconds, compact_after, group)
        return self._publisher

    def _require_no_publisher(self, call: str) -> None:
        if self._publisher is not None and self._publisher.is_open:
            raise RuntimeError(f"{call} should not be called while append_every publishes to {self.path}")

    def _successor(self, entries: Entries) -> Place:
        self._newest_base(entries)
        number = last_of(entries)
        kind = "increment" if number in entries["increment"] else "base"
        last = Dump(entries[kind][number])
        facts = facts_of(last, number)
        if number != self.applied:
            raise CheckpointError(
                f"{last.path}: tables are at number {self.applied} but the log is at: {number}"
            )
        of = last.manifest
        assert of is not None
        return {"log": facts["log"], "number": number + 1, "previous": of.dump}, of.optim, ownership_in(last)

    def settle(self, ranks: Ranks) -> None:
        """After an append that was interrupted: its increment is there, or its changes are taken up again."""
        attempts = [
            a for a in ranks.gather(self._attempt and (self._attempt.number, self._attempt.identity)) if a
        ]
        if not attempts:
            return
        number, expected = max(attempts)

        def published() -> bool:
            path = self._entry("increment", number)
            if not expected or not path.is_dir() or identity(Dump(path)) != expected:
                return False
            sync_folder(self.path)
            return True

        if ranks.lead(published):
            self._at(number, frozenset({expected}))
            return
        if self._attempt is not None:
            self._attempt.restore()
        self._attempt = None

    # ---- the server, or a trainer that starts again

    def load(self, tables: Tables, *, group: Any = None, writable: bool = False, optim: bool = True) -> int:
        """Makes the tables what the log says; returns the number they are at.

        Everything is checked and built aside first: a table changes in one step, when nothing can fail any
        more, and a call that raises leaves it as it was. That takes the memory of the rows twice for tables
        that have rows. Rows of a table over a store are replaced one by one. With `writable` their changes
        are tracked from now on, so that `append` may follow. Without `optim`, here and in `follow`, optimizer
        states of the log are left out, so that a server may have another optimizer, such as SGD, which has
        none.
        """
        if writable and not optim:
            raise ValueError("optim should be True with writable: a trainer needs the optimizer states")
        self._require_no_publisher("load")
        ranks = ranks_of(group, "IncrementLog.load()")
        self._is_writer = False
        ranks.agree(self.refresh)

        def build() -> tuple[Replacement, int, frozenset[str]]:
            first, last = ranks.lead(
                lambda: steady(self.entries, lambda e: (self._newest_base(e), last_of(e)))
            )
            chain: list[Dump] = []

            def open_all() -> None:
                entries = self.entries()
                kept = {n: p for n, p in entries["increment"].items() if first < n <= last}
                bases = {n: p for n, p in entries["base"].items() if n <= first}
                chain.extend(self._chain({"base": bases, "increment": kept}))

            ranks.agree(open_all)
            return Replacement(chain, tables, ranks, optim), last, identities(chain[-1], last)

        replacement, number, state = steady(lambda: ranks.lead(self.entries), lambda _: build())
        ranks.together(replacement.publish)
        self._at(number, state)
        self._optim = optim
        if writable:
            ranks.agree(lambda: track(tables))
            self._is_writer = True
        return self.applied

    def follow(self, tables: Tables, *, group: Any = None) -> list[int]:
        """Applies the increments that are new; returns their numbers.

        An increment that is damaged or does not fit raises before a row changes, and the next call tries it
        again. Where increments were compacted away, the tables are loaded from the base.
        """
        ranks = ranks_of(group, "IncrementLog.follow()")
        ranks.agree(self.refresh)

        def plan() -> list[int] | None:
            return steady(self.entries, self._news)

        def apply() -> list[int] | None:
            numbers = ranks.lead(plan)
            for number in numbers or []:
                change = Change(self._entry("increment", number), number, tables, ranks, self._optim)
                change.apply()
                self._at(number, change.state)
            return numbers

        before = self.applied
        if steady(lambda: ranks.lead(self.entries), lambda _: apply()) is None:
            self.load(tables, group=ranks, optim=self._optim)
        return list(range(before + 1, self.applied + 1))

    def _news(self, entries: Entries) -> list[int] | None:
        """The numbers to apply, or None when the tables have to be loaded from the base."""
        last = last_of(entries)
        if self.applied > last:
            raise CheckpointError(
                f"{self.path}: tables are at number {self.applied} but the log is at: {last}"
            )
        wanted = range(self.applied + 1, last + 1)
        if self.applied < 0 or not all(number in entries["increment"] for number in wanted):
            self._chain(entries)  # a gap is an error, not a reason to go back
            return None
        self._increments(entries, self.applied, self._state)
        return list(wanted)

    # ---- upkeep, by one process

    def compact(self, progress: Wanted = False) -> int:
        """Merges the base and its increments into a new base; returns its number.

        May run beside the trainer and its servers. What the new base replaces stays until the next
        compaction, so that whoever reads it can finish. `progress` is True for a bar of tqdm, or a function
        of (bytes done, bytes in all).
        """
        with measured("compact"):
            return self._compact(progress)

    def _compact(self, progress: Wanted) -> int:
        chain = self.chain()
        with shown(progress, "verifying") as report:
            verify_all(chain, report)
        facts = facts_of(chain[-1])
        number = int(facts["number"])
        if len(chain) > 1:
            # An increment after the new base names the entry that this one stands for.
            following = {"log": facts["log"], "number": number, "stands_for": identity(chain[-1])}
            with shown(progress, "compacting") as report:
                base = self._entry("base", number)
                rewrite(chain[0], chain[1:], base, increment=following, progress=report)
        self.clean()
        if self._mirror is not None:
            self._mirror.push()
        return number

    def clean(self) -> None:
        """Removes what no reader needs: entries that the base before the newest replaces, and what killed
        writers left."""
        entries = self.entries()
        bases = sorted(entries["base"])
        if bases:
            kept = bases[-2:][0]
            old = [path for number, path in sorted(entries["base"].items()) if number < kept]
            old += [path for number, path in sorted(entries["increment"].items()) if number <= kept]
            for path in old:
                remove_published(path)
        last = last_of(entries)
        for draft in drafts_in(self.path):
            place = place_of(draft.name[1:].split(".partial-")[0])
            # The next increment may be on its way, from a machine whose locks are not seen here.
            if place and (place[1] == "base" or place[0] <= last):
                remove_unlocked(draft)
        sync_folder(self.path)

    def verify(self) -> int:
        """Reads everything that counts; returns how many bytes were right."""
        self.refresh()
        return steady(self.entries, lambda entries: sum(dump.verify() for dump in self._chain(entries)))
