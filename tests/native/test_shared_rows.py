"""Shared rows, and rows that go to the ids that are frequent: modules, copies, restarts."""

import base64
import json

import numpy as np
import pytest
import torch
from native_tables import as_dict
from typer.testing import CliRunner

import embstore
from embstore import Admission, ScoreStrategy
from embstore.checkpoint.converting import convert
from embstore.checkpoint.shared import chosen, combined
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.torch_checkpoint import TablesState
from embstore.cli.commands import app

GOOD = {
    "score_strategy": "lfu",
    "admission": "frequency",
    "shared_rows": 2,
    "optimizer": embstore.Adam(lr=0.1),
}


def batches(steps, n=97, ids=1000, seed=0):
    """Few ids are frequent; every twenty steps others are."""
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy((ids ** rng.random(n)).astype(np.int64) + 31 * (step // 20)) for step in range(steps)
    ]


def train(module, steps):
    for step, ids in enumerate(steps):
        vectors = module(ids)
        gradient = torch.Generator().manual_seed(step)
        vectors.backward(torch.randn(vectors.shape, generator=gradient))


def bits(table):
    shared, counters = table.shared_rows(), table.admission_counters()
    return (
        as_dict(table),
        shared.keys.tobytes() + shared.values.tobytes() + shared.states.tobytes(),
        None if counters is None else counters.tobytes(),
        table.score,
    )


def by_state(table, folder):
    twin = embstore.Table(table.options)
    twin.load_state(table.state())
    return twin


def by_dump(table, folder):
    embstore.dump(folder, {"m": {table.name: table}}, optim=True)
    twin = embstore.Table(table.options)
    embstore.load(folder, {"m": {table.name: twin}}, optim=True)
    return twin


def by_log(table, folder):
    log = embstore.IncrementLog.create(folder, {"m": {table.name: table}})
    table.find_or_insert([])
    log.append({"m": {table.name: table}})
    twin = embstore.Table(table.options)
    embstore.IncrementLog(folder).load({"m": {table.name: twin}})
    return twin


def by_torch(table, folder):
    tables = {"m": {table.name: table}}
    state = TablesState(tables).state_dict()
    twin = embstore.Table(table.options)
    TablesState({"m": {table.name: twin}}).load_state_dict(state)
    return twin


def by_file(table, folder, to):
    folder.mkdir()
    embstore.dump(folder / "d", {"m": {table.name: table}}, optim=True)
    convert(folder / "d", folder / to, to)
    convert(folder / to, folder / "back", "v2")
    twin = embstore.Table(table.options)
    embstore.load(folder / "back", {"m": {table.name: twin}}, optim=True)
    return twin


def by_parquet(table, folder):
    return by_file(table, folder, "parquet")


def by_safetensors(table, folder):
    return by_file(table, folder, "safetensors")


COPIES = [by_state, by_dump, by_log, by_torch, by_parquet, by_safetensors]


@pytest.mark.parametrize("strategy", ["lfu", "importance"])
@pytest.mark.parametrize("capacity", [47, 300, 1500])
def test_the_same_bits_for_any_number_of_threads_and_restarts(tmp_path, strategy, capacity):
    options = embstore.TableOptions(
        name="t",
        dim=5,
        max_capacity=capacity,
        init_capacity=64,
        seed=3,
        **{**GOOD, "score_strategy": strategy},
    )
    steps = batches(60, n=600, ids=5000)
    found = []
    for threads in (1, 2, 4):
        embstore.set_num_threads(threads)
        for restart in (None, by_state, by_dump):
            module = embstore.Embedding(table=embstore.Table(options))
            for part, half in enumerate((steps[:25], steps[25:])):
                if part and restart:
                    module = embstore.Embedding(
                        table=restart(module.table, tmp_path / f"{threads}-{restart.__name__}")
                    )
                train(module, half)
            assert len(module.table) == capacity
            found.append(bits(module.table))
    assert all(one == found[0] for one in found[1:])


@pytest.mark.parametrize("copy", COPIES, ids=lambda f: f.__name__)
def test_every_copy_has_the_shared_rows_and_the_counts(tmp_path, copy):
    module = embstore.Embedding(table=embstore.Table("t", dim=3, max_capacity=50, **GOOD))
    train(module, batches(30))
    twin = copy(module.table, tmp_path / "copy")
    ours, theirs = bits(module.table), bits(twin)
    if copy in (by_parquet, by_safetensors):  # they have no counts
        ours, theirs = ours[:2], theirs[:2]
    assert ours == theirs
    ids = torch.tensor([5_000_000, 1, 5_000_001])
    module.eval()
    restored = embstore.Embedding(table=twin).eval()
    assert torch.equal(module(ids), restored(ids))
    assert module(ids)[0].any() and not torch.equal(module(ids)[0], module(ids)[2])


def test_a_reader_gives_ids_without_a_row_their_shared_row(tmp_path):
    table = embstore.Table("t", dim=3, max_capacity=50, seed=1, **GOOD)
    module, tables = embstore.Embedding(table=table), {"m": {"t": table}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = embstore.serving.Reader(tmp_path / "log", cache=tmp_path / "cache")
    ids = np.array([1, 5_000_000, 5_000_001, -7])
    assert not reader.find("t", ids)[0].any()  # nothing was trained yet
    for part in (batches(20), batches(40)[20:]):
        train(module, part)
        log.append(tables)
        reader.follow()
        np.testing.assert_array_equal(reader.find("t", ids)[0], table.find(ids)[0])
        assert reader.find("t", ids)[0][1:].any(axis=1).all()
    log.compact()
    for path in (
        tmp_path / "log",
        embstore.serving.prepare(tmp_path / "log" / "base-000000000002", tmp_path / "b"),
    ):
        fresh = embstore.serving.Reader(path, cache=tmp_path / "other")
        vectors, found = fresh.find("t", ids)
        np.testing.assert_array_equal(vectors, table.find(ids)[0])
        assert found.tolist() == table.contains(ids).tolist()
    (tmp_path / "b" / "m" / "t.shared").write_bytes(b"x" * (tmp_path / "b" / "m" / "t.shared").stat().st_size)
    with pytest.raises(embstore.CheckpointError, match="t.shared: is damaged"):
        embstore.serving.Reader(tmp_path / "b", cache=tmp_path / "other")


def test_modules_that_may_have_to_evict_keep_frequent_ids_unless_told_otherwise():
    good = (ScoreStrategy.AGED_LFU, Admission.FREQUENCY, 1)

    def ways(module):
        return [
            (t.options.score_strategy, t.options.admission, t.options.shared_rows)
            for t in module.tables.values()
        ]

    plain = (ScoreStrategy.TIMESTAMP, Admission.ALL, 0)
    assert ways(embstore.Embedding(4, max_capacity=100)) == [good]
    assert ways(embstore.EmbeddingBag(4, max_capacity=100, eviction_log="keys")) == [good]
    assert ways(embstore.Embedding(4)) == [plain]
    assert ways(embstore.Embedding(4, max_capacity=100, score_strategy="timestamp")) == [plain]
    assert ways(embstore.Embedding(4, max_capacity=100, device_rows=64)) == [plain]
    assert ways(embstore.Embedding(4, max_capacity=100, admission_threshold=2)) == [plain]
    tables = [
        embstore.TableOptions(name="a", dim=2, max_capacity=100),
        embstore.TableOptions(name="b", dim=2),
        embstore.TableOptions(name="c", dim=2, max_capacity=100, score_strategy="step"),
    ]
    step = (ScoreStrategy.STEP, Admission.ALL, 0)
    assert ways(embstore.EmbeddingCollection(tables)) == [good, plain, step]


def test_a_table_with_room_is_as_if_it_had_no_shared_row():
    steps = batches(10)
    found = []
    for options in ({}, {"max_capacity": 5000}):
        module = embstore.Embedding(4, seed=3, optimizer=embstore.Adagrad(lr=0.1), **options)
        train(module, steps)
        rows = module.table.rows()
        found.append((rows.keys.tobytes(), rows.values.tobytes(), rows.states.tobytes()))
        assert not module.eval()(torch.tensor([9_999_999])).any()
    assert found[0] == found[1]


def test_a_crowded_table_hardly_evicts_once_it_knows_the_frequent_ids():
    def evictions(**options):
        module = embstore.Embedding(4, seed=3, max_capacity=100, **options)
        rng = np.random.default_rng(0)
        steps = [torch.from_numpy((2000 ** rng.random(300)).astype(np.int64)) for _ in range(60)]
        train(module, steps[:30])
        before = module.table.stats().evictions
        train(module, steps[30:])
        hits = module.table.stats().hits
        return module.table.stats().evictions - before, hits

    good, plain = evictions(), evictions(score_strategy="timestamp")
    assert good[0] < plain[0] / 10 and good[1] > plain[1]


def test_ids_of_the_same_frequency_do_not_take_turns():
    table = embstore.Embedding(4, max_capacity=1).table
    for _ in range(50):
        table.find_or_insert([1])
        table.find_or_insert([2])
    assert table.stats().evictions == 0 and table.contains([1]).all()
    table.find_or_insert([2] * 10)
    assert table.contains([2]).all()


@pytest.mark.parametrize("later", [False, True])
def test_gradients_that_wait_for_a_step_reach_the_shared_row(later):
    module = embstore.Embedding(
        3, max_capacity=1, shared_rows=1, score_strategy="lfu", admission="frequency",
        initializer=embstore.Constant(1.0), optimizer=embstore.SGD(lr=1.0), update_in_backward=not later,
    )  # fmt: skip
    module(torch.tensor([1, 1, 1]))
    module(torch.tensor([7, 1, 8, 7])).sum().backward()
    if later:
        module.step()
    assert module.table.shared_rows().values.tolist() == [[-2.0] * 3]
    assert module.table.find([1])[0].tolist() == [[0.0] * 3]


def test_a_gradient_of_the_shared_row_stays_there_when_its_id_gets_a_row_before_the_step():
    module = embstore.Embedding(
        3, max_capacity=1, initializer=embstore.Constant(1.0), optimizer=embstore.SGD(lr=1.0),
        update_in_backward=False,
    )  # fmt: skip
    module(torch.tensor([1, 1]))
    first = module(torch.tensor([7, 8]))
    first.sum().backward()
    del first
    module(torch.tensor([7, 7])).sum().backward()  # more frequent than 1 now
    assert module.table.contains([7]).all()
    module.step()
    assert module.table.shared_rows().values.tolist() == [[-1.0] * 3]
    assert module.table.find([7])[0].tolist() == [[-1.0] * 3]
    assert module.table.optimizer_step == 1


def test_a_module_starts_rows_from_initial_values_unless_told_otherwise():
    def first_row_of_two(**options):
        module = embstore.Embedding(
            3, max_capacity=1, initializer=embstore.Constant(1.0), optimizer=embstore.SGD(lr=1.0), **options
        )
        module(torch.tensor([1, 1, 1]))
        module(torch.tensor([2])).sum().backward()  # trains the shared row
        module(torch.tensor([2, 2, 2]))
        assert module.table.contains([2]).all()
        return module.table.find([2])[0].tolist()

    asked = {"score_strategy": "lfu", "admission": "frequency", "shared_rows": 1}
    assert first_row_of_two() == first_row_of_two(start_from_shared=False) == [[1.0] * 3]
    assert first_row_of_two(start_from_shared=True) == first_row_of_two(**asked) == [[0.0] * 3]


def test_a_half_life_alone_keeps_the_default_of_a_module():
    options = embstore.Embedding(3, max_capacity=10, half_life=7).table.options
    assert (options.score_strategy, options.admission) == (ScoreStrategy.AGED_LFU, Admission.FREQUENCY)
    assert (options.half_life, options.shared_rows) == (7, 1)
    assert embstore.TableOptions(name="t", dim=3, half_life=7).score_strategy == ScoreStrategy.AGED_LFU


def test_small_tables_hold_exactly_as_many_rows_as_they_may():
    for capacity in (1, 7, 47, 84, 129):
        table = embstore.Table("t", dim=2, max_capacity=capacity)
        table.find_or_insert(np.arange(capacity))
        assert len(table) == capacity and table.contains(np.arange(capacity)).all()
        table.find_or_insert([1000])
        assert len(table) == capacity and table.contains([1000]).all()


def rows(numbers, value):
    n = len(numbers)
    return embstore.Rows(
        np.array(numbers, np.int64), np.full((n, 2), value, np.float32), np.full((n, 1), value, np.float32),
        np.zeros(n, np.uint64),
    )  # fmt: skip


def test_another_number_of_ranks_takes_the_mean_of_copies_and_each_row_of_one_owner():
    def spec(n):
        options = {"score_strategy": "step", "shared_rows": n}
        return TableSpec.of(embstore.Table("t", dim=2, optimizer=embstore.SGD(), **options))

    copies = [rows([0], 1.0), rows([0], 3.0)]
    assert chosen(spec(1), copies, spec(1), 1, 2, True).values.tolist() == [[3.0, 3.0]]
    assert chosen(spec(1), copies, spec(1), 0, 1, False).values.tolist() == [[2.0, 2.0]]
    owned = [rows([0], 1.0), rows([1], 3.0)]
    assert combined(owned).values.tolist() == [[1.0, 1.0], [3.0, 3.0]]
    both = [rows([0, 1], 5.0)]
    assert [chosen(spec(2), both, spec(2), rank, 2, False).keys.tolist() for rank in (0, 1)] == [[0], [1]]
    fewer = chosen(spec(2), owned, spec(3), 0, 1, True)
    assert fewer.keys.tolist() == [0, 1, 2] and (fewer.values == 2.0).all()


def test_shared_rows_of_a_file_that_do_not_fit_are_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    table = embstore.Table("t", dim=3, max_capacity=50, **GOOD)
    train(embstore.Embedding(table=table), batches(5))
    embstore.dump(tmp_path / "d", {"m": {"t": table}}, optim=True)
    convert(tmp_path / "d", tmp_path / "s", "safetensors")
    file = tmp_path / "s" / "m" / "t.safetensors"
    arrays, spec = load_file(file), json.dumps(TableSpec.of(table).to_dict())
    record = (5).to_bytes(8, "little") + bytes(4 * 9)
    for shared, why in (
        ("?", "its shared rows cannot be read"),
        ("AAAA", "expected shared rows of 44 bytes each, found 3 bytes"),
        (base64.b64encode(record).decode(), "numbers below 2, each once"),
        (base64.b64encode(bytes(2 * len(record))).decode(), "numbers below 2, each once"),
    ):
        save_file(arrays, file, metadata={"embstore": spec, "embstore_shared": shared})
        with pytest.raises(embstore.CheckpointError, match=f"t.safetensors: .*{why}"):
            convert(tmp_path / "s", tmp_path / "back", "v2")
        assert not (tmp_path / "back").exists()


def test_metadata_of_others_in_a_parquet_file_need_not_be_text(tmp_path):
    import pyarrow.parquet

    table = embstore.Table("t", dim=3, max_capacity=50, **GOOD)
    train(embstore.Embedding(table=table), batches(5))
    found = table.to_arrow()
    (tmp_path / "p" / "m").mkdir(parents=True)
    marked = found.replace_schema_metadata({**found.schema.metadata, b"other": b"\xff\xfe"})
    pyarrow.parquet.write_table(marked, tmp_path / "p" / "m" / "t.parquet")
    convert(tmp_path / "p", tmp_path / "back", "v2")
    twin = embstore.Table(table.options)
    embstore.load(tmp_path / "back", {"m": {"t": twin}})
    assert as_dict(twin).keys() == as_dict(table).keys()


def test_files_without_a_place_for_shared_rows_say_so(tmp_path):
    table = embstore.Table("t", dim=3, max_capacity=50, **GOOD)
    train(embstore.Embedding(table=table), batches(5))
    embstore.dump(tmp_path / "d", {"m": {"t": table}}, optim=True)
    for to in ("sok", "one_embedding"):
        with pytest.warns(UserWarning, match=f"files of {to} have no place for the shared rows of m/t"):
            convert(tmp_path / "d", tmp_path / to, to)


def test_the_command_line_shows_and_compares_shared_rows(tmp_path):
    module = embstore.Embedding(table=embstore.Table("t", dim=3, max_capacity=50, **GOOD))
    tables = {"m": {"t": module.table}}
    train(module, batches(30))
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    embstore.dump(tmp_path / "before", tables)
    shared = module.table.shared_rows()
    changed = shared.values + [[1], [0]]
    module.table.assign_shared_rows(shared.keys, changed.astype(np.float32), shared.states)
    log.append(tables)
    embstore.dump(tmp_path / "after", tables)

    def command(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    assert "rows       50 and 2 shared" in command("inspect", tmp_path / "log").stdout
    assert command("diff", tmp_path / "log", tmp_path / "after").exit_code == 0
    found = command("diff", tmp_path / "before", tmp_path / "after")
    assert found.exit_code == 1 and "shared rows differ  1 row" in found.stdout


def test_a_dump_with_shared_rows_warns_where_the_table_has_none(tmp_path):
    table = embstore.Table("t", dim=2, max_capacity=1, **GOOD)
    table.find_or_insert([1, 2, 3])
    embstore.dump(tmp_path / "d", {"m": {"t": table}})
    other = embstore.Table("t", dim=2, max_capacity=1, score_strategy="lfu", half_life=5)
    with pytest.warns(UserWarning, match="shared rows of .* are not loaded"):
        embstore.load(tmp_path / "d", {"m": {"t": other}})
    assert other.contains([1]).all()


ERRORS = [
    ({"shared_rows": -1}, "shared_rows should be between 0 and 65536 but is: -1"),
    ({"shared_rows": 1.5}, "shared_rows should be an integer"),
    ({"half_life": -1}, "half_life should be at least 0 but is: -1"),
    ({"half_life": 3, "score_strategy": "step"}, "unless score_strategy is 'lfu' or 'importance' but is: 3"),
    ({"admission": "frequency"}, "only with score_strategy 'lfu' or 'importance' but that is: 'timestamp'"),
    ({"admission": "rare"}, "admission should be one of 'all', 'frequency' but is: 'rare'"),
    ({**GOOD, "admission_threshold": 2}, "should be .all. beside an admission_threshold, which is: 2"),
    ({"start_from_shared": 1}, "start_from_shared should be True or False but is: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_options_that_cannot_work_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        embstore.TableOptions(name="t", dim=2, **options)


def test_a_store_keeps_every_row_so_none_is_refused_for_its_frequency():
    with pytest.raises(ValueError, match="admission of table 't' should be 'all' over a store"):
        embstore.Table(
            "t", dim=2, store=embstore.stores.MemoryStore(8), score_strategy="lfu", admission="frequency"
        )
