"""What two or three processes do together; torchrun starts it: ranks.py train|load <directory>.

`train` runs the scenarios and leaves dumps with what they should hold; `load` reads those into another number
of processes. Every rank checks for itself and fails by an assertion.
"""

import os
import sys
from datetime import datetime, timezone
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import tensorflow as tf
import tf_keras
from faces.sparse_operation_kit.oracle import OPTIMIZERS, SLOTS, LazyTable

import sparse_operation_kit as sok

ROWS, DIM = 29, 5
FOUR = ("distributed", "localized", "hybrid", "localized hybrid")


def make(kind, values, name=None):
    """A variable of this kind that holds these rows, whatever the number of ranks."""
    if kind == "distributed":
        return sok.Variable(values, name=name)
    last = sok.communication.tool().size - 1
    if kind == "localized":
        return sok.Variable(values, name=name, mode=f"localized:{last}")
    mode = f"localized:{last}" if kind.startswith("localized") else None
    variable = sok.DynamicVariable(
        dimension=values.shape[1], name=name, mode=mode, var_type=kind.split()[-1], initializer="0.125"
    )
    t = sok.communication.tool()
    mine = (
        np.arange(t.rank, len(values), t.size) if mode is None else np.arange(len(values) * (t.rank == last))
    )
    sok.assign(variable, mine, values[mine])
    return variable


def whole(variable):
    """Keys and rows of all ranks, by key."""
    t = sok.communication.tool()
    keys, rows = (np.concatenate(t.all_gather(part.numpy())) for part in sok.export(variable))
    order = np.argsort(keys)
    return keys[order], rows[order]


def ragged(rng, count):
    lengths = rng.integers(0, 4, count)
    return tf.RaggedTensor.from_row_lengths(rng.integers(0, ROWS, lengths.sum()), lengths)


def all_batches(seed, rank_count):
    return [ragged(np.random.default_rng([seed, rank]), 3 + 4 * rank) for rank in range(rank_count)]


def lookups(rank, size):
    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    variables = [make(kind, values) for kind in FOUR]
    ids = [all_batches(seed, size)[rank] for seed in range(len(FOUR))]
    combiners = ["sum", "mean", "mean", "sum"]

    def step():
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(variables, ids, combiners=combiners)
            loss = tf.add_n([tf.reduce_sum(out**2) for out in outs])
        return outs, tape.gradient(loss, variables)

    for run in (step, tf.function(step)):
        outs, gradients = run()
        for out, batch, combiner in zip(outs, ids, combiners):
            pool = np.sum if combiner == "sum" else np.mean
            rows = [values[k.numpy()] for k in batch]
            expected = np.stack([pool(r, axis=0) if len(r) else np.zeros(DIM) for r in rows])
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        for seed, (variable, gradient) in enumerate(zip(variables, gradients)):
            # Gradients of all ranks arrive, added up, where the row is.
            twin = tf.Variable(values)
            with tf.GradientTape() as tape:
                losses = []
                for batch in all_batches(seed, size):
                    each = tf.gather(twin, batch.values)
                    pool = (
                        tf.math.unsorted_segment_sum
                        if combiners[seed] == "sum"
                        else tf.math.unsorted_segment_mean
                    )
                    losses.append(tf.reduce_sum(pool(each, batch.value_rowids(), batch.nrows()) ** 2))
                loss = tf.add_n(losses)
            expected = tf.convert_to_tensor(tape.gradient(loss, twin)).numpy()
            keys, _ = sok.export(variable)
            local = np.zeros_like(expected)
            indices = gradient.indices.numpy()
            if isinstance(variable, sok.DistributedVariable):
                indices = indices * size + rank
            np.add.at(local, indices, gradient.values.numpy())
            np.testing.assert_allclose(local[keys.numpy()], expected[keys.numpy()], rtol=1e-4, atol=1e-4)
            others = np.setdiff1d(np.arange(ROWS), keys.numpy())
            assert not local[others].any()
    dense = sok.all2all_dense_embedding(variables[2], [[1, 2, 2], [28, 0, 3]])
    np.testing.assert_allclose(dense, values[[[1, 2, 2], [28, 0, 3]]])
    weights = ids[0].with_values(tf.fill(tf.shape(ids[0].values), 2.0))
    twice = sok.lookup_sparse([variables[0]], [ids[0]], [weights], combiners=["sum"])[0]
    np.testing.assert_allclose(twice, 2 * outs[0], rtol=1e-5)


def shapes(rank, size):
    if size == 2:
        variable = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=tf.float32)
        assert variable.shape == ([9, 3], [8, 3])[rank]
        assert sok.Variable(np.ones((15, 16)), mode="localized:1").shape == ([0, 16], [15, 16])[rank]
    new = sok.DynamicVariable(dimension=2)
    sok.lookup_sparse(new, tf.RaggedTensor.from_row_lengths(np.arange(-20, 20), [40]), combiners="sum")
    assert ((sok.export(new)[0].numpy().view(np.uint64) % size) == rank).all()
    assert len(whole(new)[0]) == 40


