"""Every optimizer, of every Keras, against the object that it wraps and against numpy."""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from faces.sparse_operation_kit.oracle import OPTIMIZERS, SLOTS, LazyTable

import sparse_operation_kit as sok

ROWS, DIM = 23, 7
FAMILIES = {
    "keras": tf.keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
}
V1 = tf.compat.v1.train
V1_OPTIMIZERS = {
    "sgd": lambda: V1.GradientDescentOptimizer(0.5),
    "momentum": lambda: V1.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: V1.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: V1.AdagradOptimizer(0.1, initial_accumulator_value=0.2),
    "adam": lambda: V1.AdamOptimizer(0.1, beta1=0.8, beta2=0.95, epsilon=1e-3),
    "adadelta": lambda: V1.AdadeltaOptimizer(1.0, rho=0.9, epsilon=1e-4),
    "ftrl": lambda: V1.FtrlOptimizer(
        0.3,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.4,
    ),
}


def make(family, name):
    if family == "v1":
        return V1_OPTIMIZERS[name]()
    kind, options = OPTIMIZERS[name]
    return getattr(FAMILIES[family], kind)(**options)


def make_variable(kind, values):
    if kind == "static":
        return sok.Variable(values)
    variable = sok.DynamicVariable(dimension=values.shape[1], var_type=kind)
    sok.assign(variable, np.arange(len(values)), values)
    return variable


def slices(keys, gradients):
    return tf.IndexedSlices(tf.constant(gradients), tf.constant(keys))


CASES = [(f, n) for f in FAMILIES for n in OPTIMIZERS] + [("v1", n) for n in V1_OPTIMIZERS]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_rows_with_a_gradient_move_as_the_wrapped_optimizer_moves_a_dense_table(family, name):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    twin, reference = tf.Variable(values), make(family, name)
    wrapper = sok.OptimizerWrapper(make(family, name))
    ours = [make_variable(kind, values) for kind in ("static", "hybrid")]
    for _ in range(4):
        gradient = rng.normal(size=(ROWS, DIM)).astype(np.float32)
        reference.apply_gradients([(tf.constant(gradient), twin)])
        halves = np.concatenate([gradient / 2, gradient / 2])  # duplicates are summed
        keys = np.concatenate([np.arange(ROWS), np.arange(ROWS)])
        wrapper.apply_gradients([(slices(keys, halves), v) for v in ours])
    for variable in ours:
        np.testing.assert_allclose(sok.export(variable)[1], twin, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_without_a_gradient_and_their_states_stay(name, graph):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    oracle = LazyTable(name, values)
    wrapper = sok.OptimizerWrapper(make("legacy", name))
    ours = [make_variable(kind, values) for kind in ("static", "hbm", "hybrid")]

    def step(keys, gradients):
        wrapper.apply_gradients([(tf.IndexedSlices(gradients, keys), v) for v in ours])

    if graph:
        step = tf.function(step, reduce_retracing=True)
    for _ in range(5):
        keys = rng.integers(0, ROWS, 9)
        gradients = rng.normal(size=(9, DIM)).astype(np.float32)
        oracle.update(keys, gradients)
        step(tf.constant(keys), tf.constant(gradients))
    assert wrapper.get_slot_names() == list(SLOTS[name])
    assert int(wrapper.iterations) == 5
    for variable in ours:
        np.testing.assert_allclose(sok.export(variable)[1], oracle.values, rtol=2e-5, atol=2e-6)
        for slot, expected in zip(SLOTS[name], oracle.states, strict=True):
            found = wrapper.get_slot(variable, slot)
            found = sok.export(found)[1] if isinstance(variable, sok.DynamicVariable) else found
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_learning_rate_of_the_wrapped_object_is_read_at_every_step(family, graph):
    inner = FAMILIES[family].SGD(0.5)
    wrapper = sok.OptimizerWrapper(inner)
    variable = make_variable("hybrid", np.zeros((1, 1), np.float32))
    step = lambda: wrapper.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])  # noqa: E731
    step = tf.function(step) if graph else step
    step()
    inner.learning_rate = 0.25
    step()
    assert float(wrapper.lr) == 0.25
    np.testing.assert_allclose(sok.export(variable)[1], [[-0.75]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learning_rate_can_be_set_and_assigned_on_the_wrapper(family):
    inner = FAMILIES[family].SGD(1.0)
    wrapper, variable = sok.OptimizerWrapper(inner), make_variable("hybrid", np.zeros((1, 1), np.float32))

    @tf.function
    def step(rate):
        wrapper.lr.assign(rate)
        wrapper.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])

    for rate in (0.5, 0.25):
        step(tf.constant(rate))
    assert float(wrapper.learning_rate) == float(inner.learning_rate) == 0.25
    np.testing.assert_allclose(sok.export(variable)[1], [[-0.75]])
    for name in ("learning_rate", "lr"):
        setattr(wrapper, name, 2.0)
        assert float(inner.learning_rate) == float(wrapper.lr) == float(wrapper.learning_rate) == 2.0
        wrapper.lr = 1.0


