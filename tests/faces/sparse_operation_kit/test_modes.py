"""Every mode trains the rows or raises: eager, tf.function with a tape inside or outside, sessions, Keras."""

import warnings
from datetime import datetime, timezone

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok
from sparse_operation_kit import optimizer as optimizer_module

V1 = tf.compat.v1
ROWS, DIM = 7, 3
KEYS = np.array([1, 5, 5, 0, 6])
LENGTHS = [2, 0, 3]
WEIGHTS = np.array([0.5, 2.0, 1.0, 3.0, 0.25], np.float32)


def table(kind, name=None):
    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    if kind == "static":
        return sok.Variable(values, name=name)
    variable = sok.DynamicVariable(dimension=DIM, name=name, var_type=kind)
    if tf.executing_eagerly():
        sok.assign(variable, np.arange(ROWS), values)
    else:
        variable.table.insert_or_assign(np.arange(ROWS), values)
    return variable


def batch():
    return tf.RaggedTensor.from_row_lengths(KEYS, LENGTHS)


LOOKUPS = {
    "embedding_lookup": lambda v: tf.nn.embedding_lookup(v, KEYS),
    "all2all_dense_embedding": lambda v: sok.all2all_dense_embedding(v, KEYS),
    "lookup_sparse sum": lambda v: sok.lookup_sparse(v, batch(), combiners="sum"),
    "lookup_sparse mean": lambda v: sok.lookup_sparse([v], [batch()], combiners=["mean"])[0],
    "lookup_sparse weighted": lambda v: sok.lookup_sparse(
        v, batch(), batch().with_values(tf.constant(WEIGHTS)), combiners="sum"
    ),
    "sparse_read_and_evict": lambda v: sok.sparse_read_and_evict(v, KEYS)[0],
}


def of_rows(gradient):
    assert isinstance(gradient, tf.IndexedSlices)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, ROWS).numpy()


@pytest.mark.parametrize("traced_before", [False, True], ids=["first call", "traced before"])
@pytest.mark.parametrize(
    ("kind", "lookup"),
    [(k, n) for n in LOOKUPS for k in ("hybrid", "hbm", "static") if "evict" not in n or k == "hybrid"],
)
def test_a_tape_outside_of_a_function_gives_the_gradient_of_a_tape_inside(kind, lookup, traced_before):
    variable = table(kind)
    forward = tf.function(lambda: LOOKUPS[lookup](variable))
    if traced_before:
        forward()
    with tf.GradientTape() as outside:
        loss = tf.reduce_sum(forward() ** 2)
    found = outside.gradient(loss, variable)
    with tf.GradientTape() as inside:
        loss = tf.reduce_sum(LOOKUPS[lookup](variable) ** 2)
    expected = of_rows(inside.gradient(loss, variable))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(of_rows(found), expected, rtol=1e-6)


def test_what_was_evicted_has_no_gradient():
    variable = sok.DynamicVariable(dimension=DIM, max_capacity=16, initializer="ones")
    sok.sparse_read_and_evict(variable, np.arange(16))
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    with tf.GradientTape() as tape:
        vectors, keys, values = sok.sparse_read_and_evict(variable, [100, 101, 100])
        loss = tf.reduce_sum(vectors) + tf.reduce_sum(values) + 0.0 * tf.reduce_sum(tf.cast(keys, tf.float32))
    gradient = tape.gradient(loss, variable)
    np.testing.assert_array_equal(gradient.indices, [100, 101, 100])
    wrapper.apply_gradients([(gradient, variable)])
    rows = dict(zip(*(part.numpy().tolist() for part in sok.export(variable))))
    assert rows[100] == [0.0] * DIM and rows[101] == [0.5] * DIM


V1_OPTIMIZERS = {
    "GradientDescent": lambda: V1.train.GradientDescentOptimizer(0.01),
    "Momentum": lambda: V1.train.MomentumOptimizer(0.01, 0.9),
    "Adam": lambda: V1.train.AdamOptimizer(0.1),
    "legacy Adagrad": lambda: tf_keras.optimizers.legacy.Adagrad(0.1),
}


