"""Readers answer as the trained tables do, state by state, and stop at damage."""

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import embstore
from embstore.serving import Reader, bases, prepare
from embstore.serving import reader as reader_module

KEYS = np.array([0, -1, 7, 2**63 - 1, -(2**63), *range(100, 1123)], np.int64)


def table(name="user", dim=8, **options):
    return embstore.Table(name, dim=dim, optimizer=embstore.SGD(lr=0.5), score_strategy="step", **options)


def trained(name="user", dim=8, keys=KEYS, **options):
    made = table(name, dim, **options)
    made.find_or_insert(keys)
    made.apply_gradients(keys, np.random.default_rng(3).normal(size=(len(keys), dim)).astype(np.float32))
    return made


def equal(reader, made, ids=KEYS, name="user"):
    vectors, found = reader.find(name, ids)
    expected, there = made.find(ids)
    np.testing.assert_array_equal(found, there)
    np.testing.assert_array_equal(vectors, expected)
    assert reader.state.rows(name) == len(made)


@pytest.mark.parametrize("layout", ["v1a", "v2"])
@pytest.mark.parametrize("optim", [False, True])
def test_a_reader_of_a_dump_answers_as_the_table(tmp_path, layout, optim):
    user, item = trained(), trained("item", dim=3, keys=KEYS[:97])
    embstore.dump(tmp_path / "d", {"a": {"user": user}, "b": {"item": item}}, layout=layout, optim=optim)
    for _ in range(2):  # the second time from the cache
        reader = Reader(tmp_path / "d", cache=tmp_path / "cache")
        equal(reader, user, np.concatenate([KEYS, [5, 6, -2]]))
        equal(reader, item, KEYS, "item")
        equal(reader, user, KEYS, "a/user")


def test_vectors_come_back_in_the_kind_and_shape_of_the_ids(tmp_path):
    torch = pytest.importorskip("torch")
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}})
    reader = Reader(tmp_path / "d", cache=tmp_path / "cache")
    vectors, found = reader.find("user", torch.tensor([[7, -1], [3, 0]]))
    assert vectors.shape == (2, 2, 8) and found.tolist() == [[True, True], [False, True]]
    np.testing.assert_array_equal(vectors[0, 1].numpy(), user.find([-1])[0][0])
    assert reader.find("user", [])[0].shape == (0, 8)


def test_bags_are_summed_as_in_training(tmp_path):
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}})
    state = Reader(tmp_path / "d", cache=tmp_path / "cache").state
    ids, offsets = KEYS[:300], np.array([0, 0, 7, 97, 300])
    weights = np.random.default_rng(1).normal(size=300).astype(np.float32)
    vectors = user.find(ids)[0]
    for mode in ("sum", "mean"):
        for w in (None, weights):
            bags = state.bags("user", ids, offsets, weights=w, mode=mode)
            for b in range(4):
                part = slice(offsets[b], offsets[b + 1])
                scaled = vectors[part] * (1 if w is None else w[part, None])
                expected = scaled.sum(0) / (max(len(scaled), 1) if mode == "mean" else 1)
                np.testing.assert_allclose(bags[b], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rise from 0 to the number of keys, 300"):
        state.bags("user", ids, [0, 5])


def test_a_missing_id_reads_zero_or_its_initial_vector(tmp_path):
    made = trained(dtype="bfloat16", initializer=embstore.Uniform(-0.5, 0.5), seed=11)
    embstore.dump(tmp_path / "d", {"a": {"user": made}})
    ids = [1, 2, 3]
    assert not Reader(tmp_path / "d", cache=tmp_path / "c").find("user", ids)[0].any()
    initial = Reader(tmp_path / "d", missing="initial", cache=tmp_path / "c").find("user", ids)[0]
    np.testing.assert_array_equal(initial, made.initial_values(ids))


@pytest.mark.parametrize("dtype, error", [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 1 / 254)])
def test_rows_of_other_dtypes_are_as_close_as_promised_also_after_increments(tmp_path, dtype, error):
    user = trained(dim=5)
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = Reader(tmp_path / "log", dtype=dtype, cache=tmp_path / "cache")
    for _ in range(2):
        vectors, found = reader.find("user", KEYS)
        exact = user.find(KEYS)[0]
        spread = np.abs(exact).max(1, keepdims=True) * (2 if dtype == "int8" else 1)
        assert found.all() and np.all(np.abs(vectors - exact) <= error * spread + 1e-7)
        user.apply_gradients(KEYS[::3], np.ones((len(KEYS[::3]), 5), np.float32))
        log.append(tables)
        assert reader.follow() != []


