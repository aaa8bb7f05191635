"""What HugeCTR's own examples and tests ask of SparseOperationKit.

    python sok_hugectr.py <directory>           torchrun --nproc-per-node=2 sok_hugectr.py <directory>

A training loop over layers, odd capacities, a learning rate assigned inside a tf.function, evictions inside a
tape, static tables under a plain optimizer, dump, load and increments.
"""

import os
import sys
import warnings
from datetime import datetime, timezone
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok

DIM, SAMPLES, STEPS = 4, 16, 30


def ragged(rng, rows, samples=SAMPLES):
    lengths = rng.integers(1, 5, samples)
    return tf.RaggedTensor.from_row_lengths(rng.integers(0, rows, lengths.sum()), lengths)


class Model(tf_keras.Model):
    def __init__(self, capacities):
        super().__init__()
        self.tables = [
            sok.DynamicVariable(
                dimension=DIM,
                var_type="hybrid",
                initializer="uniform",
                init_capacity=capacity,
                max_capacity=capacity,
            )
            for capacity in capacities
        ]
        self.dense = tf_keras.layers.Dense(1, kernel_initializer=tf_keras.initializers.GlorotUniform(3))

    def call(self, ids):
        pooled = sok.lookup_sparse(self.tables, ids, combiners=["mean"] * len(self.tables))
        return self.dense(tf.concat(pooled, axis=1))


