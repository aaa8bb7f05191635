"""Read-only tables that follow training.

    trainer   log.append(tables)  ──►  log/increment-000000000007/
    reader    Reader(log)         ──►  state 6 ──follow()──► state 7      any number of processes

A reader answers from one state of all tables. A new state is mapped, verified and built aside, then
replaces the old one in a single assignment, so lookups take no lock and never see half an increment.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from embstore.arrays import Array, address, as_floats, as_keys, empty_floats
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.host_cache import cache_folder
from embstore.checkpoint.increments import IncrementLog
from embstore.checkpoint.log_entries import steady
from embstore.checkpoint.reading import Dump, open_dump
from embstore.checkpoint.remote import Mirror, RemoteFolder, is_remote, key_of, local_copy
from embstore.checkpoint.writing import removed_file
from embstore.options import as_enum
from embstore.serving.bases import (
    RowDType,
    Tables,
    cached_base,
    drop_cached,
    increment_parts,
    is_base,
    map_listed,
    open_base,
    shared_of,
    with_shared,
)
from embstore.serving.watching import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """All tables at one moment. It never changes; hold it to make several lookups agree.

    number    of the last increment in it; 0 for a dump
    base      number of the base below the increments
    taken_ns  when training was in this state, nanoseconds since 1970
    """

    number: int
    base: int
    taken_ns: int
    dump: str
    tables: Mapping[tuple[str, str], Any]
    names: Mapping[str, tuple[str, str]]

    def _table(self, name: str) -> Any:
        try:
            return self.tables[self.names[name]]
        except KeyError:
            raise KeyError(
                f"table should be one of {', '.join(sorted(self.names))} but is: {name!r}"
            ) from None

    def rows(self, table: str) -> int:
        """How many rows the table has."""
        return int(self._table(table).size)

    def dim(self, table: str) -> int:
        """How many components the vectors of the table have."""
        return int(self._table(table).dim)

    def find(self, table: str, ids: object) -> tuple[Array, Array]:
        """Vectors (float32, ids.shape + (dim,)) and which ids have a row.

        `ids` are integers in a tensor, an array or a sequence; the results are of the same kind. An id
        without a row reads what `missing` of the reader says.

            vectors, found = reader.state.find("user", [7, -1])
        """
        served = self._table(table)
        if type(ids) is np.ndarray and ids.dtype == np.int64 and ids.flags.c_contiguous:
            vectors, found = served.find(ids)
            return vectors, found
        keys = as_keys(ids, "ids")
        vectors, found = served.find(keys.numpy().reshape(keys.shape))
        return keys.like(vectors), keys.like(found)

    def bags(
        self, table: str, ids: object, offsets: object, *, weights: object = None, mode: str = "sum"
    ) -> Array:
        """Sums or means of the vectors of bags: bag b has ids[offsets[b]:offsets[b + 1]].

        offsets  integers that rise from 0 to len(ids), one more than there are bags
        weights  a number for each id, for mode "sum" and "mean" alike
        mode     "sum" or "mean"
        """
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode should be 'sum' or 'mean' but is: {mode!r}")
        served, keys, bounds = self._table(table), as_keys(ids, "ids"), as_keys(offsets, "offsets")
        if bounds.n < 1:
            raise ValueError("offsets should have one more entry than there are bags but are empty")
        w = None if weights is None else as_floats(weights, (keys.n,), "weights")
        out = empty_floats(bounds.n - 1, served.dim)
        served.read_bags(
            keys.address, keys.n, bounds.address, bounds.n - 1, 0 if w is None else address(w),
            mode == "mean", address(out), served.dim,
        )  # fmt: skip
        return keys.like(out)


def _state(number: int, base: int, taken_ns: int, dump: str, tables: Tables) -> State:
    names = {f"{collection}/{table}": (collection, table) for collection, table in tables}
    plain = [table for _, table in tables]
    names |= {table: (collection, table) for collection, table in tables if plain.count(table) == 1}
    return State(number, base, taken_ns, dump, MappingProxyType(dict(tables)), MappingProxyType(names))


class Reader:
    """Tables of a dump, a serving base or an increment log, for lookups only.

    path     the folder of a dump, of a log, or of a base that `prepare` wrote
    dtype    "float32", "float16", "bfloat16" or "int8": how rows are kept. A prepared base has its own
    missing  what an id without a row, own or shared, reads: "zero", or "initial" for the vector it would
             start with
    cache    folder for index files, shared by the processes of a host; default ~/.cache/embstore/serving
    options  for fsspec, where `path` is a URL such as "s3://bucket/log": files are copied to the cache first

    Raises FileNotFoundError when there is nothing at `path`, CheckpointError when it is damaged.

        reader = embstore.serving.Reader("/data/log")
        reader.start()                                   # follows the log in the background
        vectors, found = reader.find("user", [7, -1])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: object = "float32",
        missing: str = "zero",
        cache: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if options and not is_remote(path):
            raise TypeError(f"options should be given with a URL alone but are: {', '.join(options)}")
        if missing not in ("zero", "initial"):
            raise ValueError(f"missing should be 'zero' or 'initial' but is: {missing!r}")
        self._dtype = as_enum(RowDType, "dtype", dtype)
        self._missing = missing
        self._cache = cache_folder("serving") if cache is None else Path(cache)
        self._mirror: Mirror | None = None
        self.path = Path(path)
        self._log: IncrementLog | None = None
        self._seen: tuple[int, int] | None = None
        self._following = threading.Lock()  # one follower at a time; lookups do not take it
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        self._state = self._open_remote(str(path), options) if is_remote(path) else self._open()

    # ---- lookups

    @property
    def state(self) -> State:
        """The newest state."""
        return self._state

    def find(self, table: str, ids: object) -> tuple[Array, Array]:
        """`State.find` on the newest state."""
        return self._state.find(table, ids)

    def lookup(self, ids: Mapping[str, object]) -> dict[str, Array]:
        """Vectors of several tables, all from one state.

        reader.lookup({"user": [7], "item": [12, 13]})
        """
        state = self._state
        return {table: state.find(table, of)[0] for table, of in ids.items()}

    @property
    def age_seconds(self) -> float:
        """How long ago training was in the state that is served."""
        return max(0.0, time.time() - self._state.taken_ns / 1e9)

    # ---- following

    def follow(self) -> list[int]:
        """Takes over what the log has published since; returns the new numbers.

        Raises CheckpointError when an entry is damaged or missing, and keeps serving the last good state.
        """
        if self._log is None:
            return []
        with self._following:
            log, before = self._log, self._state.number
            self._steady(log, lambda: self._follow(log))
            return list(range(before + 1, self._state.number + 1))

    def start(self, interval_seconds: float = 0.1, *, warn_age_seconds: float | None = None) -> None:
        """Follows the log in a background thread, looking for news this often.

        A failure is kept in `error` and tried again; `error` is None when all is well. The logger
        "embstore.serving" says when the reader is stuck, again every minute, when increments come faster than
        they can be applied, and, with warn_age_seconds, when the served state is older than that.
        """
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds should be above 0 but is: {interval_seconds!r}")
        if warn_age_seconds is not None and not warn_age_seconds > 0:
            raise ValueError(f"warn_age_seconds should be above 0 but is: {warn_age_seconds!r}")
        if self._thread is not None:
            raise RuntimeError("the reader follows its log already")
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run,
            args=(interval_seconds, Watch(warn_age_seconds)),
            name="embstore-reader",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops following. Lookups keep working on the last state."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, interval_seconds: float, watch: Watch) -> None:
        while not self._stop.wait(interval_seconds):
            try:
                news = self.follow()
            except Exception as error:
                watch.failed(self._state.number, error)
                self.error = error
            else:
                self.error = None
                watch.followed(self._state.number, len(news))
            watch.look_at_age(self._state.number, self.age_seconds)

    # ---- states

    def _open_remote(self, url: str, options: dict[str, Any]) -> State:
        """Copies the files of a remote dump, base or log first; a log is kept up to date by `follow`."""
        remote = RemoteFolder(url, **options)
        published = remote.current()
        if published is not None:
            with local_copy(remote, published, self._cache) as self.path:
                return self._open()
        self._mirror = Mirror(url, self._cache / f"log-{key_of(url)}", **options)
        self.path = self._mirror.path
        self._mirror.pull()
        return self._open()

    def _open(self) -> State:
        if is_base(self.path):
            base = open_base(self.path, self._missing)
            return _state(base.number, base.number, base.taken_ns, base.dump, base.tables)
        log = IncrementLog(self.path)
        if self.path.is_dir() and any(log.entries().values()):
            self._log = log
            return self._steady(log, lambda: self._from_chain(log.chain()))
        dump = open_dump(self.path)
        base = cached_base(dump, self._dtype, self._missing, self._cache)
        return _state(0, 0, base.taken_ns, base.dump, base.tables)

    def _steady(self, log: IncrementLog, work: Callable[[], T]) -> T:
        """Compaction may remove entries while they are being opened."""
        try:
            return steady(log.entries, lambda _: work())
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _follow(self, log: IncrementLog) -> None:
        if self._mirror is not None:
            self._mirror.pull()
        entries = log.entries()
        seen = (max(entries["base"], default=-1), max(entries["increment"], default=-1))
        if seen == self._seen:
            return
        chain = log.chain()
        before = self._state
        numbers = [_number(dump) for dump in chain]
        if before.number >= numbers[0]:
            # Increments first, as they are small: fresh rows do not wait for a new base to be indexed.
            if before.number > numbers[-1]:
                raise CheckpointError(
                    f"{log.path}: the log is at number {numbers[-1]}, behind the served state {before.number}"
                )
            state = before
            for dump in chain[before.number - numbers[0] + 1 :]:
                state = self._next(state, dump)
            self._state = state
        if numbers[0] != before.base:
            self._state = self._from_chain(chain)
            drop_cached(before.dump, self._dtype, self._cache)
        self._seen = seen

    def _from_chain(self, chain: list[Dump]) -> State:
        base = cached_base(chain[0], self._dtype, self._missing, self._cache)
        number = _number(chain[0])
        state = _state(number, number, base.taken_ns, base.dump, base.tables)
        for dump in chain[1:]:
            state = self._next(state, dump)
        return state

    def _next(self, state: State, dump: Dump) -> State:
        tables: Tables = {}
        for (collection, name), served in state.tables.items():
            if collection not in dump or name not in dump[collection]:
                raise CheckpointError(f"{dump.path}: table {name!r} of {collection!r} is missing")
            table = dump[collection][name]
            removed_path = table.folder / removed_file(name)
            removed = map_listed(table, removed_path) if removed_path.name in table.files() else None
            if table.rows and table.dim != served.dim:
                raise CheckpointError(
                    f"{dump.path}: expected dim {served.dim} of {name!r}, found {table.dim}"
                )
            tables[collection, name] = served.with_increment(
                removed.address if removed else 0,
                removed.bytes // 8 if removed else 0,
                increment_parts(table, self._dtype),
            )
            if table.spec is not None and table.spec.shared_rows:
                tables[collection, name] = with_shared(tables[collection, name], table.spec, shared_of(table))
        of = dump.manifest
        assert of is not None
        return _state(_number(dump), state.base, of.taken_ns, state.dump, tables)


def _number(dump: Dump) -> int:
    of = dump.manifest
    if of is None or not of.increment:
        raise CheckpointError(f"{dump.path}: is not an entry of an increment log")
    return int(of.increment["number"])
