"""The model of `embstore plan`: what it counts is what tables, dumps and ranks really have."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import process_groups
import pytest

import embstore
from embstore.checkpoint import parts
from embstore.checkpoint.files import open_regular
from embstore.distributed.ranks import Ranks
from embstore.optimizers import OPTIMIZERS
from embstore.planning import REFERENCE, Hosts, Machine, Workload, plan, planned_table
from embstore.planning.measuring import fitted, measure
from embstore.planning.model import APPEND_ROUNDS, DUMP_ROUNDS, LOAD_ROUNDS, PUBLISHED_FILES

ROOT = Path(__file__).parents[2]


def hosts(**changes):
    return Hosts(
        **{
            "hosts": 1,
            "ranks": 1,
            "cores": 8,
            "memory_bytes": 1 << 34,
            "network_bytes_per_second": 1e9,
            "latency_seconds": 1e-4,
            "write_bytes_per_second": 1e8,
            "read_bytes_per_second": 2e8,
            **changes,
        }
    )


def workload(**changes):
    table = planned_table("user", rows=1_000_003, dim=7, optimizer="adam")
    return Workload(**{"tables": [table], "batch": 1023, **changes})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_has_the_bytes_in_a_dump_that_a_dump_really_writes(optimizer, tmp_path):
    planned = planned_table("user", rows=97, dim=7, optimizer=optimizer.__name__)
    table = embstore.Table(planned.options)
    table.find_or_insert(np.arange(97))
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    files = [path for path in (tmp_path / "dump").rglob("*") if path.is_file()]
    rows = [path for path in files if path.suffix != ".json"]
    assert sum(path.stat().st_size for path in rows) == 97 * planned.dumped_bytes
    assert len(files) == planned.dumped_files + 1  # the manifest


class CountingRanks(Ranks):
    """One rank that counts how often it would meet others."""

    def __init__(self):
        self.met = 0

    def agree(self, work, what=""):
        self.met += 1
        return super().agree(work, what)


def test_rounds_files_and_syncs_are_those_of_a_dump_an_increment_and_a_load(tmp_path, monkeypatch):
    planned = planned_table("user", rows=97, dim=7, optimizer="adam")
    tables = {"model": {"user": embstore.Table(planned.options)}}
    tables["model"]["user"].find_or_insert(np.arange(97))
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )

    def met(call):
        synced.clear()
        ranks = CountingRanks()
        call(ranks)
        return ranks.met, len(synced)

    files = planned.dumped_files + PUBLISHED_FILES
    dumped = met(lambda ranks: embstore.dump(tmp_path / "dump", tables, optim=True, group=ranks))
    assert dumped == (DUMP_ROUNDS, files)
    tables["model"]["user"].find_or_insert(np.arange(200))
    assert met(lambda ranks: log.append(tables, group=ranks)) == (APPEND_ROUNDS, files + 1)
    again = {"model": {"user": embstore.Table(planned.options)}}
    opened = []
    monkeypatch.setattr(parts, "open_regular", lambda path: opened.append(path) or open_regular(path))
    loaded = met(lambda ranks: embstore.load(tmp_path / "dump", again, optim=True, group=ranks))
    assert loaded == (LOAD_ROUNDS, 0) and len(opened) == planned.loaded_files


def test_a_reader_looks_at_keys_and_vectors_alone():
    free = dict.fromkeys((f.name for f in dataclasses.fields(Machine)), 0.0)
    free |= {"process_bytes": 0, "cores": 1, "memory_bytes": 1, "read_bytes_per_second": 1.0}
    few = workload(append_every_seconds=1.0, ids_per_second=1000.0)
    for name, count in {"follow": 1, "follow_table": 1, "follow_row": 1000, "follow_byte": 36_000}.items():
        machine = Machine(**{**free, "write_bytes_per_second": 1.0, name: 1.0, "step": 1e-9})
        assert plan(few, hosts(read_bytes_per_second=1e12), machine).follow_seconds == pytest.approx(count)


def test_memory_is_that_of_full_tables_and_is_divided_by_ranks():
    table = workload().tables[0]
    one, many = (plan(workload(), hosts(hosts=n, ranks=3), REFERENCE) for n in (1, 5))
    for made, world in ((one, 3), (many, 15)):
        tables = made.rank_memory_bytes - REFERENCE.process_bytes
        own = table.options.full_bytes(math.ceil(table.rows / world))
        assert own < tables < own + 1023 * (16 + 6 * 28) + 1
        assert made.memory_bytes == 3 * made.rank_memory_bytes


def test_one_rank_sends_nothing_and_ranks_send_what_does_not_stay_with_them():
    alone = plan(workload(), hosts(), REFERENCE)
    assert alone.sent_bytes == alone.network_bytes == alone.message_seconds == alone.network_seconds == 0
    assert alone.wait_seconds == 0
    made = plan(workload(), hosts(hosts=2, ranks=2), REFERENCE)
    assert made.sent_bytes == pytest.approx(1023 * (8 + 2 * 28) * 3 / 4)
    # Of the three other ranks, two are on the other host.
    assert made.network_bytes == pytest.approx(2 * made.sent_bytes * 2 / 3)
    assert made.network_seconds == pytest.approx(made.network_bytes / 1e9 + 4 * 1e-4)


def test_a_step_is_the_sum_of_what_is_counted():
    free = dict.fromkeys((f.name for f in dataclasses.fields(Machine)), 0.0)
    free |= {"process_bytes": 0, "cores": 1, "memory_bytes": 1}
    free |= {"write_bytes_per_second": 1.0, "read_bytes_per_second": 1.0}
    rows = 1023 * 0.25
    expected = {"step": 1, "table": 1, "id": 1023, "id_byte": 1023 * 28, "row": rows, "row_byte": rows * 84}
    for name, count in expected.items():
        made = plan(workload(distinct=0.25), hosts(cores=1), Machine(**{**free, name: 1e-6}))
        assert made.step_seconds == pytest.approx(1e-6 * count), name
    ranks = {"exchange": 1, "sent_table": 1, "message": 4 * 3, "sent_id": 1023, "sent_byte": 1023 * (8 + 56)}
    for name, count in ranks.items():
        made = plan(workload(), hosts(ranks=4, cores=4), Machine(**{**free, name: 1e-6}))
        crowded = plan(workload(), hosts(ranks=4, cores=2), Machine(**{**free, name: 1e-6}))
        assert made.step_seconds == pytest.approx(1e-6 * count), name
        assert crowded.step_seconds == pytest.approx(2e-6 * count), name
    for name, count in {"wait": 4, "wait_byte": 1023 * (8 + 56)}.items():
        for cores in (2, 4):
            made = plan(workload(), hosts(ranks=4, cores=cores), Machine(**{**free, name: 1e-6}))
            assert made.step_seconds == made.wait_seconds == pytest.approx(1e-6 * count), name


def test_threads_divide_the_work_that_they_can():
    machine = dataclasses.replace(REFERENCE, parallel=0.75, step=0.0, table=0.0)
    one = plan(workload(), hosts(cores=1), machine).work_seconds
    assert plan(workload(), hosts(cores=4), machine).work_seconds == pytest.approx(one * (0.25 + 0.75 / 4))


def test_each_rank_looks_through_its_rows_for_an_increment():
    free = dataclasses.replace(REFERENCE, scan_row=0.0)
    slow = dataclasses.replace(REFERENCE, scan_row=1e-6)
    for given, seconds in ((hosts(hosts=2, ranks=2, cores=2), 0.25), (hosts(ranks=4, cores=2), 0.5)):
        more = plan(workload(), given, slow).append_seconds - plan(workload(), given, free).append_seconds
        assert more == pytest.approx(seconds * 1.000003), given


def only(**costs):
    """A machine where nothing else costs anything."""
    names = (f.name for f in dataclasses.fields(Machine))
    free = {**dict.fromkeys(names, 0.0), "process_bytes": 0, "cores": 1, "memory_bytes": 1, "step": 1e-9}
    return Machine(**{**free, "write_bytes_per_second": 1.0, "read_bytes_per_second": 1.0, **costs})


SIZE = 1_000_003 * (16 + 28 + 56 + 16)


def test_a_dump_is_copied_by_cores_and_then_written_by_the_disk():
    fast = {"write_bytes_per_second": 1e12}
    made = plan(workload(), hosts(hosts=4), only(dump_byte=1e-9))
    assert made.dump_bytes == SIZE / 4 and made.dump_work_seconds == pytest.approx(SIZE / 4 * 1e-9)
    # Four threads of a rank copy; two ranks of eight cores use all of them.
    assert made.dump_seconds == pytest.approx(SIZE / 4 * (1e-9 / 4 + 1e-8))
    assert plan(workload(), hosts(ranks=2, **fast), only(dump_byte=1e-9)).dump_seconds == pytest.approx(
        SIZE * (1e-9 / 8 + 1e-12)
    )
    assert plan(workload(), hosts(ranks=2, cores=1, **fast), only(dump_byte=1e-9)).dump_seconds == (
        pytest.approx(SIZE * (1e-9 + 1e-12))
    )


def test_the_disk_writes_beside_the_cores_once_many_bytes_wait():
    table = planned_table("user", rows=10**9, dim=7, optimizer="adam")
    given = hosts(cores=1, memory_bytes=1 << 40, write_bytes_per_second=2e8)
    machine = only(dump_byte=1e-9)
    made = plan(workload(tables=[table]), given, machine)
    waiting = 0.1 * ((1 << 40) - made.memory_bytes)
    assert 0.1 < waiting / made.dump_bytes < 0.9
    assert made.dump_seconds == pytest.approx(waiting * 1e-9 + made.dump_bytes / 2e8)
    slow_cores = plan(workload(tables=[table]), given, only(dump_byte=1e-6))
    assert slow_cores.dump_seconds == pytest.approx(made.dump_bytes * 1e-6)


def test_dumps_increments_and_loads_without_rows_take_what_ranks_tables_and_files_cost():
    one = dict(append_every_seconds=0.0)
    tables = [planned_table(name, rows=1, dim=7) for name in "ab"]
    for ranks, crowding in ((1, 1), (4, 2)):
        given = hosts(ranks=ranks, cores=2, read_bytes_per_second=1e15, write_bytes_per_second=1e15)

        def seconds(given=given, **costs):
            made = plan(workload(tables=tables, **one), given, only(**costs))
            return made.dump_seconds, made.append_seconds, made.load_seconds

        assert seconds(publish=1.0) == pytest.approx([crowding] * 3)
        assert seconds(publish_table=1.0) == pytest.approx([2 * crowding] * 3)
        assert seconds(file=1.0) == pytest.approx([2 * 4 + 4, 2 * 5 + 4, 0], abs=1e-9)
        rounds = [DUMP_ROUNDS, APPEND_ROUNDS, LOAD_ROUNDS]
        assert seconds(round=1.0) == pytest.approx([n * (ranks - 1) * crowding for n in rounds], abs=1e-9)
        table = 2 * crowding if ranks > 1 else 0
        assert seconds(round_table=1.0) == pytest.approx([table] * 3, abs=1e-9)
        assert seconds(wait=1.0) == pytest.approx([n * math.log2(ranks) for n in rounds], abs=1e-9)


def test_a_load_takes_what_the_slower_of_cores_and_disk_takes():
    ahead = 5 * (8 << 20)  # keys, vectors, scores, two states
    made = plan(workload(), hosts(hosts=2), only(load_byte=1e-10, reading=0.5))
    assert made.load_seconds == pytest.approx(SIZE / 2 / 2e8)
    assert made.reshard_seconds == pytest.approx(SIZE / 2e8)
    fast = hosts(read_bytes_per_second=1e10)
    # One thread reads, others place: whoever has more to do holds the load up.
    for reading, parallel, share in ((0.25, 0.0, 0.75), (0.75, 0.0, 0.75), (0.25, 1.0, 0.25)):
        machine = only(load_byte=1e-8, reading=reading, parallel=parallel)
        assert plan(workload(), fast, machine).load_seconds == pytest.approx(
            SIZE * 1e-8 * share + ahead / 1e10
        )
    crowded = plan(
        workload(), dataclasses.replace(fast, ranks=4, cores=2), only(load_byte=1e-8, reading=0.25)
    )
    # Ranks read ahead together, but no more than there is.
    assert crowded.load_seconds == pytest.approx(SIZE * 1e-8 / 2 + min(SIZE, 4 * ahead) / 1e10)


def test_rows_of_files_are_more_work_where_ranks_outnumber_cores():
    def work(ranks, cores, crowded):
        machine = only(dump_byte=1e-8, load_byte=1e-8, crowded=crowded)
        given = hosts(ranks=ranks, cores=cores, write_bytes_per_second=1e15, read_bytes_per_second=1e15)
        made = plan(workload(), given, machine)
        return made.dump_work_seconds, made.load_work_seconds, made.dump_seconds

    plain = work(4, 2, 0.0)
    for ranks, cores, factor in ((4, 2, 1.25), (6, 2, 1.5), (2, 2, 1.0), (1, 2, 1.0)):
        expected = work(ranks, cores, 0.0)
        assert work(ranks, cores, 0.25) == pytest.approx([factor * seconds for seconds in expected])
        assert expected[:2] == pytest.approx(plain[:2])


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    later = {"scan_row", "publish_table", "file", "reading", "follow", "follow_table"}
    later |= {"wait", "wait_byte", "round", "round_table", "crowded"}
    values = {name: value for name, value in dataclasses.asdict(REFERENCE).items() if name not in later}
    (tmp_path / "machine.json").write_text(json.dumps(values))
    read = Machine.read(tmp_path / "machine.json")
    assert read == dataclasses.replace(REFERENCE, **{**dict.fromkeys(later, 0.0), "reading": 0.5})


def test_an_increment_has_no_more_rows_than_the_tables():
    few = plan(workload(append_every_seconds=1.0, ids_per_second=1000.0), hosts(), REFERENCE)
    assert few.changed_rows == pytest.approx(1000)
    all_of_them = plan(workload(append_every_seconds=1e9), hosts(), REFERENCE)
    assert all_of_them.changed_rows == 1_000_003
    assert few.freshness_seconds > 1.0 + few.append_seconds + few.follow_seconds


def test_what_breaks_first_comes_first():
    made = plan(workload(ids_per_second=1e12), hosts(), REFERENCE)
    assert made.limits[0].name == "speed of training" and made.limits[0].use > 1
    assert [limit.use for limit in made.limits] == sorted((limit.use for limit in made.limits), reverse=True)
    tiny = plan(workload(ids_per_second=1.0), hosts(memory_bytes=1 << 20), REFERENCE)
    assert tiny.limits[0].name == "memory of a host"
    huge = workload(tables=[planned_table("t", rows=1 << 40, dim=1)])
    uses = {limit.name: limit.use for limit in plan(huge, hosts(hosts=64), REFERENCE).limits}
    assert uses["rows of a table on one rank"] == pytest.approx((1 << 34) / 1.6e9)
    assert uses["rows of a table in a reader"] == 256


def test_costs_are_found_again_and_are_never_negative():
    rng = np.random.default_rng(0)
    counts = rng.uniform(1, 100, (7, 3))
    np.testing.assert_allclose(fitted(counts, counts @ [3e-6, 0.0, 2e-8]), [3e-6, 0.0, 2e-8], atol=1e-12)
    noisy = fitted([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])
    assert (noisy >= 0).all() and noisy.any()


def test_a_machine_is_read_as_it_was_written(tmp_path):
    REFERENCE.write(tmp_path / "machine.json")
    assert Machine.read(tmp_path / "machine.json") == REFERENCE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": -1.0}, "id should be a number of at least 0 but is: -1.0"),
        ({"id": "fast"}, "id should be a number of at least 0 but is: 'fast'"),
        ({"cores": 0}, "cores should be above 0 but is: 0"),
        ({"parallel": 1.5}, "parallel should be between 0 and 1 but is: 1.5"),
        ({"reading": 1.5}, "reading should be between 0 and 1 but is: 1.5"),
        ({"speed": 1.0}, "unexpected keyword argument 'speed'"),
    ],
)
def test_a_wrong_file_of_constants_is_refused_by_name(change, reason, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**dataclasses.asdict(REFERENCE), **change}))
    with pytest.raises(
        ValueError, match="machine.json: should be a file of `embstore plan --measure`"
    ) as refused:
        Machine.read(file)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: workload(tables=[]), "tables should have at least one"),
        (lambda: workload(batch=0), "batch should be an integer of at least 1 but is: 0"),
        (lambda: workload(distinct=1.5), "distinct should be a number between 0 and 1 but is: 1.5"),
        (lambda: workload(ids_per_second=math.nan), "ids_per_second should be a number of at least 0 but is"),
        (lambda: workload(tables=[planned_table("a", rows=1, dim=1)] * 2), "different names but are: a, a"),
        (lambda: planned_table("a", rows=0, dim=1), "rows of table 'a' should be an integer between 1"),
        (
            lambda: planned_table("a", rows=1, dim=1, optimizer="sdg"),
            "optimizer should be one of SGD, .* 'sdg'",
        ),
        (lambda: hosts(hosts=0), "hosts should be an integer of at least 1 but is: 0"),
        (lambda: hosts(cores=1.5), "cores should be an integer of at least 1 but is: 1.5"),
        (lambda: hosts(network_bytes_per_second=0), "network_bytes_per_second should be above 0 but is: 0"),
    ],
)
def test_bad_plans_are_refused_with_the_value(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_what_is_counted_is_what_ranks_observe(tmp_path):
    REFERENCE.write(tmp_path / "machine.json")
    command = ["env", "-C", str(ROOT), sys.executable, "-m", "trust.plan_check", "--short"]
    output = process_groups.run([*command, "--machine", str(tmp_path / "machine.json")], 220)
    assert output.rstrip().endswith("0 predictions are off by too much")
    assert output.count(" sent bytes ") == 1 and output.count(" memory ") == 2


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_machine_is_measured_by_real_runs(tmp_path):
    found = measure(tmp_path, table_bytes=8 << 20)
    assert found.cores >= 1 and found.memory_bytes > 1 << 28 and found.process_bytes > 1 << 25
    assert found.write_bytes_per_second > 0 and found.read_bytes_per_second > 0
    made = plan(workload(), hosts(hosts=2), found)
    assert 0 < made.work_seconds < 10 and made.dump_seconds > 0 and made.load_seconds > 0