def train_one(name, kind, rank, size, directory):
    values = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)
    variable = make(kind, values, name=f"{name} {kind}")
    wrapper = sok.OptimizerWrapper(
        getattr(tf_keras.optimizers.legacy, OPTIMIZERS[name][0])(**OPTIMIZERS[name][1])
    )
    oracle = LazyTable(name, values)

    def step(keys, scale):
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(variable, keys, combiners="sum")
            loss = tf.reduce_sum(out * scale)
        wrapper.apply_gradients([(tape.gradient(loss, variable), variable)])

    for number in range(4):
        batches = all_batches(number, size)
        scales = [
            np.random.default_rng([9, number, r]).normal(size=(b.nrows(), DIM)) for r, b in enumerate(batches)
        ]
        run = tf.function(step, reduce_retracing=True) if number == 0 else step
        run(batches[rank], tf.constant(scales[rank], tf.float32))
        oracle.update(
            np.concatenate([b.values for b in batches]),
            np.concatenate([s[b.value_rowids()] for s, b in zip(scales, batches)]),
        )
    keys, rows = whole(variable)
    np.testing.assert_array_equal(keys, np.arange(ROWS))
    assert np.mean((rows - oracle.values) ** 2) < 1e-10
    np.testing.assert_allclose(rows, oracle.values, rtol=1e-4, atol=1e-5)
    sok.dump(directory / "weights", variable, wrapper)
    if rank == 0:
        states = {slot: state for slot, state in zip(SLOTS[name], oracle.states)}
        np.savez(directory / f"{name} {kind}.npz", values=oracle.values, **states)


def increments(rank, size):
    variables = [sok.DynamicVariable(dimension=3, var_type=t) for t in ("hybrid", "hbm", "hybrid")]
    t = sok.communication.tool()
    for number in range(3):
        t.all_gather(np.zeros(1))
        moment = datetime.now(timezone.utc)
        moment = max(
            datetime.fromtimestamp(float(m[0]), timezone.utc)
            for m in t.all_gather(np.array([moment.timestamp()]))
        )
        batches = [all_batches(10 * number + i, size) for i in range(3)]
        sok.lookup_sparse(variables, [b[rank] for b in batches])
        found, values = sok.incremental_model_dump(variables, moment)
        for keys, rows, batch in zip(found, values, batches):
            np.testing.assert_array_equal(keys, np.unique(np.concatenate([b.values for b in batch])))
            assert rows.shape == (len(keys), 3)


def failures(rank, size):
    """One rank's mistake is every rank's exception, and the next call works."""
    variable = sok.Variable(np.ones((4, 2), np.float32))
    bad = tf.ragged.constant([[1, 99 if rank == size - 1 else 2]], dtype=tf.int64)
    for run in (lambda f: f, tf.function):
        try:
            run(lambda: sok.lookup_sparse(variable, bad))()
        except Exception as error:
            assert "99" in str(error), error
        else:
            raise AssertionError("a key outside of the table should be refused on every rank")
    closed = sok.DynamicVariable(dimension=2)
    if rank == 0:
        closed.table.close()
    try:
        sok.lookup_sparse(closed, tf.ragged.constant([[0, 1, 2]], dtype=tf.int64))
    except Exception as error:
        assert "closed" in str(error), error
    else:
        raise AssertionError("a failure of the engine should reach every rank")
    try:
        sok.dump("/proc/nowhere/weights", variable)
    except Exception as error:
        assert "nowhere" in str(error), error
    else:
        raise AssertionError("a failure of rank 0 should reach every rank")
    np.testing.assert_array_equal(
        sok.lookup_sparse(variable, tf.ragged.constant([[1, 2]]), combiners="sum"), [[2, 2]]
    )


def load_one(name, kind, directory):
    """The dump of another number of ranks, by key."""
    saved = np.load(directory / f"{name} {kind}.npz")
    variable = make(kind, np.zeros((ROWS, DIM), np.float32), name=f"{name} {kind}")
    wrapper = sok.OptimizerWrapper(
        getattr(tf_keras.optimizers.legacy, OPTIMIZERS[name][0])(**OPTIMIZERS[name][1])
    )
    sok.load(directory / "weights", variable, wrapper)
    assert int(wrapper.iterations) == 4
    np.testing.assert_allclose(whole(variable)[1], saved["values"], rtol=1e-4, atol=1e-5)
    for slot in SLOTS[name]:
        state = wrapper.get_slot(variable, slot)
        if isinstance(variable, sok.DynamicVariable):
            mine, rows = sok.export(state)
        else:
            mine, rows = variable.local_keys(), state
        np.testing.assert_allclose(rows, saved[slot][mine], rtol=1e-4, atol=1e-5)
    # Without an optimizer: rows alone.
    plain = make(kind, np.zeros((ROWS, DIM), np.float32), name=f"{name} {kind}")
    sok.load(directory / "weights", [plain])
    np.testing.assert_allclose(whole(plain)[1], saved["values"], rtol=1e-4, atol=1e-5)


def main():
    what, directory = sys.argv[1], Path(sys.argv[2])
    tool = sys.argv[3] if len(sys.argv) > 3 else "torch"
    if tool == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
    sok.init(tool)
    t = sok.communication.tool()
    assert t.name == tool and t.size > 1
    if what == "train":
        for scenario in (shapes, lookups, increments, failures):
            scenario(t.rank, t.size)
        for name in OPTIMIZERS:
            for kind in FOUR[:3] if name == "adam" else ("distributed", "hybrid"):
                train_one(name, kind, t.rank, t.size, directory)
    else:
        for saved in sorted(directory.glob("*.npz")):
            load_one(*saved.stem.split(" ", 1), directory)
    print(f"rank {t.rank} of {t.size}: all well", flush=True)


if __name__ == "__main__":
    main()
