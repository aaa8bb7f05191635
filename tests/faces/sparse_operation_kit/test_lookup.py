"""lookup_sparse and its gradients against tf.nn.embedding_lookup_sparse on a plain variable."""

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit as sok

ROWS, DIM = 31, 5


def table(rng, rows=ROWS, dim=DIM):
    return rng.normal(size=(rows, dim)).astype(np.float32)


def samples(rng, count, rows=ROWS, weighted=False):
    """A ragged batch with empty samples and duplicates."""
    lengths = rng.integers(0, 5, count)
    lengths[:2] = 0, 3
    keys = tf.RaggedTensor.from_row_lengths(rng.integers(0, rows, lengths.sum()), lengths)
    weights = (
        keys.with_values(tf.constant(rng.uniform(0.5, 2, lengths.sum()), tf.float32)) if weighted else None
    )
    return keys, weights


def expected(values, keys, weights, combiner):
    """The same by TensorFlow, with zeros for empty samples, and the gradient of sum(out ** 2)."""
    twin = tf.Variable(values)
    with tf.GradientTape() as tape:
        out = tf.nn.embedding_lookup_sparse(
            twin, keys.to_sparse(), None if weights is None else weights.to_sparse(), combiner=combiner
        )
        out = tf.concat([out, tf.zeros([keys.nrows() - tf.shape(out, tf.int64)[0], values.shape[1]])], 0)
        empty = tf.equal(keys.row_lengths(), 0)
        out = tf.where(empty[:, None], 0.0, out)
        loss = tf.reduce_sum(out**2)
    return out, tf.convert_to_tensor(tape.gradient(loss, twin))


def dense(gradient, rows):
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


