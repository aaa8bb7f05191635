"""Dumps: the bytes, what comes back, what is refused, and a writer that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok
from embstore.checkpoint.errors import CheckpointError
from embstore.formats.sok import DumpReader, DumpWriter, file_prefix

BLANK_256, BLANK_32 = b" " * 256, b" " * 32


def trained(optimizer=None, name="user", kind="hybrid"):
    if kind == "static":
        variable = sok.Variable(np.arange(6, dtype=np.float32).reshape(3, 2), name=name)
    else:
        variable = sok.DynamicVariable(dimension=2, name=name, var_type=kind, initializer="ones")
    wrapper = sok.OptimizerWrapper(optimizer or tf.keras.optimizers.Adam(0.5))
    gradient = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([2, 1], tf.int64))
    if kind != "static":
        tf.nn.embedding_lookup(variable, [2, 1])
    wrapper.apply_gradients([(gradient, variable)])
    return variable, wrapper


def test_the_bytes_are_those_of_the_original(tmp_path):
    variable, wrapper = trained()
    sok.dump(tmp_path / "weights", variable, wrapper)
    files = {p.name: p.read_bytes() for p in (tmp_path / "weights").iterdir()}
    assert sorted(files) == ["manifest.json", "user_0-Adam-m", "user_0-Adam-v", "user_0-key", "user_0-weight"]
    assert files["user_0-key"] == (
        BLANK_256 + b"\0\0\0\0" + BLANK_32 + b"\0\0\0\1" + np.array([1, 2], "<i8").tobytes()
    )
    values = sok.export(variable)[1].numpy()
    assert files["user_0-weight"] == (
        BLANK_256 + b"\0\0\0\1" + BLANK_32 + b"\0\0\0\5" + values.astype("<f4").tobytes()
    )
    m = np.full((2, 2), 0.1, np.float32)
    header = BLANK_256 + b"\0\0\0\2" + b" " * 31 + b"m" + b"\0\0\0\5"
    assert files["user_0-Adam-m"][:296] == header
    np.testing.assert_allclose(np.frombuffer(files["user_0-Adam-m"][296:], "<f4"), m.ravel(), rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "options", "states"),
    [
        ("SGD", {}, []),
        ("SGD", {"momentum": 0.9}, ["momentum"]),
        ("Adagrad", {}, ["accumulator"]),
        ("Adam", {}, ["m", "v"]),
        ("Adamax", {}, ["m", "v"]),
        ("Adadelta", {}, ["accum_grad", "accum_var"]),
        ("Ftrl", {}, ["accumulator", "linear"]),
    ],
)
@pytest.mark.parametrize("kind", ["static", "hybrid"])
def test_every_state_has_its_file_and_its_header(tmp_path, kind, optimizer, options, states):
    variable, wrapper = trained(getattr(tf.keras.optimizers, optimizer)(0.5, **options), kind=kind)
    sok.dump(tmp_path / "w", variable, wrapper)
    names = {path.name for path in (tmp_path / "w").glob(f"user_0-{optimizer}-*")}
    assert names == {f"user_0-{optimizer}-{state}" for state in states}
    for state in states:
        data = (tmp_path / "w" / f"user_0-{optimizer}-{state}").read_bytes()
        assert data[:296] == BLANK_256 + b"\0\0\0\2" + state.encode().rjust(32) + b"\0\0\0\5"
        found = wrapper.get_slot(variable, state)
        found = found if kind == "static" else sok.export(found)[1]
        assert data[296:] == np.asarray(found, "<f4").tobytes()


@pytest.mark.parametrize(
    ("kind", "mode", "code", "dtype"),
    [("static", None, 1, "<i8"), ("static", "localized:0", 3, "<u8"), ("hbm", None, 0, "<i4")],
)
def test_the_type_of_the_keys_says_what_kind_of_variable_it_was(tmp_path, kind, mode, code, dtype):
    if kind == "static":
        variable = sok.Variable(np.ones((3, 2), np.float32), mode=mode, name="t")
    else:
        variable = sok.DynamicVariable(dimension=2, var_type=kind, key_type=tf.int32, name="t")
        sok.assign(variable, [0, 1, 2], np.ones((3, 2)))
    sok.dump(tmp_path / "w", [variable])
    data = (tmp_path / "w" / "t_0-key").read_bytes()
    assert data[292:296] == code.to_bytes(4, "big")
    np.testing.assert_array_equal(np.frombuffer(data[296:], dtype), [0, 1, 2])


@pytest.mark.parametrize("kind", ["hybrid", "hbm", "static"])
def test_rows_states_and_the_count_of_updates_come_back_and_training_goes_on_alike(tmp_path, kind):
    variable, wrapper = trained(kind=kind)
    sok.dump(tmp_path / "w", [variable], [wrapper])
    if kind == "static":
        copy = sok.Variable(np.zeros((3, 2), np.float32), name="user")
    else:
        copy = sok.DynamicVariable(dimension=2, name="user", var_type=kind)
        sok.assign(copy, [1, 77], np.zeros((2, 2)))
    again = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.5))
    sok.load(tmp_path / "w", [copy], again)
    for v, w in ((variable, wrapper), (copy, again)):
        w.apply_gradients([(tf.IndexedSlices(tf.ones((2, 2)), tf.constant([2, 1], tf.int64)), v)])
    keys, values = (part.numpy() for part in sok.export(copy))
    expected = dict(zip(sok.export(variable)[0].numpy().tolist(), sok.export(variable)[1].numpy()))
    if kind != "static":
        expected[77] = np.zeros(2)  # what was there stays
    assert keys.tolist() == sorted(expected)
    for key, row in zip(keys.tolist(), values):
        np.testing.assert_array_equal(row, expected[key])


def test_a_key_without_states_gets_fresh_ones(tmp_path):
    variable = sok.DynamicVariable(dimension=2, name="user")
    sok.assign(variable, [1, 2], np.ones((2, 2)))  # never trained
    sok.dump(tmp_path / "w", variable)
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25))
    copy = sok.DynamicVariable(dimension=2, name="user")
    sok.load(tmp_path / "w", copy, wrapper)
    np.testing.assert_array_equal(sok.export(wrapper.get_slot(copy, "accumulator"))[1], np.full((2, 2), 0.25))


def test_an_empty_variable_makes_a_dump(tmp_path):
    variable = sok.DynamicVariable(dimension=3, name="user")
    sok.dump(tmp_path / "w", variable, sok.OptimizerWrapper(tf.keras.optimizers.Adam()))
    assert (tmp_path / "w" / "user_0-weight").stat().st_size == 296
    sok.load(tmp_path / "w", variable)
    assert int(variable.size[0]) == 0


def test_files_of_the_original_load_without_a_manifest_and_with_adamax_as_adam(tmp_path):
    variable, wrapper = trained(tf.keras.optimizers.Adamax(0.5))
    sok.dump(tmp_path / "w", variable, wrapper)
    (tmp_path / "w" / "manifest.json").unlink()
    for slot in "mv":
        os.rename(tmp_path / "w" / f"user_0-Adamax-{slot}", tmp_path / "w" / f"user_0-Adam-{slot}")
    copy = sok.DynamicVariable(dimension=2, name="user")
    again = sok.OptimizerWrapper(tf.keras.optimizers.Adamax(0.5))
    sok.load(tmp_path / "w", copy, again)
    np.testing.assert_array_equal(
        sok.export(again.get_slot(copy, "v"))[1], sok.export(wrapper.get_slot(variable, "v"))[1]
    )


@pytest.mark.parametrize("manifest", [True, False], ids=["with manifest", "without"])
@pytest.mark.parametrize(
    "damage", ["cut weight", "cut key", "no weight", "short header", "wrong kind", "cut state", "flipped bit"]
)
def test_a_damaged_dump_is_refused_and_nothing_changes(tmp_path, damage, manifest):
    variable, wrapper = trained()
    directory = tmp_path / "w"
    sok.dump(directory, variable, wrapper)
    if not manifest:
        (directory / "manifest.json").unlink()
    weight = directory / "user_0-weight"
    data = bytearray(weight.read_bytes())
    if damage == "cut weight":
        weight.write_bytes(data[:-4])
    elif damage == "cut key":
        (directory / "user_0-key").write_bytes((directory / "user_0-key").read_bytes()[:-3])
    elif damage == "no weight":
        weight.unlink()
    elif damage == "short header":
        weight.write_bytes(data[:100])
    elif damage == "wrong kind":
        weight.write_bytes(data[:259] + b"\2" + data[260:])
    elif damage == "cut state":
        (directory / "user_0-Adam-m").write_bytes((directory / "user_0-Adam-m").read_bytes()[:-8])
    elif not manifest:
        return  # only a checksum can tell
    else:
        data[300] ^= 1
        weight.write_bytes(data)
    copy = sok.DynamicVariable(dimension=2, name="user")
    with pytest.raises(CheckpointError, match="user_0-"):
        sok.load(directory, copy, sok.OptimizerWrapper(tf.keras.optimizers.Adam()))
    assert int(copy.size[0]) == 0


def test_a_dump_that_does_not_fit_is_refused(tmp_path):
    variable, _ = trained()
    sok.dump(tmp_path / "w", variable)
    with pytest.raises(ValueError, match="dimension"):
        sok.load(tmp_path / "w", sok.DynamicVariable(dimension=3, name="user"))
    with pytest.raises(ValueError, match="no row for key 2 of the dump: it has 2 rows"):
        sok.load(tmp_path / "w", sok.Variable(np.ones((2, 2), np.float32), name="user"))
    with pytest.raises(CheckpointError, match="other_0-key"):
        sok.load(tmp_path / "w", sok.DynamicVariable(dimension=2, name="other"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        sok.load(tmp_path / "nothing", variable)
    with pytest.raises(ValueError, match="sok variables"):
        sok.dump(tmp_path / "w", tf.Variable([1.0]))
    with pytest.raises(ValueError, match="OptimizerWrapper"):
        sok.dump(tmp_path / "w", variable, tf.keras.optimizers.SGD())


PLAIN = [
    (family, name, options)
    for family in (tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy)
    for name, options in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("Adam", {}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("Ftrl", {}),
    )
]


@pytest.mark.parametrize(
    ("family", "name", "options"), PLAIN, ids=[f"{f.__name__} {n} {len(o)}" for f, n, o in PLAIN]
)
def test_a_plain_optimizer_of_static_variables_is_dumped_under_the_names_of_the_wrapper(
    tmp_path, family, name, options
):
    """Trained, dumped and loaded into a new variable and optimizer: the next step moves both alike."""
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    gradients = np.random.default_rng(1).normal(size=(3, 5, 3)).astype(np.float32)

    def fresh(start, mode):
        return [sok.Variable(start, name=n, mode=m) for n, m in (("a", None), ("b", mode))] + [
            tf.Variable(start[:1], name="dense")
        ]

    def step(optimizer, variables, number):
        pairs = [(tf.constant(gradients[number] * (i + 1)), v) for i, v in enumerate(variables[:2])]
        optimizer.apply_gradients([*pairs, (tf.constant(gradients[number][:1]), variables[2])])

    trained, optimizer = fresh(values, "localized:0"), getattr(family, name)(0.1, **options)
    step(optimizer, trained, 0)
    step(optimizer, trained, 1)
    sok.dump(tmp_path / "w", trained[:2], optimizer)
    wrapped = sok.Variable(values, name="a")
    wrapper = sok.OptimizerWrapper(getattr(family, name)(0.1, **options))
    names = {p.name.removeprefix("a_0-") for p in (tmp_path / "w").glob("a_0-*")}
    assert names == {"key", "weight", *(f"{name}-{slot}" for slot in wrapper.get_slot_names())}

    loaded, again = fresh(np.zeros((5, 3), np.float32), "localized:0"), getattr(family, name)(0.1, **options)
    loaded[2].assign(trained[2])
    if family is not tf_keras.optimizers.legacy:
        with pytest.raises(ValueError, match=r"a:0.*build"):
            sok.load(tmp_path / "w", loaded[:2], again)
        np.testing.assert_array_equal(loaded[0], np.zeros((5, 3)))
        again.build(loaded)
    sok.load(tmp_path / "w", loaded[:2], [again])
    step(optimizer, trained, 2)
    step(again, loaded, 2)
    assert int(again.iterations.numpy()) == 3
    for variable, twin in zip(loaded[:2], trained[:2]):
        np.testing.assert_array_equal(variable, twin)

    sok.load(tmp_path / "w", wrapped, wrapper)  # the wrapper continues what the plain optimizer began
    assert int(wrapper.iterations) == 2
    wrapper.apply_gradients([(tf.constant(gradients[2]), wrapped)])
    np.testing.assert_allclose(wrapped, trained[0], rtol=2e-5, atol=2e-6)


def test_a_plain_optimizer_is_refused_where_its_states_would_be_lost(tmp_path):
    static, dynamic = trained(kind="static", name="s")[0], trained(name="d")[0]
    for optimizer, variables, named in (
        (tf.keras.optimizers.SGD(), [static, dynamic], "OptimizerWrapper.*'d:0'"),
        (tf.keras.optimizers.RMSprop(), [static], "RMSprop"),
        (tf.compat.v1.train.AdamOptimizer(), [static], "AdamOptimizer"),
        ("adam", [static], "str"),
    ):
        with pytest.raises(ValueError, match=named):
            sok.dump(tmp_path / "w", variables, optimizer)
    for optimizer in (tf.keras.optimizers.Adam(amsgrad=True), tf_keras.optimizers.legacy.Adam(amsgrad=True)):
        with pytest.raises(NotImplementedError, match="amsgrad"):
            sok.dump(tmp_path / "w", static, optimizer)
    with pytest.raises(NotImplementedError, match="use_ema"):
        sok.dump(tmp_path / "w", static, tf_keras.optimizers.Adam(use_ema=True))
    assert not (tmp_path / "w").exists()


def test_a_load_into_a_smaller_variable_warns_with_the_number_of_rows_that_found_no_room(tmp_path):
    large = sok.DynamicVariable(dimension=2, name="t")
    sok.assign(large, np.arange(1000), np.ones((1000, 2)))
    sok.dump(tmp_path / "w", large)
    small = sok.DynamicVariable(dimension=2, name="t", max_capacity=128)
    with pytest.warns(UserWarning, match="dropped 872 rows while 1000 were loaded: max_capacity is 128"):
        sok.load(tmp_path / "w", small)
    assert int(small.size[0]) == 128
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sok.load(tmp_path / "w", sok.DynamicVariable(dimension=2, name="t", max_capacity=4096))


def test_variables_dumped_one_after_the_other_stay_together(tmp_path):
    one, wrapper = trained(name="one")
    two, _ = trained(name="two")
    sok.dump(tmp_path / "w", one, wrapper)
    sok.dump(tmp_path / "w", two)
    sok.dump(tmp_path / "w", one)  # without states: the old ones would not fit the new rows
    assert DumpReader(tmp_path / "w").tables() == ["one_0", "two_0"]
    assert not list((tmp_path / "w").glob("one_0-Adam-*"))
    files = json.loads((tmp_path / "w" / "manifest.json").read_text())["files"]
    assert sorted(files) == ["one_0-key", "one_0-weight", "two_0-key", "two_0-weight"]
    (tmp_path / "w" / "directory").mkdir()
    with pytest.raises(ValueError, match="directory"):
        sok.dump(tmp_path / "w", one)
    with pytest.raises(ValueError, match="should differ"):
        sok.dump(tmp_path / "v", [one, one])
    assert not (tmp_path / "v").exists()


def test_a_name_becomes_the_name_of_a_file_as_in_the_original():
    assert file_prefix("sok_dynamic_Variable_0:0") == "sok_dynamic_Variable_0_0"
    assert file_prefix("a/b-c.d:0") == "a_b_c_d_0"


def write(path, number, rows=3):
    with DumpWriter(path) as writer:
        table = writer.table("t", np.int64, optimizer="Adam", slots=("m", "v"))
        keys = np.full(rows, number, np.int64)
        values = np.full((rows, 2), number, np.float32)
        table.append(keys, values, [values, values])


def test_a_writer_that_fails_leaves_the_old_dump(tmp_path):
    write(tmp_path / "w", 1)
    with pytest.raises(ValueError, match="states"), DumpWriter(tmp_path / "w") as writer:
        writer.table("t", np.int64).append(np.ones(2), np.ones((1, 2)))
    assert DumpReader(tmp_path / "w").table("t").keys[0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_a_killed_writer_leaves_the_old_dump_or_the_new_one(tmp_path):
    """kill -9 at many moments: what is there is always one whole dump, and never an older one than before."""
    program = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from embstore.formats.sok import DumpWriter
number = int(sys.argv[3])
while True:
    number += 1
    with DumpWriter(sys.argv[2]) as writer:
        table = writer.table("t", np.int64, optimizer="Adam", slots=("m", "v"))
        for _ in range(20):
            values = np.full((1000, 16), number, np.float32)
            table.append(np.full(1000, number, np.int64), values, [values, values])
    print(number, flush=True)
"""
    rng, last = np.random.default_rng(0), 0
    path = tmp_path / "w"
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", program, "src", str(path), str(last)], stdout=subprocess.PIPE, text=True
        )
        try:
            first = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.15))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        table = DumpReader(path).table("t")  # checks sizes and checksums
        found = np.unique(table.keys)
        assert len(found) == 1 and found[0] >= first and len(table) == 20_000
        assert (table.values == found[0]).all() and (table.states["Adam-v"] == found[0]).all()
        last = int(found[0])
