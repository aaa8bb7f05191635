"""Variables whose options decide which rows stay: retention_ranks.py <directory> [torch].

Each rank trains one that goes on and one that is dumped and loaded in the middle, and compares them.
"""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok

FREQUENT = {"evict_strategy": "kLfu", "admission": "frequency", "shared_rows": 2, "max_capacity": 64}
KINDS = {
    "ttl in lookups": {"evict_strategy": "kStep", "ttl": 9},
    "frequency": FREQUENT,
    "importance": {**FREQUENT, "evict_strategy": "kImportance", "half_life": 20, "start_from_shared": False},
    "bytes": {"evict_strategy": "kLfu", "max_bytes": 12_000, "max_bucket_size": 32},
}


def train(variable, optimizer, first, steps):
    """Few ids are frequent, and others are every ten steps; a step depends on its number and rank alone."""
    tool = sok.communication.tool_or_single()
    for step in range(first, first + steps):
        rng = np.random.default_rng([step, tool.rank])
        keys = (400 ** rng.random(41)).astype(np.int64) + 97 * (step // 10)
        ids = tf.RaggedTensor.from_row_lengths(keys, np.full(41, 1))
        with tf.GradientTape() as tape:
            vectors = sok.lookup_sparse(variable, ids, combiners="sum")
            loss = tf.reduce_sum(vectors * rng.standard_normal(vectors.shape).astype(np.float32))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])


def made(kind, name):
    options = {"dimension": 3, "initializer": "normal", "name": name, **KINDS[kind]}
    return sok.DynamicVariable(**options), sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))


def bits(variable):
    """Everything that decides what the table does next."""
    table = variable.table
    rows, shared, counters = table.rows(), table.shared_rows(), table.admission_counters()
    parts = [rows.keys, rows.values, rows.states, rows.scores, shared.keys, shared.values, shared.states]
    return [part.tobytes() for part in parts] + [None if counters is None else counters.tobytes()]


def continues(kind, directory):
    """A variable that came back from a dump trains on like the one that was dumped."""
    name = kind.replace(" ", "_")
    variable, optimizer = made(kind, name)
    train(variable, optimizer, 0, 23)
    sok.dump(f"{directory}/{name}", variable, optimizer)
    back, again = made(kind, name)
    sok.load(f"{directory}/{name}", back, again)
    assert bits(back) == bits(variable), "as dumped"
    for one, rule in ((variable, optimizer), (back, again)):
        train(one, rule, 23, 22)
    assert bits(back) == bits(variable), "and after more steps"
    return variable


if __name__ == "__main__":
    sok.init(sys.argv[2] if len(sys.argv) > 2 else "torch")
    for kind in KINDS:
        continues(kind, sys.argv[1])
    print("all well")
