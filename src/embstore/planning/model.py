"""The model: counts what a workload does on hosts, and multiplies by what it costs on a machine.

    step      = work / cores + waiting for other ranks + bytes out of the host / network + exchanges * latency
    work      = ids * (id + vector bytes) + distinct rows * (row + row bytes) + what ranks send each other
    dump      = rows of a host: the cores copy them, then the disk writes what is left
    load      = rows of a host, by its cores or by its disk, whichever is slower
    freshness = time between increments + writing one + following it

Ids are spread evenly over ranks, and rows are not in the cache. Nothing overlaps: look-ahead and dumps in
the background only make it better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from embstore.checkpoint.dumping import MOST_THREADS
from embstore.checkpoint.parts import RowFile
from embstore.planning.machine import Machine
from embstore.planning.workload import Hosts, PlannedTable, Workload

EXCHANGES = 4  # of a step: headers, keys, vectors, gradients
MOST_ROWS = 1_600_000_000  # of a table on one rank
MOST_SERVED_ROWS = 1 << 32  # of a table in a reader
COPIES, COPIES_OF_RANKS = 3, 6  # of the vectors of a batch
# How often all ranks exchange a message in a dump, an increment and a load.
DUMP_ROUNDS, APPEND_ROUNDS, LOAD_ROUNDS = 7, 10, 4
PUBLISHED_FILES = 4  # that are synced beside those of the tables: the manifest, its folder, two around it
AHEAD_BYTES = RowFile.AHEAD_BYTES
BACKGROUND = 0.1  # of the memory that tables leave: so many bytes may wait before Linux begins to write them
FOLLOW_SECONDS = 0.1  # how often a reader looks for news


@dataclass(frozen=True)
class Limit:
    """How much of something is used. Above 1 it breaks; `then` is what to do."""

    name: str
    use: float
    then: str


@dataclass(frozen=True)
class Plan:
    """What is predicted. Bytes and seconds are of one host unless the name says otherwise."""

    world: int
    rows: int  # of all tables
    memory_bytes: float
    rank_memory_bytes: float
    sent_bytes: float  # by a rank in a step, to all other ranks
    network_bytes: float  # by a host in a step, to all other hosts
    work_seconds: float
    network_seconds: float
    message_seconds: float
    wait_seconds: float  # for other ranks of a host
    step_seconds: float
    ids_per_second: float  # of all ranks
    dump_bytes: float
    dump_work_seconds: float  # of the cores of a host, together
    dump_seconds: float
    load_work_seconds: float
    load_seconds: float
    reshard_seconds: float  # a load on another number of ranks
    changed_rows: float  # of an increment, of all hosts
    append_seconds: float
    follow_seconds: float
    freshness_seconds: float
    reader_bytes: float
    limits: tuple[Limit, ...]  # the one that breaks first comes first

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def plan(workload: Workload, hosts: Hosts, machine: Machine) -> Plan:
    """Predicts what a workload costs on hosts whose cores are like those of a machine."""
    step = _Step(workload, hosts, machine)
    tables, world = workload.tables, hosts.world
    rank_memory = sum(map(_memory(hosts), tables)) + step.buffer_bytes + machine.process_bytes
    rows = sum(table.rows for table in tables)
    files = _Files(hosts, machine, hosts.memory_bytes - hosts.ranks * rank_memory)
    dump_bytes = sum(table.rows * table.dumped_bytes for table in tables)
    dump_files = sum(table.dumped_files for table in tables)
    dump_seconds = files.published(len(tables), dump_files, DUMP_ROUNDS) + files.written(rows, dump_bytes)
    load_seconds = files.loaded(tables, rows, dump_bytes)

    reached = world * workload.batch / step.seconds
    speed = min(workload.ids_per_second or reached, reached)
    seen = speed * workload.append_every_seconds * workload.distinct
    shares = [workload.ids_of(table) / workload.batch for table in tables]
    changed = [min(table.rows, seen * share) for table, share in zip(tables, shares, strict=True)]
    changed_bytes = sum(n * table.dumped_bytes for n, table in zip(changed, tables, strict=True))
    append_seconds = files.published(len(tables), dump_files + len(tables), APPEND_ROUNDS)
    append_seconds += files.scanned(rows) + files.written(sum(changed), changed_bytes)
    followed_bytes = sum(n * table.followed_bytes for n, table in zip(changed, tables, strict=True))
    follow_seconds = files.followed(len(tables), sum(changed), followed_bytes)

    made = Plan(
        world=world,
        rows=rows,
        memory_bytes=hosts.ranks * rank_memory,
        rank_memory_bytes=rank_memory,
        sent_bytes=step.sent_bytes,
        network_bytes=step.network_bytes,
        work_seconds=step.work_seconds,
        network_seconds=step.network_seconds,
        message_seconds=step.message_seconds,
        wait_seconds=step.wait_seconds,
        step_seconds=step.seconds,
        ids_per_second=reached,
        dump_bytes=dump_bytes / hosts.hosts,
        dump_work_seconds=files.write_work(rows, dump_bytes)
        + hosts.ranks * files.fixed(len(tables), DUMP_ROUNDS),
        dump_seconds=dump_seconds,
        load_work_seconds=files.load_work(rows, dump_bytes)
        + hosts.ranks * files.fixed(len(tables), LOAD_ROUNDS),
        load_seconds=load_seconds,
        reshard_seconds=files.resharded(len(tables), rows, dump_bytes),
        changed_rows=sum(changed),
        append_seconds=append_seconds,
        follow_seconds=follow_seconds,
        freshness_seconds=workload.append_every_seconds + append_seconds + FOLLOW_SECONDS + follow_seconds,
        reader_bytes=sum(table.rows * (table.vector_bytes + 17) for table in tables),
        limits=(),
    )
    return Plan(**{**vars(made), "limits": _limits(made, workload, hosts)})


class _Step:
    """One training step of a rank; all ranks do the same."""

    def __init__(self, workload: Workload, hosts: Hosts, machine: Machine) -> None:
        several = hosts.world > 1
        tables = len(workload.tables)
        own = sent = moved_bytes = sent_bytes = self.buffer_bytes = 0.0
        for table in workload.tables:
            ids = workload.ids_of(table)
            own += ids * (machine.id + machine.id_byte * table.vector_bytes)
            own += ids * workload.distinct * (machine.row + machine.row_byte * table.row_bytes)
            moved = ids * (8 + 2 * table.vector_bytes)
            if several:
                moved_bytes += moved
                sent += ids * machine.sent_id + moved * machine.sent_byte
                sent_bytes += moved * (hosts.world - 1) / hosts.world
            self.buffer_bytes += ids * (16 + (COPIES_OF_RANKS if several else COPIES) * table.vector_bytes)
        work = machine.step + tables * machine.table + own * _divided(machine, hosts)
        self.message_seconds = self.wait_seconds = self.network_seconds = self.network_bytes = 0.0
        self.sent_bytes = sent_bytes
        if several:
            work = (work + sent + machine.exchange + tables * machine.sent_table) * hosts.crowding
            self.message_seconds = EXCHANGES * (hosts.world - 1) * machine.message * hosts.crowding
            self.wait_seconds = EXCHANGES * machine.wait + moved_bytes * machine.wait_byte
            outside = (hosts.world - hosts.ranks) / (hosts.world - 1)
            self.network_bytes = hosts.ranks * sent_bytes * outside
            self.network_seconds = self.network_bytes / hosts.network_bytes_per_second
        if hosts.hosts > 1:
            self.network_seconds += EXCHANGES * hosts.latency_seconds
        self.work_seconds = work
        self.seconds = self.work_seconds + self.message_seconds + self.wait_seconds + self.network_seconds


def _divided(machine: Machine, hosts: Hosts) -> float:
    """What is left of work with rows by the clock when the threads of a rank share it."""
    return 1 - machine.parallel + machine.parallel / hosts.threads


class _Files:
    """Seconds for so many rows and bytes of all hosts: of their cores, and of their disks."""

    def __init__(self, hosts: Hosts, machine: Machine, spare_bytes: float) -> None:
        self._hosts, self._machine = hosts, machine
        self._waiting_bytes = BACKGROUND * max(0.0, spare_bytes)

    def write_work(self, rows: float, size: float) -> float:
        m = self._machine
        return (rows * m.dump_row + size * m.dump_byte) * self._crowded() / self._hosts.hosts

    def load_work(self, rows: float, size: float) -> float:
        m = self._machine
        return (rows * m.load_row + size * m.load_byte) * self._crowded() / self._hosts.hosts

    def _crowded(self) -> float:
        """How much more work rows are where ranks take turns: none finds its caches as it left them."""
        return 1 + (self._hosts.crowding - 1) * self._machine.crowded

    def fixed(self, tables: int, rounds: int) -> float:
        """Work of each rank, whatever the number of rows; each round is a message to every other rank."""
        m, others = self._machine, self._hosts.world - 1
        alone = m.publish + tables * m.publish_table
        return alone + (rounds * others * m.round + tables * m.round_table if others else 0.0)

    def published(self, tables: int, files: int, rounds: int) -> float:
        """What a dump or an increment takes that has no rows."""
        synced = (files + PUBLISHED_FILES) * self._machine.file
        return self._started(tables, rounds) + synced

    def written(self, rows: float, size: float) -> float:
        """Cores copy rows to the page cache; the disk begins when many bytes wait there, or at the end."""
        hosts = self._hosts
        copy = self.write_work(rows, size) / min(hosts.cores, hosts.ranks * min(hosts.threads, MOST_THREADS))
        own = size / hosts.hosts
        start = copy * min(1.0, self._waiting_bytes / own) if own else 0.0
        return max(copy, start + own / hosts.write_bytes_per_second)

    def scanned(self, rows: float) -> float:
        """Each rank looks for changes in its tables, on one core."""
        return rows / self._hosts.world * self._machine.scan_row * self._hosts.crowding

    def loaded(self, tables: Sequence[PlannedTable], rows: float, size: float) -> float:
        """The first rows of a table wait behind what is read ahead of each of its files."""
        hosts = self._hosts
        ahead = sum(
            min(table.rows * table.dumped_bytes / hosts.hosts, hosts.ranks * table.loaded_files * AHEAD_BYTES)
            for table in tables
        )
        cores = ahead / hosts.read_bytes_per_second + self._placed(self.load_work(rows, size))
        disk = size / hosts.hosts / hosts.read_bytes_per_second
        return self._started(len(tables), LOAD_ROUNDS) + max(cores, disk)

    def resharded(self, tables: int, rows: float, size: float) -> float:
        """Every rank reads the whole dump and keeps its own rows; a host reads it from the disk once."""
        m, hosts = self._machine, self._hosts
        own = (rows * m.load_row) / hosts.world + size * m.load_byte
        cores, disk = self._placed(own * hosts.ranks * self._crowded()), size / hosts.read_bytes_per_second
        return self._started(tables, LOAD_ROUNDS) + max(cores, disk)

    def followed(self, tables: int, rows: float, size: float) -> float:
        """One reader follows the increments of all hosts."""
        m = self._machine
        cores = rows * m.follow_row + size * m.follow_byte
        return m.follow + tables * m.follow_table + max(cores, size / self._hosts.read_bytes_per_second)

    def _started(self, tables: int, rounds: int) -> float:
        """The fixed work by the clock. Every wait doubles the number of ranks that a message has reached."""
        waits = rounds * math.log2(self._hosts.world)
        return self.fixed(tables, rounds) * self._hosts.crowding + waits * self._machine.wait

    def _placed(self, work: float) -> float:
        """Work of a load of all ranks of a host. One thread of each reads while the others place rows."""
        m, hosts = self._machine, self._hosts
        longest = max(m.reading, (1 - m.reading) * _divided(m, hosts))
        return max(work / hosts.cores, work / hosts.ranks * longest)


def _memory(hosts: Hosts) -> Callable[[PlannedTable], float]:
    def of_rank(table: PlannedTable) -> float:
        rows = -(-table.rows // hosts.world)
        counted = min(rows, MOST_ROWS)
        return table.options.full_bytes(counted) * (rows / counted)

    return of_rank


def _limits(made: Plan, workload: Workload, hosts: Hosts) -> tuple[Limit, ...]:
    wanted = workload.ids_per_second or made.ids_per_second
    largest = max(table.rows for table in workload.tables)
    steps = wanted / (made.world * workload.batch)  # a second
    found = [
        Limit(
            "memory of a host",
            made.memory_bytes / hosts.memory_bytes,
            "float16, an optimizer with less state, max_capacity, rows on SSD, more hosts",
        ),
        Limit(
            "rows of a table on one rank",
            largest / hosts.world / MOST_ROWS,
            "more ranks on each host",
        ),
        Limit(
            "network of a host",
            steps * made.network_bytes / hosts.network_bytes_per_second,
            "a smaller dim, pooling before the exchange, a faster network, more hosts",
        ),
        Limit(
            "speed of training",
            wanted / made.ids_per_second,
            "larger batches where messages dominate, else more cores or hosts",
        ),
        Limit(
            "messages of a step",
            steps * made.message_seconds,
            "fewer ranks with more threads each, larger batches",
        ),
        Limit(
            "time to dump",
            made.dump_seconds / workload.dump_every_seconds if workload.dump_every_seconds else 0.0,
            "dumps less often, increments between them, faster disks",
        ),
        Limit(
            "time to append",
            made.append_seconds / workload.append_every_seconds if workload.append_every_seconds else 0.0,
            "increments less often, faster disks, more ranks on each host",
        ),
        Limit(
            "a reader that follows",
            made.follow_seconds / workload.append_every_seconds if workload.append_every_seconds else 0.0,
            "increments less often, tables spread over several logs with readers of their own",
        ),
        Limit(
            "rows of a table in a reader",
            largest / MOST_SERVED_ROWS,
            "several tables of one model, each with its own share of the ids",
        ),
    ]
    return tuple(sorted(found, key=lambda limit: -limit.use))