def test_a_prepared_base_needs_no_dump(tmp_path):
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}}, layout="v2", optim=True)
    prepare(tmp_path / "d", tmp_path / "base", dtype="float32")
    prepare(tmp_path / "d", tmp_path / "small", dtype="int8")
    with pytest.raises(FileExistsError):
        prepare(tmp_path / "d", tmp_path / "base")
    shutil.rmtree(tmp_path / "d")
    equal(Reader(tmp_path / "base"), user)
    vectors = Reader(tmp_path / "small").find("user", KEYS)[0]
    assert np.abs(vectors - user.find(KEYS)[0]).max() < 0.02
    for file in ("user.rows", "user.index"):
        path = tmp_path / "base" / "a" / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(embstore.CheckpointError, match=file):
            Reader(tmp_path / "base")
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def follow_and_compare(reader, tables, log, rounds=6):
    rng = np.random.default_rng(0)
    user, item = tables["a"]["user"], tables["a"]["item"]
    for number in range(1, rounds + 1):
        changed = rng.choice(2000, 300, replace=False)
        user.find_or_insert(changed)
        user.apply_gradients(changed, rng.normal(size=(300, 8)).astype(np.float32))
        user.erase(rng.choice(2000, 40))
        item.erase(rng.choice(KEYS, 3))
        before = reader.state
        kept = before.find("user", KEYS)[0]
        assert log.append(tables) == number
        if number == 4:
            log.compact()
        assert reader.follow() == [number] and reader.state.number == number
        equal(reader, user, np.arange(-10, 2010))
        equal(reader, item, KEYS, "item")
        np.testing.assert_array_equal(before.find("user", KEYS)[0], kept)  # an old state stays


def test_a_reader_follows_a_log_through_deletions_and_compaction(tmp_path):
    tables = {"a": {"user": trained(), "item": trained("item")}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = Reader(tmp_path / "log", cache=tmp_path / "cache")
    assert reader.follow() == []
    follow_and_compare(reader, tables, log)
    assert reader.state.base == 4
    equal(Reader(tmp_path / "log", cache=tmp_path / "cache"), tables["a"]["user"], np.arange(2000))


def test_a_reader_that_is_far_behind_starts_from_the_new_base(tmp_path):
    user = trained()
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = Reader(tmp_path / "log", cache=tmp_path / "cache")
    for key in range(5):
        user.find_or_insert([5000 + key])
        log.append(tables)
    log.compact()
    user.erase([5000])
    log.append(tables)
    assert reader.follow() == [1, 2, 3, 4, 5, 6]
    equal(reader, user, np.arange(4990, 5010))


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["user_keys", "user_values", "user_removed", "embstore.json"])
def test_a_damaged_increment_stops_the_reader_until_it_is_mended(tmp_path, file):
    user = trained()
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    with Reader(tmp_path / "log", cache=tmp_path / "cache") as reader:
        before = user.rows()
        user.erase([7])
        user.find_or_insert([31])
        log.append(tables)
        victim = tmp_path / "log" / "increment-000000000001" / "a" / file
        good = victim.read_bytes()
        damage(victim)
        for _ in range(2):
            with pytest.raises(embstore.CheckpointError, match=file):
                reader.follow()
            assert reader.state.number == 0 and reader.state.rows("user") == len(before)
            assert reader.find("user", [7, 31])[1].tolist() == [True, False]
        reader.start(0.01)
        wait_until(lambda: reader.error is not None)
        victim.write_bytes(good)
        wait_until(lambda: reader.state.number == 1 and reader.error is None)
        equal(reader, user)