def variables(values):
    dynamic = [sok.DynamicVariable(dimension=values.shape[1], var_type=t) for t in ("hybrid", "hbm")]
    for variable in dynamic:
        sok.assign(variable, np.arange(len(values)), values)
    return [*dynamic, sok.Variable(values), sok.Variable(values, mode="localized:0")]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("sparse", [False, True], ids=["ragged", "sparse"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_one_call_over_all_kinds_of_variables_gives_what_tensorflow_gives(combiner, weighted, sparse, graph):
    rng = np.random.default_rng(0)
    values = table(rng)
    ours = variables(values)
    batches = [samples(rng, count, weighted=weighted) for count in (7, 1 + 1, 13, 3)]

    def run():
        ids = [b[0].to_sparse() if sparse else b[0] for b in batches]
        weights = [b[1].to_sparse() if sparse else b[1] for b in batches] if weighted else None
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(ours, ids, weights, combiners=[combiner] * 4)
            loss = tf.add_n([tf.reduce_sum(out**2) for out in outs])
        return outs, tape.gradient(loss, ours)

    outs, gradients = (tf.function(run) if graph else run)()
    for out, gradient, (keys, weights) in zip(outs, gradients, batches, strict=True):
        vectors, of_table = expected(values, keys, weights, combiner)
        np.testing.assert_allclose(out, vectors, rtol=1e-5, atol=1e-6)
        assert gradient.indices.dtype == tf.int64
        np.testing.assert_allclose(dense(gradient, ROWS), of_table, rtol=1e-5, atol=1e-5)


def test_a_variable_may_come_twice_in_one_call():
    rng = np.random.default_rng(1)
    values = table(rng)
    (one, _), (two, _) = samples(rng, 5), samples(rng, 4)
    for variable in variables(values):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse([variable, variable], [one, two], combiners=["sum", "mean"])
            loss = tf.reduce_sum(outs[0] ** 2) + tf.reduce_sum(outs[1] ** 2)
        gradient = tape.gradient(loss, variable)
        first, second = expected(values, one, None, "sum"), expected(values, two, None, "mean")
        np.testing.assert_allclose(outs[0], first[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outs[1], second[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dense(gradient, ROWS), first[1] + second[1], rtol=1e-5, atol=1e-5)


def test_weights_have_a_gradient_too():
    rng = np.random.default_rng(2)
    values = table(rng)
    keys, weights = samples(rng, 6, weighted=True)
    variable, twin = sok.Variable(values), tf.Variable(values)
    flat = tf.Variable(weights.values)
    with tf.GradientTape(persistent=True) as tape:
        out = sok.lookup_sparse(variable, keys, keys.with_values(tf.convert_to_tensor(flat)), "mean")
        theirs = tf.nn.embedding_lookup_sparse(
            twin, keys.to_sparse(), keys.with_values(tf.convert_to_tensor(flat)).to_sparse(), combiner="mean"
        )
        loss, their_loss = tf.reduce_sum(out**2), tf.reduce_sum(theirs**2)
    np.testing.assert_allclose(
        tape.gradient(loss, flat), tape.gradient(their_loss, flat), rtol=1e-4, atol=1e-5
    )


def test_any_64_bit_key_has_a_row():
    variable = sok.DynamicVariable(dimension=3, initializer="0.5")
    keys = tf.constant([-(2**63), -1, 0, 2**63 - 1, 2**31], tf.int64)
    with tf.GradientTape() as tape:
        out = tf.nn.embedding_lookup(variable, keys)
        loss = tf.reduce_sum(out)
    np.testing.assert_array_equal(out, np.full((5, 3), 0.5))
    np.testing.assert_array_equal(tape.gradient(loss, variable).indices, keys)
    np.testing.assert_array_equal(variable.size, [5, 3])


def test_keys_of_any_shape_and_integer_type_can_be_read():
    variable = sok.DynamicVariable(dimension=2, var_type="hbm", key_type=tf.int32, initializer="ones")
    assert tf.nn.embedding_lookup(variable, tf.constant([[1, 2, 3], [3, 2, 1]], tf.int32)).shape == (2, 3, 2)
    assert tf.nn.embedding_lookup(variable, tf.zeros([0], tf.int64)).shape == (0, 2)
    assert sok.export(variable)[0].dtype == tf.int32
    dense = sok.all2all_dense_embedding(variable, tf.constant([[1, 9]]))
    np.testing.assert_array_equal(dense, np.ones((1, 2, 2)))
    assert sok.all2all_dense_embedding(variable, []).shape == (0, 2)
    for keys in ([2**40], (2**40,), np.array([2**40]), np.array([2**40], np.uint64)):
        assert variable.sparse_read(keys).shape == (1, 2)
    assert variable.sparse_read(7).shape == (2,)
    np.testing.assert_array_equal(variable.table.rows().keys, [1, 2, 3, 7, 9, 2**40])


def test_an_empty_batch_gives_zeros_of_its_shape():
    variable = sok.DynamicVariable(dimension=4)
    empty = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0, 0])
    np.testing.assert_array_equal(sok.lookup_sparse(variable, empty, combiners="sum"), np.zeros((3, 4)))
    none = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), tf.zeros([0], tf.int64))
    assert sok.lookup_sparse(variable, none).shape == (0, 4)


def test_a_read_without_training_makes_no_rows():
    variable = sok.DynamicVariable(dimension=2, initializer="ones")
    sok.assign(variable, [3], [[5.0, 6.0]])
    ids = tf.ragged.constant([[3, 4], [4]], dtype=tf.int64)
    out = sok.lookup_sparse(variable, ids, combiners="sum", training=False)
    np.testing.assert_array_equal(out, [[5, 6], [0, 0]])
    np.testing.assert_array_equal(variable.indices, [3])


def test_the_low_frequency_filter_admits_a_share_of_the_new_keys_and_all_resident_ones():
    variable = sok.DynamicVariable(dimension=1, initializer="ones", filter_ratio=0.25)
    old = np.arange(100)
    sok.assign(variable, old, np.ones((100, 1)))
    new = np.arange(100, 4100)
    ids = tf.RaggedTensor.from_row_lengths(np.concatenate([old, new]), np.ones(4100, np.int64))
    out = sok.lookup_sparse(variable, ids, combiners="sum", use_low_frequency_filter=True).numpy()
    assert (out[:100] == 1).all()
    admitted = int(variable.size[0]) - 100
    assert admitted == out[100:].sum() and 800 < admitted < 1200
    never = sok.DynamicVariable(dimension=1, initializer="ones", filter_ratio=0.0)
    out = sok.lookup_sparse(never, ids, combiners="sum", use_low_frequency_filter=True)
    assert not out.numpy().any() and int(never.size[0]) == 0


