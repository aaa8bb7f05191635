"""A click model in the form of DLRM on TensorFlow, trained by two processes that share its embeddings.

    torchrun --standalone --nproc-per-node=2 examples/sok_dlrm.py
    python examples/sok_dlrm.py                                       # the same by one process

Four categorical features with ids from all of int64, multi-hot, meet four dense ones: embeddings and a bottom
network interact by dot products, and a top network predicts the click. Embeddings live in DynamicVariables,
spread over the processes by key; the dense part is a copy in each, and its gradients are averaged.
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok
from sparse_operation_kit.communication import tool

FEATURES, DENSE, DIM, IDS = 4, 4, 16, 2000
MIX = np.uint64(0x9E3779B97F4A7C15)


class Clicks:
    """A stream of samples whose clicks follow hidden tastes of the ids."""

    def __init__(self, seed: int) -> None:
        self._tastes = np.random.default_rng(7).normal(size=(FEATURES, IDS))
        self._rng = np.random.default_rng(seed)

    def batch(self, size: int) -> tuple[list[tf.RaggedTensor], tf.Tensor, tf.Tensor]:
        rng, score, ids = self._rng, np.zeros(size), []
        for tastes in self._tastes:
            lengths = rng.integers(1, 4, size)
            numbers = np.minimum(rng.zipf(1.3, lengths.sum()) - 1, IDS - 1)
            score += np.bincount(np.repeat(np.arange(size), lengths), tastes[numbers], size) / lengths
            keys = (numbers.astype(np.uint64) * MIX).view(np.int64)  # spread over all of int64
            ids.append(tf.RaggedTensor.from_row_lengths(keys, lengths))
        dense = rng.normal(size=(size, DENSE)).astype(np.float32)
        clicks = rng.random(size) < 1 / (1 + np.exp(-(score + dense[:, 0])))
        return ids, tf.constant(dense), tf.constant(clicks[:, None], tf.float32)


class Dlrm(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [
            sok.DynamicVariable(
                dimension=DIM, name=f"feature_{i}", max_capacity=1 << 16, initializer="random"
            )
            for i in range(FEATURES)
        ]
        tf.keras.utils.set_random_seed(0)  # the dense part begins alike in every process
        self.bottom = tf.keras.Sequential([tf.keras.layers.Dense(DIM, activation="relu")])
        self.top = tf.keras.Sequential(
            [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(1)]
        )

    def call(self, inputs, training: bool = True) -> tf.Tensor:
        ids, dense = inputs
        vectors = sok.lookup_sparse(self.tables, ids, combiners=["mean"] * FEATURES, training=training)
        stacked = tf.stack([self.bottom(dense), *vectors], axis=1)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        flat = tf.reshape(products, [-1, (FEATURES + 1) ** 2])
        return self.top(tf.concat([dense, tf.reshape(stacked, [-1, (FEATURES + 1) * DIM]), flat], axis=1))


def average(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The mean over the processes; with horovod this is hvd.allreduce."""

    def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
        flat = np.concatenate([a.ravel() for a in arrays])
        mean = np.mean(tool().all_gather(flat), axis=0, dtype=np.float32)
        parts = np.split(mean, np.cumsum([a.size for a in arrays])[:-1])
        return [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]

    averaged = tf.numpy_function(exchange, gradients, [tf.float32] * len(gradients))
    for new, old in zip(averaged, gradients, strict=True):
        new.set_shape(old.shape)
    return averaged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=512, help="samples of all processes together")
    options = parser.parse_args()

    sok.init("torch" if "WORLD_SIZE" in os.environ else "single")
    rank, size = tool().rank, tool().size
    model, clicks = Dlrm(), Clicks(seed=100 + rank)
    dense_optimizer = tf.keras.optimizers.Adam(0.01)
    row_optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
    loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(ids, dense, labels) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # The rows get the sum over the processes, so the mean of all samples needs this division.
            loss = loss_of(labels, model((ids, dense))) / size
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [*model.tables, *weights])
        row_optimizer.apply_gradients(zip(gradients[:FEATURES], model.tables, strict=True))
        of_weights = [g * size for g in average(gradients[FEATURES:])]
        dense_optimizer.apply_gradients(zip(of_weights, weights, strict=True))
        return loss * size

    first = Clicks(seed=0).batch(8)
    model(first[:2], training=False)
    dense_optimizer.build(model.trainable_variables)
    losses = []
    for number in range(options.steps):
        losses.append(float(step(*clicks.batch(options.batch // size))))
        if rank == 0 and (number + 1) % 50 == 0:
            print(f"step {number + 1}: loss {np.mean(losses[-50:]):.4f}", flush=True)

    ids, dense, labels = Clicks(seed=1).batch(4000)  # the same in every process
    before = float(loss_of(labels, model((ids, dense), training=False)))
    with tempfile.TemporaryDirectory() as folder:
        folder = tool().all_gather(np.frombuffer(folder.encode(), np.uint8))[0].tobytes().decode()
        sok.dump(f"{folder}/weights", model.tables, row_optimizer)
        for table in model.tables:
            table.table.clear()
        sok.load(f"{folder}/weights", model.tables, row_optimizer)
        tool().all_gather(np.zeros(1))  # nobody removes the folder before all have read it
    after = float(loss_of(labels, model((ids, dense), training=False)))
    rows = sum(int(table.size[0]) for table in model.tables)
    print(
        f"rank {rank} of {size}: {rows} rows, held-out loss {before:.4f}, after a reload {after:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