def wait_until(condition, seconds=20.0):
    event = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("did not come true in time")


def test_a_missing_increment_stops_the_reader(tmp_path):
    user = trained()
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    reader = Reader(tmp_path / "log", cache=tmp_path / "cache")
    for key in (31, 32, 33):
        user.find_or_insert([key])
        log.append(tables)
    hidden = tmp_path / "log" / "increment-000000000002"
    hidden.rename(tmp_path / "elsewhere")
    with pytest.raises(embstore.CheckpointError, match="increment-000000000002"):
        reader.follow()
    assert reader.state.number == 0
    (tmp_path / "elsewhere").rename(hidden)
    assert reader.follow() == [1, 2, 3]
    equal(reader, user)


def test_a_damaged_cache_is_made_again(tmp_path):
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}})
    Reader(tmp_path / "d", cache=tmp_path / "cache")
    for file in list((tmp_path / "cache").rglob("*.index")) + list(
        (tmp_path / "cache").rglob("serving.json")
    ):
        damage(file)
        equal(Reader(tmp_path / "d", cache=tmp_path / "cache"), user)


def test_a_dump_that_changed_since_it_was_indexed_is_verified_again(tmp_path):
    embstore.dump(tmp_path / "d", {"a": {"user": trained()}})
    Reader(tmp_path / "d", cache=tmp_path / "cache")
    damage(tmp_path / "d" / "a" / "user_values")
    with pytest.raises(embstore.CheckpointError, match="user_values"):
        Reader(tmp_path / "d", cache=tmp_path / "cache")


def test_what_cannot_be_verified_is_refused(tmp_path):
    embstore.dump(tmp_path / "d", {"a": {"user": trained()}})
    (tmp_path / "d" / "a" / "embstore.json").unlink()
    with pytest.raises(embstore.CheckpointError, match="manifest"):
        Reader(tmp_path / "d", cache=tmp_path / "cache")
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path / "nothing", cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="dtype should be one of 'float32'"):
        Reader(tmp_path / "d", dtype="int4")
    with pytest.raises(ValueError, match="missing should be"):
        Reader(tmp_path / "d", missing="noise")


def test_an_unknown_table_is_named(tmp_path):
    embstore.dump(tmp_path / "d", {"a": {"user": trained()}})
    reader = Reader(tmp_path / "d", cache=tmp_path / "cache")
    with pytest.raises(KeyError, match="table should be one of a/user, user but is: 'item'"):
        reader.find("item", [1])
    with pytest.raises(TypeError, match="ids should be integers"):
        reader.find("user", [0.5])


WORKER = """
import sys, numpy as np
from embstore.serving import Reader
reader = Reader(sys.argv[1], cache=sys.argv[2])
print(reader.find("user", np.arange(100, 110))[0].tobytes().hex())
"""