@pytest.mark.parametrize("optimizer", V1_OPTIMIZERS)
def test_a_session_trains_rows_and_dense_variables_as_eager_mode_does(optimizer):
    kinds = ("hybrid", "hbm", "static", "static")
    batches = [KEYS, KEYS[::-1].copy(), KEYS % 3]

    def loss_of(variables, dense, keys):
        ids = tf.RaggedTensor.from_row_lengths(keys, LENGTHS)
        outs = sok.lookup_sparse(variables, [ids] * len(variables), combiners=["sum"] * len(variables))
        return tf.reduce_sum(tf.add_n(outs) ** 2 * dense)

    eager, dense = [table(kind) for kind in kinds], tf.Variable([1.0, -2.0, 0.5])
    wrapper = sok.OptimizerWrapper(V1_OPTIMIZERS[optimizer]())
    losses = []
    for keys in batches:
        with tf.GradientTape() as tape:
            loss = loss_of(eager, dense, keys)
        gradients = tape.gradient(loss, [*eager, dense])
        wrapper.apply_gradients(zip(gradients, [*eager, dense]))
        losses.append(float(loss))
    expected, of_dense = [sok.export(variable)[1].numpy() for variable in eager], dense.numpy()

    with tf.Graph().as_default(), V1.Session() as session:
        ours, theirs = [table(kind) for kind in kinds], tf.Variable([1.0, -2.0, 0.5])
        keys = V1.placeholder(tf.int64, [None])
        loss = loss_of(ours, theirs, keys)
        wrapper = sok.OptimizerWrapper(V1_OPTIMIZERS[optimizer]())
        step = V1.train.get_or_create_global_step()
        gradients = V1.gradients(loss, [*ours, theirs])
        train = wrapper.apply_gradients(zip(gradients, [*ours, theirs]), global_step=step)
        assert isinstance(train, tf.Operation)
        session.run(V1.global_variables_initializer())
        early = datetime.now(timezone.utc)
        for b, of_eager in zip(batches, losses):
            np.testing.assert_allclose(session.run([loss, train], {keys: b})[0], of_eager, rtol=1e-5)
        assert session.run([wrapper.iterations, step]) == [3, 3]
        np.testing.assert_allclose(session.run(theirs), of_dense, rtol=1e-5)
        for variable, rows in zip(ours, expected):
            static = isinstance(variable, sok.DistributedVariable)
            found = session.run(variable) if static else variable.table.rows().values
            np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)
        (changed,), _ = sok.incremental_model_dump([ours[0]], early, session)
        np.testing.assert_array_equal(changed, np.unique(np.concatenate(batches)))


def test_a_session_assigns_and_reads_sizes_when_it_runs_them():
    with tf.Graph().as_default(), V1.Session() as session:
        dynamic, static = sok.DynamicVariable(dimension=2), sok.Variable(np.zeros((3, 2), np.float32))
        session.run(V1.global_variables_initializer())
        size, keys = dynamic.size, dynamic.indices
        for variable in (dynamic, static):
            assert session.run(sok.assign(variable, [2, 1], [[1.0, 2.0], [3.0, 4.0]])) == 2
        assert session.run(size).tolist() == [2, 2] and session.run(keys).tolist() == [1, 2]
        np.testing.assert_array_equal(session.run(static), [[0, 0], [3, 4], [1, 2]])
        np.testing.assert_array_equal(session.run(tf.nn.embedding_lookup(dynamic, [1])), [[3, 4]])


def test_a_session_takes_the_learning_rate_that_is_fed():
    with tf.Graph().as_default(), V1.Session() as session:
        rate = V1.placeholder(tf.float32, [])
        variable = sok.DynamicVariable(dimension=1, initializer="ones")
        wrapper = sok.OptimizerWrapper(V1.train.GradientDescentOptimizer(rate))
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, [4]))
        train = wrapper.apply_gradients([(V1.gradients(loss, [variable])[0], variable)])
        session.run(V1.global_variables_initializer())
        for value in (0.5, 0.25):
            session.run(train, {rate: value})
    np.testing.assert_array_equal(variable.table.rows().values, [[0.25]])


@pytest.mark.parametrize("optimizer", [tf.keras.optimizers.Adam, tf_keras.optimizers.Adam])
def test_a_session_refuses_optimizers_that_need_eager_mode(optimizer):
    made = optimizer(0.1)
    with tf.Graph().as_default(), pytest.raises(TypeError, match=r"tf.compat.v1.train.*Adam"):
        sok.OptimizerWrapper(made)


@pytest.mark.parametrize("where", ["tf.function", "graph"])
def test_dump_load_and_export_are_refused_outside_of_eager_mode(tmp_path, where):
    variable = table("hybrid", name="refused")
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adam())
    sok.dump(tmp_path / "w", variable, wrapper)
    calls = {
        "sok.export": lambda: sok.export(variable),
        "sok.dump": lambda: sok.dump(tmp_path / "v", variable),
        "sok.load": lambda: sok.load(tmp_path / "w", variable),
        "slot": lambda: wrapper.get_slot(variable, "m").sparse_read([1]),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name}.*eager"):
            if where == "tf.function":
                tf.function(call)()
            else:
                with tf.Graph().as_default():
                    call()
    assert not (tmp_path / "v").exists()