@pytest.mark.parametrize(("optimizer", "attribute"), [("GradientDescent", "_learning_rate"), ("Adam", "_lr")])
def test_the_learning_rate_of_a_v1_optimizer_can_be_set_on_the_wrapper(optimizer, attribute):
    inner = getattr(V1, f"{optimizer}Optimizer")(1.0)
    wrapper = sok.OptimizerWrapper(inner)
    wrapper.learning_rate = 0.5
    assert wrapper.lr == getattr(inner, attribute) == 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schedule_is_followed_by_the_count_of_the_wrapper(family):
    schedules = tf_keras.optimizers.schedules if family != "keras" else tf.keras.optimizers.schedules
    inner = FAMILIES[family].SGD(schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.125]))
    wrapper = sok.OptimizerWrapper(inner)
    variable = make_variable("hybrid", np.zeros((1, 1), np.float32))
    step = tf.function(
        lambda: wrapper.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])
    )
    seen = []
    for _ in range(4):
        step()
        seen.append(float(sok.export(variable)[1][0, 0]))
    np.testing.assert_allclose(seen, [-1.0, -2.0, -2.5, -2.625])


def test_the_decay_of_a_legacy_optimizer_is_followed():
    wrapper = sok.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(1.0, decay=1.0))
    variable = make_variable("hybrid", np.zeros((1, 1), np.float32))
    for _ in range(3):
        wrapper.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])
    np.testing.assert_allclose(sok.export(variable)[1], [[-(1 + 1 / 2 + 1 / 3)]], rtol=1e-6)


def test_a_velocity_is_not_scaled_by_a_later_learning_rate():
    inner, twin = tf.keras.optimizers.SGD(0.5, momentum=0.9), tf.Variable([[0.0]])
    wrapped = tf.keras.optimizers.SGD(0.5, momentum=0.9)
    wrapper, variable = sok.OptimizerWrapper(wrapped), make_variable("hbm", np.zeros((1, 1), np.float32))
    for rate in (0.5, 0.01, 0.01):
        inner.learning_rate = wrapped.learning_rate = rate
        inner.apply_gradients([(tf.ones((1, 1)), twin)])
        wrapper.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])
    np.testing.assert_allclose(sok.export(variable)[1], twin, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (lambda: tf.keras.optimizers.Adam(amsgrad=True), "amsgrad"),
        (lambda: tf.keras.optimizers.SGD(clipnorm=1.0), "clipnorm"),
        (lambda: tf_keras.optimizers.legacy.SGD(clipvalue=1.0), "clipvalue"),
        (lambda: tf_keras.optimizers.Adam(use_ema=True), "use_ema"),
        (lambda: tf.keras.optimizers.Adam(weight_decay=0.1), "weight_decay"),
        (lambda: tf.keras.optimizers.RMSprop(), "RMSprop"),
        (lambda: V1.RMSPropOptimizer(0.1), "RMSPropOptimizer"),
        (lambda: "adam", "str"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(optimizer, named):
    with pytest.raises(NotImplementedError, match=named):
        sok.OptimizerWrapper(optimizer())


@pytest.mark.parametrize("kind", ["static", "hybrid"])
def test_another_optimizer_needs_an_explicit_call_to_drop_the_state_of_the_first(kind):
    variable = make_variable(kind, np.ones((3, 2), np.float32))
    gradient = slices([0, 2], np.ones((2, 2), np.float32))
    sok.SGD(lr=0.5).apply_gradients([(gradient, variable)])  # has no state
    sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.0)).apply_gradients([(gradient, variable)])
    before = sok.export(variable)[1].numpy()
    np.testing.assert_allclose(before, [[0.5, 0.5], [1, 1], [0.5, 0.5]])
    for other in (
        tf.keras.optimizers.Adagrad(0.1),
        tf.keras.optimizers.Adam(0.1, beta_1=0.5),
        tf.keras.optimizers.SGD(0.1),
    ):
        wrapper = sok.OptimizerWrapper(other)
        with pytest.raises(ValueError, match=rf"{variable.name}.*Adam.*reset_slots"):
            wrapper.apply_gradients([(gradient, variable)])
        assert int(wrapper.iterations) == 0
        np.testing.assert_array_equal(sok.export(variable)[1], before)
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25))
    wrapper.reset_slots([variable])
    np.testing.assert_array_equal(sok.export(variable)[1], before)
    state = wrapper.get_slot(variable, "accumulator")
    state = state.numpy() if kind == "static" else state.values()
    np.testing.assert_array_equal(state, np.full((3, 2), 0.25))
    wrapper.apply_gradients([(gradient, variable)])