def training_example(rank, size, directory):
    rng = np.random.default_rng(11)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Model(1000 + rng.integers(1, 199, 3))
    assert len(caught) == 3 and all("2048" in str(w.message) or "1024" in str(w.message) for w in caught)
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(1.0))
    dense_optimizer = tf_keras.optimizers.legacy.SGD(0.3)
    local = np.random.default_rng(rank)
    ids = [ragged(local, 60) for _ in model.tables]
    labels = tf.constant(local.normal(size=(SAMPLES, 1)), tf.float32)
    model(ids)

    @tf.function
    def step(rate):
        optimizer.lr.assign(rate)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2) / size
        tables, others = sok.filter_variables(model.trainable_variables)
        assert {id(t) for t in tables} == {id(t) for t in model.tables} and len(others) == 2
        of_tables, of_others = tape.gradient(loss, [tables, others])
        optimizer.apply_gradients(zip(of_tables, tables))
        of_others = [sok.communication.allreduce(g, "sum") for g in of_others]
        dense_optimizer.apply_gradients(zip(of_others, others))
        return sok.communication.allreduce(loss, "sum")

    losses = [float(step(tf.constant(0.5 if i < STEPS // 2 else 0.25))) for i in range(STEPS)]
    assert losses[-1] < 0.5 * losses[0], losses
    assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
    sok.dump(directory / "example", model.tables, optimizer)
    rows = [sok.export(table) for table in model.tables]
    for table in model.tables:
        keys, values = sok.export(table)
        sok.assign(table, keys, tf.zeros_like(values))
    sok.load(directory / "example", model.tables, optimizer)
    for table, (keys, values) in zip(model.tables, rows):
        for found, expected in zip(sok.export(table), (keys, values)):
            np.testing.assert_array_equal(found, expected)
    # Exactly what was looked up since a moment, of all ranks.
    sok.communication.allreduce(0.0, "sum")
    moment = datetime.now(timezone.utc)
    moment = datetime.fromtimestamp(
        float(sok.communication.allreduce(tf.constant(moment.timestamp(), tf.float64), "max")), timezone.utc
    )
    batch = [ragged(np.random.default_rng(100 + rank), 60) for _ in model.tables]
    sok.lookup_sparse(model.tables, batch)
    found, _ = sok.incremental_model_dump(model.tables, moment)
    for keys, ids_of_table in zip(found, batch):
        everyones = sok.communication.allgather(ids_of_table.values)
        np.testing.assert_array_equal(keys, np.unique(everyones))


def plain_optimizer_example(rank, size, directory):
    """Static tables, trained by Keras itself, dumped with its states."""
    values = np.random.default_rng(1).normal(size=(29, DIM)).astype(np.float32)

    def make():
        return [
            sok.Variable(values, name="one"),
            sok.Variable(values, name="two", mode=f"localized:{size - 1}"),
        ]

    tables, optimizer = make(), tf_keras.optimizers.legacy.Adam(0.1)
    ids = [ragged(np.random.default_rng(rank + i), 29) for i in range(2)]

    def step(tables, optimizer):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(tables, ids, combiners=["sum", "sum"])
            loss = tf.add_n([tf.reduce_sum(out**2) for out in outs])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))

    step(tables, optimizer)
    sok.dump(directory / "plain", tables, optimizer)
    copies, again = make(), tf_keras.optimizers.legacy.Adam(0.1)
    sok.load(directory / "plain", copies, again)
    for both in ((tables, optimizer), (copies, again)):
        step(*both)
    assert int(optimizer.iterations) == int(again.iterations) == 2
    for table, copy in zip(tables, copies):
        assert (table.numpy() != copy.numpy()).sum() == 0


def eviction_example(rank, size):
    """Each rank has rows of its own, more than there is room for."""
    table = sok.DynamicVariable(dimension=DIM, var_type="hybrid", max_capacity=128, initializer="ones")
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(0.5))
    seen = {}
    for number in range(4):
        keys = np.arange(100 * number, 100 * number + 100) * size + rank
        with tf.GradientTape() as tape:
            vectors, gone, values = sok.sparse_read_and_evict(table, keys)
            loss = tf.reduce_sum(vectors)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        seen.update(zip(gone.numpy().tolist(), values.numpy().tolist()))
    left = dict(zip(*(part.numpy().tolist() for part in sok.export(table))))
    assert len(left) <= 128 and not set(left) & set(seen)
    # Every row is here or was reported, and was trained once.
    assert set(left) | set(seen) == set((np.arange(400) * size + rank).tolist())
    assert all(row == [0.5] * DIM for row in [*left.values(), *seen.values()])


def loss_scaling_example():
    try:
        tf_keras.mixed_precision.LossScaleOptimizer(sok.OptimizerWrapper(tf_keras.optimizers.legacy.SGD(0.1)))
    except TypeError:
        return
    raise AssertionError("loss scaling of sok variables should be refused")


def session_example(rank, size):
    """The suite for TensorFlow 1: placeholders and sessions, against the gradients of all ranks."""
    v1 = tf.compat.v1
    values = np.random.default_rng(2).normal(size=(29, DIM)).astype(np.float32)
    batches = [ragged(np.random.default_rng(50 + r), 29) for r in range(size)]
    twin = values.astype(np.float64).copy()
    for batch in batches:
        np.subtract.at(twin, batch.values.numpy(), 0.5)
    mine = {"keys": batches[rank].values.numpy(), "lengths": batches[rank].row_lengths().numpy()}
    with tf.Graph().as_default(), v1.Session() as session:
        static = sok.Variable(values)
        dynamic = sok.DynamicVariable(dimension=DIM, var_type="hbm", initializer="zeros")
        keys, lengths = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None])
        ids = tf.RaggedTensor.from_row_lengths(keys, lengths)
        outs = sok.lookup_sparse([static, dynamic], [ids, ids], combiners=["sum", "sum"])
        loss = tf.add_n([tf.reduce_sum(out) for out in outs])
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.5))
        gradients = v1.gradients(loss, [static, dynamic])
        train = optimizer.apply_gradients(zip(gradients, [static, dynamic]))
        session.run(v1.global_variables_initializer())
        local = np.arange(rank, 29, size)
        session.run(sok.assign(dynamic, local, values[local]))
        session.run(train, {keys: mine["keys"], lengths: mine["lengths"]})
        np.testing.assert_allclose(session.run(static), twin[local], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dynamic.table.rows().values, twin[local], rtol=1e-5, atol=1e-6)


def main(directory):
    sok.init()
    rank, size = sok.communication.rank(), sok.communication.num_ranks()
    training_example(rank, size, directory)
    plain_optimizer_example(rank, size, directory)
    eviction_example(rank, size)
    loss_scaling_example()
    session_example(rank, size)
    print(f"rank {rank} of {size}: all well", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