def test_dynamic_variables_of_a_session_are_dumped_and_static_ones_refused(tmp_path):
    with tf.Graph().as_default():
        dynamic, static = table("hybrid", name="of_graph"), sok.Variable([[1.0]], name="static_of_graph")
        wrapper = sok.OptimizerWrapper(V1.train.AdamOptimizer(0.1))
    sok.dump(tmp_path / "w", dynamic)
    with pytest.raises(RuntimeError, match=r"sok.dump needs eager.*static_of_graph"):
        sok.dump(tmp_path / "v", [dynamic, static])
    with pytest.raises(RuntimeError, match=r"sok.load needs eager.*sok_iterations"):
        sok.load(tmp_path / "w", dynamic, wrapper)
    expected = dynamic.table.rows().values
    copy = sok.DynamicVariable(dimension=DIM, name="of_graph")
    sok.load(tmp_path / "w", copy)
    np.testing.assert_array_equal(sok.export(copy)[1], expected)


class Embedding(tf.keras.layers.Layer):
    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def call(self, ids):
        return tf.reduce_sum(tf.nn.embedding_lookup(self.variable, ids), axis=1)


class Sparse(Embedding):
    def call(self, ids):
        return sok.lookup_sparse(self.variable, tf.RaggedTensor.from_tensor(ids), combiners="sum")


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("layer", [Embedding, Sparse])
@pytest.mark.parametrize("kind", ["hybrid", "static"])
def test_fit_of_keras_3_raises_where_it_would_leave_the_rows_untrained(kind, layer, eagerly):
    variable = table(kind)
    model = tf.keras.Sequential(
        [tf.keras.Input((2,), dtype=tf.int64), layer(variable), tf.keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=eagerly)
    ids, labels = np.array([[1, 2], [3, 3]]), np.ones((2, 1), np.float32)
    before = sok.export(variable)[1].numpy()
    with pytest.raises(RuntimeError, match=rf"{variable.name}.*train_step"):
        model.fit(ids, labels, verbose=0)
    np.testing.assert_array_equal(sok.export(variable)[1], before)
    model.evaluate(ids, labels, verbose=0)  # nothing to train
    model.predict(ids, verbose=0)
    with tf.GradientTape() as tape:  # a loop of the user's own
        loss = tf.reduce_sum(model(ids, training=True) ** 2)
    (variable_found,) = sok.trainable_variables(model)
    assert variable_found is variable
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)).apply_gradients(
        [(tape.gradient(loss, variable), variable)]
    )
    assert (sok.export(variable)[1].numpy()[1:4] != before[1:4]).any()


def test_fit_of_keras_3_runs_with_a_table_that_is_not_trainable():
    variable = sok.DynamicVariable(dimension=DIM, trainable=False, initializer="ones")
    model = tf.keras.Sequential(
        [tf.keras.Input((2,), dtype=tf.int64), Embedding(variable), tf.keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.array([[1, 2]]), np.ones((1, 1)), verbose=0)
    np.testing.assert_array_equal(sok.export(variable)[1], np.ones((2, DIM)))


@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras", "tf_keras"])
def test_trainable_variables_are_found_in_attributes_containers_and_sublayers(keras):
    variables = [sok.DynamicVariable(dimension=1) for _ in range(5)] + [sok.Variable([[1.0]])]
    frozen = sok.DynamicVariable(dimension=1, trainable=False)

    class Inner(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.own, self.frozen = variables[0], frozen

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Inner(), {"a": variables[1], "b": (variables[2], [variables[5]])}]
            self.module = tf.Module()
            self.module.held = variables[3]
            self.again, self.direct = variables[0], variables[4]
            self.dense = keras.layers.Dense(1)

    found = sok.trainable_variables(Model())
    assert {id(v) for v in found} == {id(v) for v in variables} and len(found) == len(variables)
    assert sok.trainable_variables(keras.layers.Dense(1)) == []
    assert [v is frozen for v in sok.trainable_variables([variables[0], frozen])] == [False]


def test_no_variables_at_all_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(optimizer_module, "_warned_of_no_variables", False)
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    with pytest.warns(UserWarning, match=r"sok.trainable_variables\(model\)") as caught:
        assert wrapper.apply_gradients([]) is None
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrapper.apply_gradients(iter([])) is None
        assert wrapper.apply_gradients([(None, table("hybrid"))]) is None


@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras", "tf_keras"])
def test_loss_scaling_around_and_inside_the_wrapper_is_refused(keras):
    scaling = keras.mixed_precision.LossScaleOptimizer
    with pytest.raises(TypeError, match="OptimizerWrapper" if keras is tf.keras else "optimizer"):
        scaling(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)))
    with pytest.raises(TypeError, match="LossScaleOptimizer"):
        sok.OptimizerWrapper(scaling(keras.optimizers.SGD(0.1)))