@pytest.mark.parametrize("kind", ["static", "hybrid"])
def test_a_second_wrapper_of_the_same_optimizer_continues_the_state(kind):
    variable, twin = (make_variable(kind, np.ones((3, 2), np.float32)) for _ in range(2))
    gradient = slices([0, 2], np.ones((2, 2), np.float32))
    whole = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.5))
    for rate in (0.5, 0.25):
        whole.learning_rate = rate
        whole.apply_gradients([(gradient, twin)])
        one = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(rate))
        one.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(sok.export(variable)[1], sok.export(twin)[1])


def test_other_variables_go_to_the_wrapped_optimizer_and_missing_gradients_are_passed_by():
    dense, variable = tf.Variable([1.0]), make_variable("hybrid", np.ones((1, 1), np.float32))
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    assert wrapper.apply_gradients([(None, dense), (None, variable)]) is None
    gradient = slices([0], np.ones((1, 1), np.float32))
    wrapper.apply_gradients([(tf.constant([1.0]), dense), (gradient, variable)])
    np.testing.assert_allclose(dense, [0.5])
    np.testing.assert_allclose(sok.export(variable)[1], [[0.5]])
    with pytest.raises(TypeError, match="IndexedSlices"):
        wrapper.apply_gradients([(tf.ones((1, 1)), variable)])


@pytest.mark.parametrize("kind", ["static", "hbm", "hybrid"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (2,)])
def test_a_gradient_of_another_shape_is_refused_before_any_row_moves(kind, shape):
    good, bad = (make_variable(kind, np.ones((2, 2), np.float32)) for _ in range(2))
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    pairs = [(slices([0], np.ones((1, 2), np.float32)), good), (slices([0], np.ones(shape, np.float32)), bad)]
    with pytest.raises(ValueError, match=rf"{bad.name}.*\(1, 2\).*{re.escape(str(shape))}"):
        wrapper.apply_gradients(pairs)
    assert int(wrapper.iterations) == 0
    for variable in (good, bad):
        np.testing.assert_array_equal(sok.export(variable)[1], np.ones((2, 2)))


def test_the_rate_of_sok_sgd_may_be_changed_between_the_steps_of_a_function():
    optimizer, variable = sok.SGD(lr=1.0), make_variable("hybrid", np.zeros((1, 1), np.float32))
    step = tf.function(
        lambda: optimizer.apply_gradients([(slices([0], np.ones((1, 1), np.float32)), variable)])
    )
    step()
    optimizer.lr = 0.5
    step()
    np.testing.assert_allclose(sok.export(variable)[1], [[-1.5]])


def pooled(variable, ids, combiner, mode):
    """The gradient of a loss over pooled rows, with the tape in or around a tf.function, or alone."""

    def loss():
        found = sok.lookup_sparse(variable, ids, combiners=combiner)
        return tf.reduce_sum(
            found * tf.reshape(tf.range(1.0, 1.0 + tf.cast(tf.size(found), tf.float32)), [3, 2])
        )

    def gradient(of):
        with tf.GradientTape() as tape:
            value = of()
        return tape.gradient(value, variable)

    if mode == "function":
        return tf.function(lambda: gradient(loss))()
    return gradient(tf.function(loss) if mode == "tape around a function" else loss)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("mode", ["eager", "function", "tape around a function"])
def test_the_gradient_of_pooled_rows_has_a_value_for_each_key_for_whoever_asks(mode, combiner):
    variable = sok.DynamicVariable(dimension=2, initializer="ones")
    ids = tf.ragged.constant([[7, -1, 7], [], [-1]], dtype=tf.int64)
    slices = pooled(variable, ids, combiner, mode)
    assert isinstance(slices, tf.IndexedSlices)
    scale = 1 / 3 if combiner == "mean" else 1
    np.testing.assert_array_equal(slices.indices, [7, -1, 7, -1])
    expected = [[scale, 2 * scale]] * 3 + [[5, 6]]
    np.testing.assert_allclose(slices.values, expected, rtol=1e-6)
    np.testing.assert_allclose(tf.convert_to_tensor(tf.nest.flatten(slices, True)[0]), expected, rtol=1e-6)
    (clipped,), _ = tf.clip_by_global_norm([slices], 1e9)
    np.testing.assert_allclose(clipped.values, expected, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("graph", [False, True])
def test_an_update_from_bags_is_that_of_the_values_of_their_keys(graph, combiner):
    ids = tf.ragged.constant([[7, -1, 7], [], [-1]], dtype=tf.int64)
    rows = []
    for as_values in (False, True):
        variable = sok.DynamicVariable(dimension=2, initializer="ones")
        optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.1))

        def step(variable=variable, optimizer=optimizer, as_values=as_values):
            slices = pooled(variable, ids, combiner, "eager")
            if as_values:
                slices = tf.IndexedSlices(slices.values, slices.indices)
            optimizer.apply_gradients([(slices, variable)])

        run = tf.function(step) if graph else step
        for _ in range(3):
            run()
        rows.append(variable.table.rows())
    np.testing.assert_array_equal(rows[0].values, rows[1].values)
    np.testing.assert_array_equal(rows[0].states, rows[1].states)
    assert (rows[0].values != 1.0).all()
