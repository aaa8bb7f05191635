"""One side of the comparison with TFRA, in a process (and an environment) of its own; run by `tfra`.

    tfra_child.py ours|theirs FOLDER lookup|adam THREADS

Reads the ids from FOLDER, fills its table, and then answers a line of standard input, the number of a step,
with the seconds that it took. "rows" is answered with vectors of the first batch, "memory" with the resident
bytes.
Needs TensorFlow and numpy, and the library that it measures.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

INITIAL = 0.0625
LEARNING_RATE = 0.01
FILL = 1 << 18


class Ours:
    def __init__(self, keys: np.ndarray, dim: int, adam: bool, threads: int) -> None:
        import embstore
        import sparse_operation_kit as sok

        embstore.set_num_threads(threads)
        sok.init("single")
        self.variable = sok.DynamicVariable(dimension=dim, initializer=str(INITIAL))
        self.optimizer = (
            sok.OptimizerWrapper(tf.keras.optimizers.legacy.Adam(LEARNING_RATE)) if adam else None
        )
        if adam:
            self.optimizer._create_slots([self.variable])
        self.variable.table.reserve(len(keys))
        for at in range(0, len(keys), FILL):
            tf.nn.embedding_lookup(self.variable, tf.constant(keys[at : at + FILL]))

    def look_up(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.nn.embedding_lookup(self.variable, keys)

    def train(self, keys: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(self.variable, keys) * gradient)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.variable), self.variable)])
        return loss


class Theirs:
    """TFRA's cuckoo table, sized twice for its keys, which is the faster way to fill it."""

    def __init__(self, keys: np.ndarray, dim: int, adam: bool, threads: int) -> None:
        import tensorflow_recommenders_addons as tfra

        de = self.de = tfra.dynamic_embedding
        self.variable = de.get_variable(
            "table",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=dim,
            initializer=tf.keras.initializers.Constant(INITIAL),  # random ones cost it a draw for every key
            init_size=2 * len(keys),
        )
        for at in range(0, len(keys), FILL):
            block = tf.constant(keys[at : at + FILL])
            self.variable.upsert(block, tf.fill([len(block), dim], INITIAL))
        if adam:
            self.shadow = de.shadow_ops.ShadowVariable(self.variable, name="shadow")
            self.optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adam(LEARNING_RATE))

    def look_up(self, keys: tf.Tensor) -> tf.Tensor:
        return self.variable.lookup(keys)

    def train(self, keys: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        distinct, inverse = tf.unique(keys)
        with tf.GradientTape() as tape:
            rows = self.de.shadow_ops.embedding_lookup(self.shadow, distinct)
            loss = tf.reduce_sum(tf.gather(rows, inverse) * gradient)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.shadow), self.shadow)])
        return loss


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status should have a line VmRSS but has none")


def main(which: str, folder: Path, work: str, threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    keys, batches = np.load(folder / "keys.npy"), np.load(folder / "batches.npy")
    gradient = tf.constant(np.load(folder / "gradient.npy"))
    side = {"ours": Ours, "theirs": Theirs}[which](keys, gradient.shape[1], work == "adam", threads)
    del keys
    look_up = tf.function(side.look_up)
    step = look_up if work == "lookup" else tf.function(lambda k: side.train(k, gradient))
    inputs = [tf.constant(batch) for batch in batches]
    answers.write(json.dumps("ready") + "\n")
    answers.flush()
    for line in sys.stdin:
        question = line.strip()
        if question == "memory":
            answer: object = resident_bytes()
        elif question == "rows":
            answer = look_up(inputs[0])[:100].numpy().tolist()
        else:
            start = time.perf_counter()
            step(inputs[int(question) % len(inputs)])
            answer = time.perf_counter() - start
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
