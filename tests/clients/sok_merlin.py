"""What Merlin Models asks of SparseOperationKit: layers of Keras 2 over static and dynamic tables.

python sok_merlin.py <directory>            torchrun --nproc-per-node=2 sok_merlin.py <directory>
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

import sparse_operation_kit as sok

ROWS, DIM, SAMPLES, STEPS = 101, 4, 32, 60


class DistributedEmbedding(tf_keras.layers.Layer):
    """Two features of fixed tables, one of a table for any ids, one that begins with given vectors."""

    def __init__(self, last_rank, pretrained):
        super().__init__()
        uniform = tf_keras.initializers.RandomUniform(-0.1, 0.1, seed=5)
        self.tables = [
            sok.Variable(shape=[ROWS, DIM], initializer=uniform, dtype=tf.float32),
            sok.Variable(
                shape=[ROWS, DIM], initializer=uniform, dtype=tf.float32, mode=f"localized:{last_rank}"
            ),
            sok.Variable(pretrained),
            sok.DynamicVariable(dimension=DIM, initializer="uniform"),
        ]
        for table in self.tables:
            if not any(table is known for known in self._trainable_weights):
                self._trainable_weights.append(table)

    def call(self, ids):
        pooled = []
        # One call for each kind of placement, as Merlin Models makes them.
        for chosen in ([0, 2], [1], [3]):
            pooled += sok.lookup_sparse(
                params=[self.tables[i] for i in chosen],
                sp_ids=[ids[i] for i in chosen],
                combiners=["mean"] * len(chosen),
            )
        return tf.concat(pooled, axis=1)


def main(directory):
    sok.init(use_legacy_optimizer=False)
    rank, size = sok.communication.rank(), sok.communication.num_ranks()
    rng = np.random.default_rng(7)
    pretrained = rng.normal(size=(ROWS, DIM)).astype(np.float32)

    def make():
        layer = DistributedEmbedding(size - 1, pretrained)
        return layer, tf_keras.layers.Dense(1, kernel_initializer=tf_keras.initializers.GlorotUniform(3))

    local = np.random.default_rng(rank)
    lengths = [local.integers(0, 4, SAMPLES) for _ in range(4)]
    ids = [tf.RaggedTensor.from_row_lengths(local.integers(0, ROWS, n.sum()), n) for n in lengths]
    labels = tf.constant(local.normal(size=(SAMPLES, 1)), tf.float32)

    layer, dense = make()
    # A feature whose vectors are known in advance.
    mine = np.arange(rank, ROWS, size)
    sok.assign(
        layer.tables[3], tf.constant(mine, dtype=tf.int64), tf.constant(pretrained[mine], dtype=tf.float32)
    )
    np.testing.assert_array_equal(layer.tables[2].numpy(), pretrained[rank::size])

    wrapper = sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.05))
    plain = tf_keras.optimizers.legacy.Adam(0.05)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((dense(layer(ids)) - labels) ** 2) / size
        tables, others = sok.filter_variables(layer.trainable_variables + dense.trainable_variables)
        assert len(tables) == 4 and len(others) == 2
        of_tables, of_others = tape.gradient(loss, [tables, others])
        wrapper.apply_gradients(zip(of_tables, tables))
        of_others = [sok.communication.allreduce(g, "sum") for g in of_others]
        plain.apply_gradients(zip(of_others, others))
        return sok.communication.allreduce(loss, "sum")

    losses = [float(step()) for _ in range(STEPS)]
    assert losses[-1] < 0.2 * losses[0], losses
    predicted = layer(ids)
    sok.dump(directory / "merlin", layer.tables, wrapper)

    again, _ = make()
    restored = [
        sok.DynamicVariable(dimension=DIM, name=t.name.partition(":")[0])
        if isinstance(t, sok.DynamicVariable)
        else sok.Variable(
            np.zeros((ROWS, DIM), np.float32),
            name=t.name.partition(":")[0],
            mode="distributed" if t.target_gpu < 0 else f"localized:{t.target_gpu}",
        )
        for t in layer.tables
    ]
    again.tables = restored
    second = sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.05))
    sok.load(directory / "merlin", restored, second)
    np.testing.assert_array_equal(again(ids), predicted)
    assert int(second.iterations) == STEPS
    for table, copy in zip(layer.tables, restored):
        for slot in ("m", "v"):
            one, two = (w.get_slot(t, slot) for w, t in ((wrapper, table), (second, copy)))
            dynamic = isinstance(table, sok.DynamicVariable)
            np.testing.assert_array_equal(*((s.values() if dynamic else s.numpy()) for s in (one, two)))
    print(f"rank {rank} of {size}: all well", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
