"""A trained model of sparse_operation_kit reads from a dump or a log: the outputs of training=False."""

import numpy as np
import pytest
import tensorflow as tf

import embstore
import sparse_operation_kit as sok
from embstore.serving import Reader


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.user = sok.DynamicVariable(dimension=4, initializer="normal", name="user")
        self.more = {"items": [sok.DynamicVariable(dimension=6, initializer="uniform", name="item")]}
        self.dense = tf.keras.layers.Dense(2)

    def call(self, inputs, training=False):
        ids, weights = inputs
        variables = [self.user, self.more["items"][0], self.user]
        user, item, weighted = sok.lookup_sparse(
            variables, [ids, ids, ids], [None, None, weights], ["sum", "mean", "mean"], training=training
        )
        return self.dense(tf.concat([user, item, weighted], 1))

    def tables(self):
        return {"sok": {v.name: v.table for v in (self.user, self.more["items"][0])}}


def batch(seed, ids=50):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 4, 9)
    keys = generator.integers(-ids, ids, lengths.sum())
    weights = generator.random(len(keys), np.float32)
    return tf.RaggedTensor.from_row_lengths(keys, lengths), tf.RaggedTensor.from_row_lengths(weights, lengths)


@pytest.fixture
def trained(tmp_path):
    sok.init()
    model = Model()
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    for seed in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch(seed, 20), training=True) ** 2)
        variables = sok.trainable_variables(model)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return model


def test_a_model_reads_from_a_dump_to_the_bit_and_needs_its_variables_no_more(trained, tmp_path):
    embstore.dump(tmp_path / "d", trained.tables())
    expected = [trained(batch(seed)).numpy() for seed in range(4)]
    user, kept = trained.user, trained.dense.kernel.numpy()
    model = sok.serving_model(trained, tmp_path / "d", cache=tmp_path / "c")
    assert model is trained and isinstance(model.user, sok.ServedVariable)
    user.table.close()
    for seed, wanted in enumerate(expected):
        np.testing.assert_array_equal(model(batch(seed)).numpy(), wanted)
        np.testing.assert_array_equal(tf.function(model)(batch(seed)).numpy(), wanted)
    np.testing.assert_array_equal(model.dense.kernel.numpy(), kept)
    assert sok.trainable_variables(model) == []


def test_it_follows_a_log(trained, tmp_path):
    log = embstore.IncrementLog.create(tmp_path / "d", trained.tables())
    tables = trained.tables()
    before = trained(batch(1)).numpy()
    reader = Reader(tmp_path / "d", cache=tmp_path / "c")
    model = sok.serving_model(trained, reader, collection="sok")
    np.testing.assert_array_equal(model(batch(1)).numpy(), before)
    keys = batch(1)[0].values.numpy()
    next(iter(tables["sok"].values())).insert_or_assign(keys, np.ones((len(keys), 4), np.float32))
    log.append(tables)
    reader.follow()
    assert not np.array_equal(model(batch(1)).numpy(), before)
    (sums,) = sok.lookup_sparse([model.user], [batch(1)[0]], combiners=["sum"])
    lengths = batch(1)[0].row_lengths().numpy()
    np.testing.assert_array_equal(sums.numpy(), np.repeat(lengths[:, None], 4, 1).astype(np.float32))
    rows = sok.all2all_dense_embedding(model.user, tf.constant([[keys[0], 10**9]]))
    np.testing.assert_array_equal(rows.numpy(), [[[1] * 4, [0] * 4]])


def test_what_is_missing_is_said_and_nothing_changes(trained, tmp_path):
    embstore.dump(tmp_path / "d", {"sok": {trained.user.name: trained.user.table}})
    with pytest.raises(KeyError, match="variable 'item.* is not in .*d, which has: sok/user"):
        sok.serving_model(trained, tmp_path / "d", cache=tmp_path / "c")
    assert isinstance(trained.user, sok.DynamicVariable)
    with pytest.raises(ValueError, match="should have a DynamicVariable"):
        sok.serving_model(tf.keras.layers.Dense(2), tmp_path / "d", cache=tmp_path / "c")
