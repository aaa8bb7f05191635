"""Variables: what they hold, how they print, which options they take."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit as sok
from sparse_operation_kit import communication
from sparse_operation_kit.dynamic import CONFIG


def test_a_static_variable_reads_and_prints_like_a_tf_variable():
    values = np.arange(15 * 16, dtype=np.float32).reshape(15, 16)
    variable, twin = sok.Variable(values, name="user"), tf.Variable(values, name="user")
    assert str(variable) == str(twin) and repr(variable) == repr(twin)
    np.testing.assert_array_equal(variable.numpy(), values)
    np.testing.assert_array_equal(variable + 1, values + 1)
    assert variable.global_shape == (15, 16) and variable.target_gpu == -1 and variable.num_gpus == 1
    np.testing.assert_array_equal(variable.key_map([3, 4]), [3, 4])


def test_a_static_variable_takes_a_shape_and_an_initializer():
    variable = sok.Variable(shape=[4, 3], initializer=tf.keras.initializers.Ones(), dtype=tf.float32)
    np.testing.assert_array_equal(variable, np.ones((4, 3)))
    assert sok.Variable([1.0, 2.0]).shape == (1, 2)
    assert sok.Variable(np.arange(6).reshape(2, 3)).dtype == tf.float32
    with pytest.raises(ValueError, match="initial_value"):
        sok.Variable(shape=[4, 3])
    with pytest.raises(ValueError, match="2 dimensions"):
        sok.Variable(np.ones((1, 2, 3)))


def test_names_count_up_by_kind():
    one, two = sok.DynamicVariable(dimension=1), sok.DynamicVariable(dimension=1)
    numbers = [int(v.name.removeprefix("sok_dynamic_Variable_").removesuffix(":0")) for v in (one, two)]
    assert numbers[1] == numbers[0] + 1
    assert sok.Variable([[1.0]]).name.startswith("sok_static_Variable_")


def test_a_dynamic_variable_says_what_it_is():
    variable = sok.DynamicVariable(dimension=16, name="item", max_capacity=1024, initializer="uniform")
    assert repr(variable) == "<sok.DynamicVariable 'item:0' shape=(None, 16) dtype=float32>"
    assert variable.shape.as_list() == [None, 16] and variable.dimension == 16
    assert variable.key_type == tf.int64 and variable.handle_dtype == tf.float32
    assert variable.backend_type == "hybrid" and variable.config_dict["max_capacity"] == 1024
    assert variable.initializer_str == "uniform" and not variable.is_static()
    for name in ("value", "read_value", "numpy", "assign", "gather_nd", "to_proto"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(variable, name)()
    with pytest.raises(NotImplementedError):
        variable + 1


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
@pytest.mark.parametrize(
    ("initializer", "low", "high", "mean", "deviation"),
    [
        ("", -0.05, 0.05, 0, 0.0289),
        ("random", -0.05, 0.05, 0, 0.0289),
        ("uniform", 0, 1, 0.5, 0.289),
        ("normal", -9, 9, 0, 1),
        ("ones", 1, 1, 1, 0),
        ("zeros", 0, 0, 0, 0),
        ("-0.25", -0.25, -0.25, -0.25, 0),
        (None, -0.05, 0.05, 0, 0.0289),
        ('random {"stddev":0.0025}', -0.02, 0.02, 0, 0.0025),
        ('random {"stddev": 2}', -20, 20, 0, 2),
        (tf.keras.initializers.RandomNormal(2.0, 0.5), -9, 9, 2, 0.5),
        (tf.keras.initializers.TruncatedNormal(0.0, 1.0), -2, 2, 0, 0.88),
        (tf.keras.initializers.Constant(3.0), 3, 3, 3, 0),
    ],
)
def test_initializers_have_the_distribution_of_their_name(var_type, initializer, low, high, mean, deviation):
    variable = sok.DynamicVariable(dimension=50, var_type=var_type, initializer=initializer)
    out = tf.nn.embedding_lookup(variable, tf.range(1000, dtype=tf.int64)).numpy()
    assert out.min() >= low and out.max() <= high
    assert abs(out.mean() - mean) < 0.02 * max(1, deviation)
    assert abs(out.std() - deviation) < 0.02 * max(deviation, 0.1)


def test_a_hybrid_variable_takes_every_option_of_the_original():
    options = {
        "init_capacity": 64,
        "max_capacity": 256,
        "max_hbm_for_vectors": 2,
        "max_load_factor": 0.625,
        "max_bucket_size": 32,
        "block_size": 512,
        "device_id": 0,
        "io_by_cpu": True,
        "evict_strategy": "kLru",
        "filter_ratio": 0.5,
    }
    assert set(options) == set(CONFIG)
    variable = sok.DynamicVariable(dimension=2, **options)
    assert variable.config_dict == options
    engine = variable.table.options
    assert (engine.init_capacity, engine.max_capacity, engine.bucket_capacity) == (64, 256, 32)
    assert engine.max_load_factor == 0.625


def test_ids_without_a_row_train_a_shared_row_where_a_variable_asks_for_it():
    variable = sok.DynamicVariable(
        dimension=2, initializer="ones", max_capacity=16, max_bucket_size=16,
        evict_strategy="kLfu", admission="frequency", shared_rows=1,
    )  # fmt: skip
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(learning_rate=1.0))
    for ids in (range(16), range(100, 110)):
        keys = tf.constant(list(ids), tf.int64)
        with tf.GradientTape() as tape:
            ragged = tf.RaggedTensor.from_tensor(keys[:, None])
            loss = tf.reduce_sum(sok.lookup_sparse([variable], [ragged], combiners=["sum"])[0])
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    assert variable.table.shared_rows().values.tolist() == [[-9.0, -9.0]]  # ten ids, one row
    assert variable.table.find([12345, 3])[0].tolist() == [[-9.0, -9.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="shared_rows should not be given"):
        sok.DynamicVariable(dimension=2, var_type="hbm", shared_rows=1)


@pytest.mark.parametrize(
    ("given", "init", "most"),
    [
        ({"init_capacity": 1013, "max_capacity": 1199}, 1024, 2048),
        ({"max_capacity": 1000}, 1024, 1024),
        ({"max_capacity": 7}, 16, 16),
        ({"init_capacity": 4096, "max_capacity": 1024}, 1024, 1024),
    ],
)
def test_capacities_are_rounded_up_with_one_warning_that_names_both_numbers(given, init, most):
    with pytest.warns(UserWarning) as caught:
        variable = sok.DynamicVariable(dimension=2, **given)
    assert len(caught) == 1 and caught[0].filename == __file__
    for name, value in given.items():
        now = variable.config_dict[name]
        assert now == {"init_capacity": init, "max_capacity": most}[name]
        assert (f"{name} {value} to {now}" in str(caught[0].message)) == (value != now)
    assert variable.table.stats().max_capacity == most


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sok.init, "comm_tool use_legacy_optimizer"),
        (
            sok.DynamicVariable.__init__,
            "self dimension initializer var_type name constraint trainable key_type dtype mode",
        ),
        (sok.lookup_sparse, "params sp_ids sp_weights combiners use_low_frequency_filter"),
        (sok.all2all_dense_embedding, "param indices"),
        (sok.sparse_read_and_evict, "var indices name"),
        (sok.OptimizerWrapper, "optimizer"),
        (sok.OptimizerWrapper.apply_gradients, "self grads_and_vars global_step name"),
        (sok.SGD, "lr"),
        (sok.export, "var"),
        (sok.assign, "var indices values"),
        (sok.dump, "path dump_vars optimizer"),
        (sok.load, "path load_vars optimizer"),
        (sok.incremental_model_dump, "sok_vars time_threshold sess"),
        (sok.filter_variables, "vars"),
    ],
)
def test_arguments_have_the_names_and_the_order_of_the_original(function, names):
    found = list(inspect.signature(function).parameters)
    assert found[: len(names.split())] == names.split()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dimension": 0}, "dimension"),
        ({"dimension": 2.5}, "dimension"),
        ({"var_type": "gpu"}, "'gpu'"),
        ({"initializer": "glorot"}, "'glorot'"),
        ({"initializer": tf.keras.initializers.Orthogonal()}, "initializer"),
        ({"max_capacity": 0}, "max_capacity.*0"),
        ({"init_capacity": 3.5}, "init_capacity.*3.5"),
        ({"max_bucket_size": True}, "max_bucket_size.*True"),
        ({"initializer": 'random {"stddev": -1}'}, "initializer.*stddev.*-1"),
        ({"initializer": 'random {"mean": 1}'}, "initializer.*mean"),
        ({"initializer": "random {"}, "initializer"),
        ({"max_load_factor": 2.0}, "max_load_factor"),
        ({"filter_ratio": -0.1}, "filter_ratio"),
        ({"evict_strategy": "kLifo"}, "kLifo"),
        ({"capacity": 8}, "capacity"),
        ({"var_type": "hbm", "capacity": 8}, "capacity"),
        ({"mode": "localized:1"}, "localized:1"),
        ({"mode": "localised:0"}, "localised:0"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        sok.DynamicVariable(**{"dimension": 4, **options})


@pytest.mark.parametrize(
    "options",
    [{"key_type": tf.int32}, {"var_type": "hbm", "key_type": tf.float32}, {"dtype": tf.float16}],
)
def test_types_that_are_not_supported_are_refused(options):
    with pytest.raises(NotImplementedError):
        sok.DynamicVariable(dimension=4, **options)


def test_a_localized_rank_out_of_range_is_refused():
    with pytest.raises(ValueError, match="localized:7"):
        sok.Variable([[1.0]], mode="localized:7")


def test_export_is_the_inverse_of_assign_for_every_kind():
    values = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    for variable in (
        sok.Variable(np.zeros((9, 4)), dtype=tf.float32),
        sok.Variable(np.zeros((9, 4)), dtype=tf.float32, mode="localized:0"),
        sok.DynamicVariable(dimension=4),
        sok.DynamicVariable(dimension=4, var_type="hbm", key_type=tf.int32),
    ):
        order = np.random.default_rng(1).permutation(9)
        sok.assign(variable, order, values[order])
        keys, rows = sok.export(variable)
        np.testing.assert_array_equal(keys, np.arange(9))
        np.testing.assert_array_equal(rows, values)
    with pytest.raises(ValueError, match="but one is: 9"):
        sok.assign(sok.Variable(values), [9], values[:1])
    with pytest.raises(ValueError, match="values"):
        sok.assign(sok.DynamicVariable(dimension=4), [1, 2], values[:1])
    with pytest.raises(TypeError, match="sok variable"):
        sok.export(tf.Variable([1.0]))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("kind", ["static", "hybrid"])
@pytest.mark.parametrize("shape", [(1, 6), (1, 1), (2, 3), (3,), (1, 1, 3)])
def test_rows_of_another_shape_are_not_assigned(kind, shape, graph):
    before = np.arange(12, dtype=np.float32).reshape(4, 3)
    variable = sok.Variable(before) if kind == "static" else sok.DynamicVariable(dimension=3)
    if kind != "static":
        sok.assign(variable, np.arange(4), before)
    assign = lambda values: sok.assign(variable, [1], values)  # noqa: E731
    if graph:
        assign = tf.function(assign, input_signature=[tf.TensorSpec(None)])
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match=r"values should have the shape \(1, 3\)"
    ):
        assign(tf.ones(shape))
    np.testing.assert_array_equal(sok.export(variable)[1], before)


KEY_USES = {
    "all2all_dense_embedding": lambda v, k: sok.all2all_dense_embedding(v, k),
    "embedding_lookup": lambda v, k: v.sparse_read(k),
    "sparse_read_and_evict": lambda v, k: sok.sparse_read_and_evict(v, k),
    "assign": lambda v, k: sok.assign(v, k, np.ones((1, 2))),
    "scatter_add": lambda v, k: v.scatter_add(tf.IndexedSlices(tf.ones((1, 2)), k)),
    "key_map": lambda v, k: v.key_map(k),
    "lookup_sparse": lambda v, k: sok.lookup_sparse(v, tf.RaggedTensor.from_row_lengths(k, [1])),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("use", KEY_USES)
def test_keys_that_are_not_integers_are_refused(use, graph):
    variable = sok.DynamicVariable(dimension=2)
    cases = [(tf.constant([1.5]), "float32"), (tf.constant([True]), "bool")]
    if not graph and use not in ("scatter_add", "lookup_sparse"):
        cases += [([1.5], "float32"), (np.array([2.0]), "float64"), ([True], "bool"), (["a"], "string")]
    for keys, named in cases:
        call = lambda k: KEY_USES[use](variable, k)  # noqa: E731
        with pytest.raises(ValueError, match=f"integers.*{named}"):
            (tf.function(call) if graph else call)(keys)
    assert int(variable.size[0]) == 0


def test_scatters_change_rows_by_key():
    variable = sok.DynamicVariable(dimension=1, initializer="ones")
    delta = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([5, 5, -6], tf.int64))
    variable.scatter_add(delta)
    np.testing.assert_array_equal(sok.export(variable)[1], [[5.0], [4.0]])
    variable.scatter_sub(delta)
    np.testing.assert_array_equal(sok.export(variable)[1], [[1.0], [1.0]])
    variable.scatter_update(delta)
    np.testing.assert_array_equal(sok.export(variable)[1], [[4.0], [2.0]])


def test_variables_are_sorted_into_ours_and_others():
    dense, dynamic, static = tf.Variable(1.0), sok.DynamicVariable(dimension=1), sok.Variable([[1.0]])
    ours, others = sok.filter_variables([dense, dynamic, static])
    assert ours[0] is dynamic and ours[1] is static and others[0] is dense


def test_the_default_variable_takes_no_memory_in_advance():
    assert sok.DynamicVariable(dimension=128).table.stats().bytes < 64 << 20


def test_the_tool_is_chosen_once():
    sok.init("single")
    with pytest.raises(RuntimeError, match="more than once"):
        sok.init("torch")
    with pytest.raises(ValueError, match="'mpi'"):
        sok.init("mpi")


@pytest.mark.parametrize(
    ("tool", "missing"), [(communication.Horovod, "horovod"), (communication.Torch, "torch")]
)
def test_a_tool_that_is_not_installed_is_named(monkeypatch, tool, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # makes its import fail
    with pytest.raises(ImportError, match=f"comm_tool='{missing}' needs .*{missing}"):
        tool()


def test_without_init_a_variable_says_what_to_do_and_without_tensorflow_the_package_does():
    program = """
import sys
sys.modules["tensorflow"] = None
try:
    import sparse_operation_kit
except ImportError as error:
    print(error)
for name in [n for n in sys.modules if n.startswith("sparse_operation_kit")]:
    del sys.modules[name]
del sys.modules["tensorflow"]
import sparse_operation_kit as sok
for use in (lambda: sok.Variable([[1.0]]), lambda: sok.DynamicVariable(dimension=1, mode="localized:0")):
    try:
        use()
    except RuntimeError as error:
        print(error)
variable = sok.DynamicVariable(dimension=1, initializer="ones")
print(variable.sparse_read([4]).numpy(), "torch" in sys.modules, "horovod" in sys.modules)
try:
    import tensorflow as tf
    sok.lookup_sparse(variable, tf.ragged.constant([[1]]))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("sparse_operation_kit needs an extra: pip install 'embstore[tensorflow]'")
    assert len(rest) == 4 and rest[2] == "[[1.]] False False", done.stdout + done.stderr
    assert all("sok.init()" in rest[i] for i in (0, 1, 3))
