"""What EasyRec asks of SparseOperationKit: TensorFlow 1 style, under the names of 2023.

    python sok_easyrec.py <directory>           torchrun --nproc-per-node=2 sok_easyrec.py <directory>

Graphs, placeholders and sessions; a train operation with a global step; rows by key, saved and restored.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

# EasyRec imports each in a try block of its own and goes on without where one fails.
try:
    from sparse_operation_kit import experiment as sok
except ImportError:
    sok = None
try:
    from sparse_operation_kit.experiment import raw_ops
except ImportError:
    raw_ops = None
try:
    from sparse_operation_kit.experiment.communication import num_gpus
except ImportError:
    num_gpus = None

V1 = tf.compat.v1
DIM, SAMPLES, STEPS = 8, 24, 40


def build(ids, lengths, labels):
    """The graph of the model: a dynamic table, a dense layer, and the operation that trains both."""
    table = sok.DynamicVariable(dimension=DIM, initializer='random {"stddev":0.0025}', name="user_id")
    assert isinstance(table, sok.DynamicVariable) and table.backend_type == "hbm"
    batch = tf.RaggedTensor.from_row_lengths(ids, lengths).to_sparse()
    (pooled,) = sok.lookup_sparse([table], [batch], combiners=["sum"])
    weights = tf.Variable(tf.constant(np.linspace(-1, 1, DIM), tf.float32)[:, None], name="dense")
    logits = tf.squeeze(pooled @ weights, 1)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
    step = V1.train.get_or_create_global_step()
    optimizer = sok.OptimizerWrapper(V1.train.AdagradOptimizer(0.3))
    variables = [v for v in V1.trainable_variables() if v is table or v is weights]
    assert len(variables) == 2 and sok.filter_variables(variables) == ([table], [weights])
    gradients = V1.gradients(loss / num_gpus(), variables)
    return (
        table,
        weights,
        logits,
        loss,
        optimizer.apply_gradients(zip(gradients, variables), global_step=step),
    )


def main(directory):
    assert None not in (sok, raw_ops, num_gpus), "EasyRec would believe that SOK is not installed"
    sok.init()
    rank, size = sok.communication.rank(), num_gpus()
    for operation in ("dummy_var_handle", "dummy_var_sparse_read", "dummy_var_export"):
        try:
            getattr(raw_ops, operation)
        except NotImplementedError as error:
            assert "use" in str(error)
        else:
            raise AssertionError(f"{operation} runs on GPUs only")
    rng = np.random.default_rng(rank)
    lengths = rng.integers(1, 4, SAMPLES)
    ids = rng.integers(-(2**62), 2**62, 50)[rng.integers(0, 50, lengths.sum())]
    feeds = (ids, lengths, rng.integers(0, 2, SAMPLES).astype(np.float32))

    def placeholders():
        return [V1.placeholder(t, [None]) for t in (tf.int64, tf.int64, tf.float32)]

    with tf.Graph().as_default(), V1.Session() as session:
        inputs = placeholders()
        table, weights, logits, loss, train = build(*inputs)
        feed = dict(zip(inputs, feeds))
        session.run(V1.global_variables_initializer())
        losses = [session.run([loss, train], feed)[0] for _ in range(STEPS)]
        assert losses[-1] < 0.8 * losses[0], losses
        assert session.run(V1.train.get_global_step()) == STEPS
        predicted, dense = session.run([logits, weights], feed)
    sok.dump(directory / "easyrec", [table])

    with tf.Graph().as_default(), V1.Session() as session:
        inputs = placeholders()
        table, weights, logits, _, _ = build(*inputs)
        session.run(V1.global_variables_initializer())
        assert len(table.table) == 0
    sok.load(directory / "easyrec", [table])
    with V1.Session(graph=logits.graph) as session, logits.graph.as_default():
        session.run(V1.global_variables_initializer())
        weights.load(dense, session)
        np.testing.assert_allclose(session.run(logits, dict(zip(inputs, feeds))), predicted, rtol=1e-5)
    keys = np.unique(sok.communication.allgather(tf.constant(ids)))
    np.testing.assert_array_equal(table.table.rows().keys, keys[keys.view(np.uint64) % size == rank])
    print(f"rank {rank} of {size}: all well", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
