"""The call that dumps tables, now or while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embstore import _core
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.remote import Upload, is_remote, shown_url
from embstore.checkpoint.sources import Source, table_source
from embstore.checkpoint.writing import DumpJob, DumpOptions
from embstore.distributed.ranks import Ranks, ranks_of
from embstore.durations import measured
from embstore.formats.dynamicemb import WRITTEN
from embstore.ownership import AnyOwnership, Blocks, OnRank, Ownership
from embstore.progress import Wanted, shown
from embstore.table import Table

Tables = Mapping[str, Mapping[str, Table]]  # collection -> table name -> table

# How keys are spread over ranks: one rule, or one for each table of each collection.
OwnershipOf = AnyOwnership | Mapping[str, Mapping[str, AnyOwnership]]


MOST_THREADS = 4


def ownership_of(ownership: OwnershipOf, collection: str, table: str) -> AnyOwnership:
    """The rule of a table. Raises ValueError where rules were given by table and this one has none."""
    found = ownership.get(collection, {}).get(table) if isinstance(ownership, Mapping) else ownership
    if found is None:
        known = [f"{c}/{t}" for c, of in ownership.items() for t in of]  # type: ignore[union-attr]
        raise ValueError(f"tables should be among {', '.join(known)} but one is: {collection}/{table}")
    return found if isinstance(found, (Blocks, OnRank)) else Ownership(found)


class Pace:
    """Keeps a background dump out of the way of training.

    The thread runs where nobody else wants to, and as usual for a small share of the time, so that a
    machine with no idle moment finishes the dump as well. It rests between pieces of work, because on an
    idle core too it takes memory bandwidth from the others. Once somebody waits for it, it hurries.
    """

    SHARE = 0.05
    REST = 2.0  # times as long as it worked

    def __init__(self, share: float = SHARE) -> None:
        self._share = share  # of the time, at the usual priority
        self._start = time.monotonic()
        self._spent = 0.0
        self._idle = False
        self._mark = time.thread_time()
        self._thread = threading.get_native_id()
        self._hurry = threading.Event()
        self._work_began = self._start

    def __call__(self) -> None:
        """To be called by the thread itself, between small pieces of work."""
        self._hurry.wait(self.REST * (time.monotonic() - self._work_began))
        self._work_began = time.monotonic()
        now = time.thread_time()
        if not self._idle:
            self._spent += now - self._mark
        self._mark = now
        if not self._hurry.is_set():
            self._set(self._spent > self._share * (time.monotonic() - self._start))

    def hurry(self) -> None:
        """May be called by any thread."""
        self._hurry.set()
        self._set(False)

    def _set(self, idle: bool) -> None:
        self._idle = idle
        with contextlib.suppress(OSError):  # a hint: where it is refused training is a little slower
            policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
            os.sched_setscheduler(self._thread, policy, os.sched_param(0))


class DumpHandle:
    """A dump that is being written. Training may go on; what is written is the state at the call.

    What goes wrong is raised by `wait`. If nobody waits, the next dump raises it, or `Table.close`, and the
    end of the process tells it on stderr.
    """

    def __init__(self, job: DumpJob, ranks: Ranks, upload: Upload | None = None) -> None:
        self.path: Path | str = upload.url if upload else job.path
        self._error: BaseException | None = None
        self._told = False
        self._pace: Pace | None = None
        self._hurry = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(job, ranks, upload), name="embstore-dump")
        _running.append(self)  # first: Ctrl-C may end this call as soon as the thread runs
        self._thread.start()

    def _run(self, job: DumpJob, ranks: Ranks, upload: Upload | None) -> None:
        self._pace = Pace()
        if self._hurry:
            self._pace.hurry()
        try:
            _write(upload, ranks, lambda: job.run(ranks, threads=1, between_blocks=self._pace))
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is published, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when the dump is published; raises what went wrong on any rank."""
        self.finish(timeout_seconds)
        if self._error is not None:
            self._told = True
            raise self._error

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Returns when nothing is being written any more, whatever became of it."""
        self._hurry = True
        if self._pace:
            self._pace.hurry()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the dump to {shown_url(self.path)} is not complete after {timeout_seconds} seconds"
            )

    def failure(self) -> str:
        """What nobody has been told yet, or nothing."""
        if self._told or self._process != os.getpid():
            return ""
        if not self.done():
            return f"the background dump to {shown_url(self.path)} is not complete and will not be published"
        if self._error is None:
            return ""
        where, kind = shown_url(self.path), type(self._error).__name__
        return f"the background dump to {where} failed: {kind}: {self._error}"

    def raise_untold(self) -> None:
        """Raises what went wrong unless somebody knows it already."""
        failure = self.failure()
        if failure:
            self._told = True
            raise CheckpointError(failure) from self._error


_running: list[DumpHandle] = []


def finish_running() -> None:
    """Waits for dumps in the background, so that they are published in order. Raises what went wrong with
    one of them unless its `wait` did."""
    while _running:
        _running[0].finish()
        _running.pop(0).raise_untold()


@atexit.register
def _tell_at_exit() -> None:
    for handle in _running:
        if handle.failure():
            print(f"embstore: {handle.failure()}", file=sys.stderr, flush=True)


def dump(
    path: str | os.PathLike[str],
    tables: Tables,
    *,
    optim: bool = False,
    group: Any = None,
    ownership: OwnershipOf = Ownership.ROUNDROBIN,
    layout: str = "v1a",
    async_: bool = False,
    overwrite: bool = False,
    progress: Wanted = False,
    counts: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> DumpHandle | None:
    """Writes tables to a folder: {path}/{collection}/{table}_keys, _values and so on.

    Called on all ranks of `group`, each with its own tables. The folder appears when it is complete; on
    failure every rank raises and nothing is left.

    Args:
        path: folder to write.
        tables: tables by collection and name: {"model": {"user": table}}.
        optim: with optimizer states.
        group: a torch process group; None is the default one, or this process alone.
        ownership: how keys are spread over ranks: one rule, or one for each table.
        layout: "v1a", one set of files a table, or "v2", one for each rank.
        async_: returns at once; training may go on, and what is written are the rows, states and scores at
            the call. An earlier dump in the background is waited for.
        overwrite: swaps a folder that has files in one step.
        progress: True for a bar of tqdm on rank 0, or a function of (bytes done, bytes in all).
        storage_options: with a URL, passed to fsspec.
        counts: with the counts of `Table.exact_counts`, where a table has them.

    Returns:
        A `DumpHandle` with async_, whose `wait` raises what went wrong; else None.

    `path` may be a URL of fsspec, such as "s3://bucket/monday", which gets storage_options. The ranks then
    write to a temporary folder of rank 0, which all of them have to see, and rank 0 uploads it.

    Raises:
        ValueError: an argument is wrong, or ranks disagree about the tables.
        FileExistsError: the folder has files and `overwrite` is False.
        CheckpointError: an earlier dump in the background failed and nobody has been told.

    Examples:
        >>> import embstore, tempfile
        >>> table = embstore.Table("user", dim=2)
        >>> vectors = table.find_or_insert([7, -1])
        >>> folder = tempfile.mkdtemp() + "/monday"
        >>> embstore.dump(folder, {"model": {"user": table}}, optim=True)
        >>> embstore.open_dump(folder)["model"]["user"].rows
        2
    """
    if layout not in WRITTEN:
        raise ValueError(f"layout should be one of {', '.join(WRITTEN)} but is: {layout!r}")
    if async_ and progress:
        raise ValueError("progress should be False with async_: the handle says when the dump is done")
    ranks = ranks_of(group, "dump()")
    options = DumpOptions(layout, bool(optim), overwrite=overwrite)
    upload = Upload(str(path), storage_options, overwrite, ranks) if is_remote(path) else None
    if storage_options and upload is None:
        raise TypeError(f"storage_options should be given with a URL alone but path is: {path}")
    with shown(progress, "dumping", rank=ranks.rank) as report:
        try:
            sources = snapshot_all(tables, options.optim, ranks, ownership, counts)
            folder = upload.folder if upload else Path(path)
            job = start(folder, {ranks.rank: sources}, ranks.world, options, ranks)
        except BaseException:
            if upload:
                upload.end(ranks)
            raise
        if not async_:
            threads = min(_core.get_num_threads(), MOST_THREADS)
            _write(upload, ranks, lambda: job.run(ranks, threads, report))
            return None
    handle = DumpHandle(job, ranks.background(), upload)
    for named in tables.values():
        for table in named.values():
            table.dumps[:] = [*(dump for dump in table.dumps if dump.failure()), handle]
    return handle


def _write(upload: Upload | None, ranks: Ranks, run: Callable[[], None]) -> None:
    with measured("dump"):
        try:
            run()
            if upload:
                upload.finish(ranks)
        finally:
            if upload:
                upload.end(ranks)


def snapshot_all(
    tables: Tables, optim: bool, ranks: Ranks, ownership: OwnershipOf, counts: bool = True
) -> list[Source]:
    """A source for every table, in an order that is the same on all ranks."""
    sources: list[Source] = []

    def take() -> None:
        finish_running()
        for collection in sorted(tables):
            for name in sorted(tables[collection]):
                own = tables[collection][name].name
                if own != name:
                    raise ValueError(
                        f"tables should have each table under its own name, {own!r}, "
                        f"but in {collection!r} it is under: {name!r}"
                    )
                by = ownership_of(ownership, collection, name)
                sources.append(table_source(collection, tables[collection][name], optim, by, counts))

    try:
        ranks.agree(take)
    except BaseException:
        for source in sources:
            source.end()
        raise
    return sources


def start(
    path: Path, parts: dict[int, list[Source]], world: int, options: DumpOptions, ranks: Ranks
) -> DumpJob:
    """Agrees on sizes and makes the draft folder."""
    try:
        return DumpJob(path, parts, world, options, ranks)
    except BaseException:
        for sources in parts.values():
            for source in sources:
                source.end()
        raise