def test_several_processes_open_one_dump_at_once(tmp_path):
    user = trained()
    embstore.dump(tmp_path / "d", {"a": {"user": user}})
    command = [sys.executable, "-c", WORKER, os.fspath(tmp_path / "d"), os.fspath(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {worker.communicate(timeout=100)[0].strip() for worker in workers}
    assert answers == {user.find(np.arange(100, 110))[0].tobytes().hex()}


def test_lookups_beside_a_follower_see_whole_states_only(tmp_path):
    """Every row of both tables carries the number of its state in all components."""
    keys = np.arange(500)

    def fill(made, number):
        made.insert_or_assign(keys, np.full((500, 8), float(number), np.float32))

    tables = {"a": {"user": table(), "item": table("item")}}
    for made in tables["a"].values():
        fill(made, 0)
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    failures = []
    done = threading.Event()
    with Reader(tmp_path / "log", cache=tmp_path / "cache") as reader:

        def look():
            while not done.is_set():
                answer = reader.lookup({"user": keys, "item": keys[::-1].copy()})
                values = np.unique(np.concatenate([answer["user"], answer["item"]]))
                if len(values) != 1:
                    failures.append(values)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        reader.start(0.001)
        for number in range(1, 16):
            for made in tables["a"].values():
                fill(made, number)
            log.append(tables)
            if number % 5 == 0:
                log.compact()
        wait_until(lambda: reader.state.number == 15)
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert reader.error is None


def test_compaction_may_take_a_base_away_while_a_reader_opens_it(tmp_path, monkeypatch):
    user = trained()
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)

    def more():
        user.apply_gradients(KEYS, np.ones((len(KEYS), 8), np.float32))
        log.append(tables)
        log.compact()

    opened, compactions = [], 3

    def cached_base(dump, *others):
        opened.append(dump.path.name)
        if len(opened) <= compactions:
            more()
            more()  # the base before the newest stays
            assert not dump.path.exists()
        return bases.cached_base(dump, *others)

    monkeypatch.setattr(reader_module, "cached_base", cached_base)
    reader = Reader(tmp_path / "log", cache=tmp_path / "cache")
    assert opened == [f"base-{number:012d}" for number in (0, 2, 4, 6)]
    equal(reader, user)
    opened.clear()
    more()
    assert reader.follow() == [7, 8, 9, 10, 11, 12, 13] and len(opened) == 4
    equal(reader, user)


def test_an_operator_is_told_once_that_a_reader_is_stuck_and_that_it_goes_on(tmp_path, caplog):
    user = trained()
    tables = {"a": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    caplog.set_level("INFO", "embstore.serving")
    with Reader(tmp_path / "log", cache=tmp_path / "cache") as reader:
        user.erase([7])
        log.append(tables)
        victim = tmp_path / "log" / "increment-000000000001" / "a" / "user_removed"
        good = victim.read_bytes()
        damage(victim)
        reader.start(0.005)
        wait_until(lambda: reader.error is not None)
        threading.Event().wait(0.1)  # many rounds
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "stays at state 0" in caplog.text and "user_removed" in caplog.text
        victim.write_bytes(good)
        wait_until(lambda: reader.error is None)
        wait_until(lambda: "follows again, at state 1" in caplog.text)


def test_an_operator_is_told_of_an_old_state_and_of_a_reader_that_falls_behind(tmp_path, caplog, monkeypatch):
    from embstore.serving import watching

    log = embstore.IncrementLog.create(tmp_path / "log", {"a": {"user": trained()}})
    with Reader(log.path, cache=tmp_path / "cache") as reader:
        with pytest.raises(ValueError, match="warn_age_seconds should be above 0 but is: 0"):
            reader.start(warn_age_seconds=0)
        reader.start(0.005, warn_age_seconds=0.05)
        wait_until(lambda: "is the trainer still appending?" in caplog.text)
        threading.Event().wait(0.1)
        assert len(caplog.records) == 1
    caplog.clear()
    watch = watching.Watch(None)
    for news in (0, 1, 0, 0, 2, 1, 1, 2, 3, 4, 5):
        watch.followed(9, news)
    assert caplog.records == []
    watch.followed(9, 6)
    assert "falls behind: 6 increments came while the last 5 were applied" in caplog.text
    caplog.clear()
    times = iter([0.0, 1.0, 59.0, 61.0])
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(times))
    for _ in range(4):  # again once a minute
        watch.failed(9, OSError("gone"))
    assert [r.getMessage() for r in caplog.records] == [
        "stays at state 9, for 0 s so far: gone",
        "stays at state 9, for 61 s so far: gone",
    ]
