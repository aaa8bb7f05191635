"""A click model in the form of DLRM on TensorFlow, trained by two processes that share its embeddings.

    torchrun --standalone --nproc-per-node=2 examples/sok_dlrm.py
    python examples/sok_dlrm.py                                       # the same by one process

Four categorical features with ids from all of int64, multi-hot, meet four dense ones. Embeddings live in
DynamicVariables, spread over the processes by key; the dense part is a copy in each, its gradients averaged.
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok
from sparse_operation_kit.communication import allreduce, broadcast, num_ranks, rank

FEATURES, DENSE, DIM, IDS, BATCH = 4, 4, 16, 2000, 512
TASTES = np.random.default_rng(7).normal(size=(FEATURES, IDS))
MIX = np.uint64(0x9E3779B97F4A7C15)


def clicks(rng: np.random.Generator, size: int) -> tuple[list[tf.RaggedTensor], tf.Tensor, tf.Tensor]:
    """Samples whose clicks follow hidden tastes of the ids."""
    score, ids = np.zeros(size), []
    for tastes in TASTES:
        lengths = rng.integers(1, 4, size)
        numbers = np.minimum(rng.zipf(1.3, lengths.sum()) - 1, IDS - 1)
        score += np.bincount(np.repeat(np.arange(size), lengths), tastes[numbers], size) / lengths
        keys = (numbers.astype(np.uint64) * MIX).view(np.int64)  # spread over all of int64
        ids.append(tf.RaggedTensor.from_row_lengths(keys, lengths))
    dense = rng.normal(size=(size, DENSE)).astype(np.float32)
    clicked = rng.random(size) < 1 / (1 + np.exp(-(score + dense[:, 0])))
    return ids, tf.constant(dense), tf.constant(clicked[:, None], tf.float32)


class Dlrm(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [
            sok.DynamicVariable(DIM, name=f"feature_{i}", initializer="random") for i in range(FEATURES)
        ]
        tf.keras.utils.set_random_seed(0)  # the dense part begins alike in every process
        self.bottom = tf.keras.layers.Dense(DIM, activation="relu")
        self.middle, self.top = tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(1)

    def call(self, inputs, training: bool = True) -> tf.Tensor:
        ids, dense = inputs
        vectors = sok.lookup_sparse(self.tables, ids, combiners=["mean"] * FEATURES, training=training)
        stacked = tf.stack([self.bottom(dense), *vectors], axis=1)
        products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, (FEATURES + 1) ** 2])
        flat = tf.reshape(stacked, [-1, (FEATURES + 1) * DIM])
        return self.top(self.middle(tf.concat([dense, flat, products], axis=1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    sok.init("torch" if "WORLD_SIZE" in os.environ else "single")
    model, rng, dense_optimizer = Dlrm(), np.random.default_rng(100 + rank()), tf.keras.optimizers.Adam(0.01)
    row_optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
    loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(ids, dense, labels) -> tf.Tensor:
        with tf.GradientTape() as tape:  # gradients are summed over the processes, hence the division
            loss = loss_of(labels, model((ids, dense))) / num_ranks()
        of_rows, of_dense = tape.gradient(loss, [model.tables, model.trainable_variables])
        row_optimizer.apply_gradients(zip(of_rows, model.tables))
        summed = [allreduce(gradient, "sum") for gradient in of_dense]
        dense_optimizer.apply_gradients(zip(summed, model.trainable_variables))
        return allreduce(loss, "sum")

    ids, dense, labels = clicks(np.random.default_rng(1), 4000)  # the same in every process
    model((ids, dense), training=False)
    dense_optimizer.build(model.trainable_variables)
    for number in range(1, steps + 1):
        loss = step(*clicks(rng, BATCH // num_ranks()))
        if rank() == 0 and number % 50 == 0:
            print(f"step {number}: loss {loss:.4f}", flush=True)
    before = float(loss_of(labels, model((ids, dense), training=False)))
    with tempfile.TemporaryDirectory() as folder:
        folder = broadcast(np.frombuffer(folder.encode(), np.uint8), 0).numpy().tobytes().decode()
        sok.dump(f"{folder}/weights", model.tables, row_optimizer)
        for table in model.tables:
            table.table.clear()
        sok.load(f"{folder}/weights", model.tables, row_optimizer)
        allreduce(np.zeros(1))  # nobody removes the folder before all have read it
    after = float(loss_of(labels, model((ids, dense), training=False)))
    print(f"rank {rank()}: held-out loss {before:.4f}, after a reload {after:.4f}", flush=True)


if __name__ == "__main__":
    main()