IDS = tf.ragged.constant([[1]], dtype=tf.int64)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda v: dict(params=[v], sp_ids=[IDS, IDS]), "params"),
        (lambda v: dict(params=[v], sp_ids=[IDS], combiners=["sum", "sum"]), "combiners"),
        (lambda v: dict(params=[v], sp_ids=[IDS], combiners=["max"]), "'max'"),
        (lambda v: dict(params=[v], sp_ids=[IDS], sp_weights=[None, None]), "sp_weights"),
        (lambda v: dict(params=[v], sp_ids=[tf.constant([[1]])]), "sp_ids"),
        (lambda v: dict(params=[v], sp_ids=[tf.ragged.constant([[1.0]])]), "integers"),
        (lambda v: dict(params=[tf.Variable([[1.0]])], sp_ids=[IDS]), "sok variables"),
        (lambda v: dict(params=[v], sp_ids=[IDS], sp_weights=[tf.ragged.constant([[1.0, 2.0]])]), "weights"),
    ],
)
def test_bad_input_is_named_and_makes_no_rows(arguments, named):
    variable = sok.DynamicVariable(dimension=2)
    with pytest.raises(ValueError, match=named):
        sok.lookup_sparse(**arguments(variable))
    assert int(variable.size[0]) == 0


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("sparse", [False, True], ids=["ragged", "sparse"])
@pytest.mark.parametrize(
    ("lengths", "named"),
    [([1, 0], "3 weights but hold: 1"), ([1, 2], "differ in sample 0"), ([0, 0], "hold: 0")],
)
def test_weights_should_fit_the_keys_in_every_mode(lengths, named, sparse, graph):
    variable = sok.DynamicVariable(dimension=2)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([4, 5, 6], tf.int64), [2, 1])
    weights = tf.RaggedTensor.from_row_lengths(tf.ones([sum(lengths)]), lengths)

    def look_up(ids, weights):
        if sparse:
            ids, weights = ids.to_sparse(), weights.to_sparse()
        return sok.lookup_sparse(variable, ids, weights, combiners="sum")

    if graph:
        spec = [tf.RaggedTensorSpec([None, None], tf.int64), tf.RaggedTensorSpec([None, None], tf.float32)]
        look_up = tf.function(look_up, input_signature=spec)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=named):
        look_up(ids, weights)
    assert int(variable.size[0]) == 0


def test_an_embedding_variable_of_deeprec_is_refused_with_the_way_out():
    class EmbeddingVariable:
        target_gpu = -1

    with pytest.raises(ValueError, match=r"EmbeddingVariable.*sok.DynamicVariable"):
        sok.lookup_sparse([EmbeddingVariable()], [IDS], combiners=["sum"])


@pytest.mark.parametrize("key", [-1, ROWS])
def test_a_key_outside_of_a_static_table_is_refused(key):
    variable = sok.Variable(table(np.random.default_rng(3)))
    with pytest.raises(ValueError, match=f"but one is: {key}"):
        sok.lookup_sparse(variable, tf.ragged.constant([[key]], dtype=tf.int64))


def test_vectors_of_an_eager_lookup_stay_as_they_are_while_later_ones_run():
    table = sok.DynamicVariable(dimension=16, initializer="normal")
    first = tf.nn.embedding_lookup(table, tf.range(4096, dtype=tf.int64))
    before = first.numpy().copy()
    for start in (4096, 8192, 12288):  # they would take the memory of the first if it were given back
        tf.nn.embedding_lookup(table, tf.range(start, start + 4096, dtype=tf.int64))
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, tf.range(4096, dtype=tf.int64)), before)
