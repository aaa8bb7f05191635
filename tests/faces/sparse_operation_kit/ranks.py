"""What two or three processes do together: ranks.py train|load <directory> [torch|horovod].

`train` runs all scenarios and leaves dumps with what they should hold; `load` reads those into another number
of processes, and runs some of the scenarios there. Every rank checks for itself and fails by an assertion.
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

    forward = tf.function(lambda: sok.lookup_sparse(variables, ids, combiners=combiners))
    forward()  # traced without a tape

    def tape_outside():
        with tf.GradientTape() as tape:
            outs = forward()
            loss = tf.add_n([tf.reduce_sum(out**2) for out in outs])
        return outs, tape.gradient(loss, variables)

    for run in (step, tf.function(step), tape_outside):
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
    # The filter is asked on the rank that would make the row.
    closed = sok.DynamicVariable(dimension=2, initializer="ones", filter_ratio=0.0)
    sok.assign(closed, [size + rank], np.full((1, 2), 3.0))
    keys = tf.RaggedTensor.from_row_lengths(np.arange(2 * size), np.ones(2 * size, np.int64))
    out = sok.lookup_sparse(closed, keys, combiners="sum", use_low_frequency_filter=True)
    np.testing.assert_array_equal(out, np.repeat([[0, 0], [3, 3]], size, axis=0))
    np.testing.assert_array_equal(closed.indices, [size + rank])


def sessions(rank, size):
    """A tf.compat.v1 session trains what eager mode trains."""
    v1 = tf.compat.v1
    values = np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(np.float32)
    batches = [all_batches(seed, size)[rank] for seed in range(3)]

    def loss_of(variables, ids):
        # Each lookup by itself: a session could run them, and their gradients, in any order.
        outs = [sok.lookup_sparse(variable, ids, combiners="sum") for variable in variables]
        return tf.add_n([tf.reduce_sum(out**2) for out in outs])

    eager, wrapper = [make(kind, values) for kind in FOUR], wrapper_of("adam")
    for ids in batches:
        with tf.GradientTape() as tape:
            loss = loss_of(eager, ids)
        wrapper.apply_gradients(zip(tape.gradient(loss, eager), eager))
    expected = [sok.export(variable)[1].numpy() for variable in eager]
    with tf.Graph().as_default(), v1.Session() as session:
        ours = [sok.Variable(values), sok.Variable(values, mode=f"localized:{size - 1}")]
        ours += [sok.DynamicVariable(dimension=DIM, mode=v.mode) for v in eager[2:]]
        for variable, twin in zip(ours[2:], eager[2:]):
            mine = sok.communication.tool().rank if twin.target_gpu < 0 else 0
            keys = np.arange(mine, ROWS, size if twin.target_gpu < 0 else 1)
            if twin.target_gpu in (-1, rank):
                variable.table.insert_or_assign(keys, values[keys])
        keys, lengths = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None])
        loss = loss_of(ours, tf.RaggedTensor.from_row_lengths(keys, lengths))
        train = wrapper_of("adam").apply_gradients(zip(v1.gradients(loss, ours), ours))
        session.run(v1.global_variables_initializer())
        for ids in batches:
            session.run(train, {keys: ids.values.numpy(), lengths: ids.row_lengths().numpy()})
        for variable, rows in zip(ours, expected):
            static = not isinstance(variable, sok.DynamicVariable)
            found = session.run(variable) if static else variable.table.rows().values
            np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)


def collectives(rank, size):
    c = sok.communication
    assert (c.rank(), c.num_ranks(), c.global_gpu_id(), c.num_gpus()) == (rank, size, rank, size)
    assert (c.local_rank(), c.id_in_rank(), c.num_gpu_per_rank()) == (rank, 0, 1)
    each = np.arange(size) + 1.5
    for run in (lambda f: f, tf.function):
        # Rank r sends r + 1 rows to each rank; a row says where it comes from and where it goes.
        rows = np.array([[rank, to] for to in range(size) for _ in range(rank + 1)], np.float64)
        moved, received = run(c.alltoall)(tf.constant(rows), [rank + 1] * size)
        np.testing.assert_array_equal(moved, [[r, rank] for r in range(size) for _ in range(r + 1)])
        np.testing.assert_array_equal(received, np.arange(size) + 1)
        for op, expected in (
            ("sum", sum(each)),
            ("average", np.mean(each)),
            ("max", max(each)),
            ("min", 1.5),
        ):
            reduced = run(lambda op=op: c.allreduce(tf.constant([[each[rank]]], tf.float32), op))()
            np.testing.assert_allclose(reduced, [[expected]])
        gathered = run(lambda: c.allgather(tf.fill([rank, 2], rank)))()
        np.testing.assert_array_equal(gathered, [[r, r] for r in range(size) for _ in range(r)])
        assert int(run(lambda: c.broadcast(tf.constant(rank), size - 1))()) == size - 1
    try:
        c.alltoall(tf.zeros([2]), [2 + (rank == 0)] + [0] * (size - 1))
    except Exception as error:
        assert "splits" in str(error), error
    else:
        raise AssertionError("splits that do not fit on one rank should be refused on all")


def shapes(rank, size):
    if size == 2:
        variable = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=tf.float32)
        assert variable.shape == ([9, 3], [8, 3])[rank]
        assert sok.Variable(np.ones((15, 16)), mode="localized:1").shape == ([0, 16], [15, 16])[rank]
    new = sok.DynamicVariable(dimension=2)
    sok.lookup_sparse(new, tf.RaggedTensor.from_row_lengths(np.arange(-20, 20), [40]), combiners="sum")
    assert ((sok.export(new)[0].numpy().view(np.uint64) % size) == rank).all()
    assert len(whole(new)[0]) == 40


def wrapper_of(name):
    kind, options = OPTIMIZERS[name]
    return sok.OptimizerWrapper(getattr(tf_keras.optimizers.legacy, kind)(**options))


def check_rows(variable, wrapper, values, states):
    """The rows of all ranks and this rank's states are these."""
    keys, rows = whole(variable)
    np.testing.assert_array_equal(keys, np.arange(ROWS))
    assert np.mean((rows - values) ** 2) < 1e-10
    np.testing.assert_allclose(rows, values, rtol=1e-4, atol=1e-5)
    for slot, expected in states.items():
        state = wrapper.get_slot(variable, slot)
        if isinstance(variable, sok.DynamicVariable):
            mine, rows = sok.export(state)
        else:
            mine, rows = variable.local_keys(), state
        np.testing.assert_allclose(rows, expected[mine], rtol=1e-4, atol=1e-5)


def train_one(name, kind, rank, size, directory):
    """Four steps of an eager program and of a tf.function, each on a variable of its own."""
    values = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)
    oracle = LazyTable(name, values)

    def stepper(graph):
        variable, wrapper = make(kind, values, name=f"{name} {kind}"), wrapper_of(name)

        def step(keys, scale):
            with tf.GradientTape() as tape:
                out = sok.lookup_sparse(variable, keys, combiners="sum")
                loss = tf.reduce_sum(out * scale)
            wrapper.apply_gradients([(tape.gradient(loss, variable), variable)])

        signature = [tf.RaggedTensorSpec([None, None], tf.int64), tf.TensorSpec([None, DIM])]
        return variable, wrapper, tf.function(step, input_signature=signature) if graph else step

    programs = [stepper(graph) for graph in (True, False)]
    for number in range(4):
        batches = all_batches(number, size)
        scales = [
            np.random.default_rng([9, number, r]).normal(size=(b.nrows(), DIM)) for r, b in enumerate(batches)
        ]
        for _, _, step in programs:
            step(batches[rank], tf.constant(scales[rank], tf.float32))
        oracle.update(
            np.concatenate([b.values for b in batches]),
            np.concatenate([s[b.value_rowids()] for s, b in zip(scales, batches)]),
        )
    states = dict(zip(SLOTS[name], oracle.states, strict=True))
    for variable, wrapper, _ in programs:
        assert int(wrapper.iterations) == 4
        check_rows(variable, wrapper, oracle.values, states)
    sok.dump(directory / "weights", variable, wrapper)
    if rank == 0:
        np.savez(directory / f"{name} {kind}.npz", values=oracle.values, **states)


def agreed_moment():
    """A moment after all that any rank did so far, and before all that any will do."""
    t = sok.communication.tool()
    t.all_gather(np.zeros(1))
    now = datetime.now(timezone.utc).timestamp()
    return datetime.fromtimestamp(float(max(m[0] for m in t.all_gather(np.array([now])))), timezone.utc)


def increments(rank, size):
    """Exactly the ids of all ranks since a moment: looked up, updated, assigned."""
    last = f"localized:{size - 1}"
    variables = [
        sok.DynamicVariable(dimension=3, evict_strategy="kLru"),
        sok.DynamicVariable(dimension=3, max_capacity=1024),
        sok.DynamicVariable(dimension=3, var_type="hbm"),
        sok.DynamicVariable(dimension=2, mode=last),
        sok.DynamicVariable(dimension=2, var_type="hbm", mode=last),
    ]
    everything = range(len(variables))
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))

    def check(moment, expected):
        found, values = sok.incremental_model_dump(variables, moment)
        for variable, keys, rows, ids in zip(variables, found, values, expected, strict=True):
            np.testing.assert_array_equal(keys, np.unique(ids))
            all_keys, all_rows = whole(variable)
            np.testing.assert_array_equal(rows, all_rows[np.searchsorted(all_keys, keys)])

    def gradients_of(batches):
        with tf.GradientTape() as tape:
            outs = sok.lookup_sparse(variables, batches)
            loss = tf.add_n([tf.reduce_sum(out) for out in outs])
        return tape.gradient(loss, variables)

    def update(gradients):
        wrapper.apply_gradients(zip(gradients, variables))

    for number, run in enumerate((lambda f: f, tf.function, lambda f: f)):
        batches = [all_batches(10 * number + i, size) for i in everything]
        ids = [np.concatenate([b.values for b in batch]) for batch in batches]
        moment = agreed_moment()
        gradients = run(gradients_of)([batch[rank] for batch in batches])
        check(moment, ids)
        between = agreed_moment()
        run(update)(gradients)
        check(between, ids)  # the update alone
        check(moment, ids)
    moment = agreed_moment()
    sok.lookup_sparse(variables, [batch[rank] for batch in batches], training=False)
    check(moment, [[]] * len(variables))
    for variable in variables:
        owner = variable.target_gpu in (-1, rank)
        key = np.array([1000 * size + rank] if owner else [], np.int64)
        sok.assign(variable, key, np.ones((len(key), variable.dimension)))
    spread, one = 1000 * size + np.arange(size), [1000 * size + size - 1]
    check(moment, [spread, spread, spread, one, one])


def capacity(rank, size):
    """Every rank has room for max_capacity rows of its own, and drops its least recently used."""
    room = 128  # one bucket, so that the least recently used of all rows of a rank is the one that goes
    variable = sok.DynamicVariable(dimension=3, max_capacity=room, initializer="ones")
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))

    def mine(begin, end):
        return np.arange(begin * size + rank, end * size, size)

    def read(begin, end):
        """All ranks ask for keys of all of them."""
        keys = np.arange(begin * size, end * size)
        return sok.lookup_sparse(
            variable, tf.RaggedTensor.from_row_lengths(keys, [len(keys)]), combiners="sum"
        )

    def train(begin, end):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(read(begin, end))
        wrapper.apply_gradients([(tape.gradient(loss, variable), variable)])

    train(0, room)
    read(0, 50)  # used again: those from 50 on are the oldest
    vectors, keys, values = sok.sparse_read_and_evict(variable, mine(1000, 1078))
    np.testing.assert_array_equal(vectors, np.ones((78, 3)))
    np.testing.assert_array_equal(np.sort(keys), mine(50, room))
    np.testing.assert_allclose(values, np.full((78, 3), 0.9), rtol=1e-5)
    np.testing.assert_array_equal(variable.indices, [*mine(0, 50), *mine(1000, 1078)])
    # A key that comes back, asked for by the other rank, starts fresh.
    back = (rank + 1) % size + 60 * size
    row = sok.all2all_dense_embedding(variable, [back])
    np.testing.assert_array_equal(row, [[1, 1, 1]])
    states = dict(zip(variable.indices.numpy(), sok.export(wrapper.get_slot(variable, "m"))[1].numpy()))
    assert {key for key, state in states.items() if state.any()} < {*mine(0, 50)}
    assert 60 * size + rank in states and len(states) == room
    # One batch that brings more than there is room for, looked up and trained.
    for number, run in enumerate((train, tf.function(train), train)):
        begin = 2000 * (number + 1)
        run(begin, begin + 3 * room + 7)
        assert 0 < int(variable.size[0]) <= room and len(whole(variable)[0]) <= room * size
    bound = sok.DynamicVariable(dimension=1, max_capacity=room, mode="localized:0")
    sok.lookup_sparse(bound, tf.RaggedTensor.from_row_lengths(np.arange(5 * room), [5 * room]))
    assert int(bound.size[0]) <= room and (int(bound.size[0]) > 0) == (rank == 0)


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
    for run in (lambda f: f, tf.function):  # weights that do not fit, on one rank
        ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3], tf.int64), [2, 1])
        weights = tf.RaggedTensor.from_row_lengths(
            tf.ones([1 if rank == 0 else 3]), [0, 1] if rank == 0 else [2, 1]
        )
        try:
            run(lambda i, w: sok.lookup_sparse(variable, i, w))(ids, weights)
        except Exception as error:
            assert "3 weights but hold: 1" in str(error), error
        else:
            raise AssertionError("weights that do not fit should be refused on every rank")
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
    wrapper = wrapper_of(name)
    sok.load(directory / "weights", variable, wrapper)
    assert int(wrapper.iterations) == 4
    check_rows(variable, wrapper, saved["values"], {slot: saved[slot] for slot in SLOTS[name]})
    # Without an optimizer: rows alone.
    plain = make(kind, np.zeros((ROWS, DIM), np.float32), name=f"{name} {kind}")
    sok.load(directory / "weights", [plain])
    check_rows(plain, None, saved["values"], {})


def main():
    what, directory = sys.argv[1], Path(sys.argv[2])
    tool = sys.argv[3] if len(sys.argv) > 3 else "torch"
    if tool == "horovod":
        import horovod.tensorflow as hvd

        # As the getting-started document begins.
        hvd.init()
        gpus = tf.config.experimental.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    sok.init()  # finds it
    sok.init(tool)
    t = sok.communication.tool()
    assert t.name == tool and t.size > 1
    for scenario in (increments, capacity):  # at every number of ranks
        scenario(t.rank, t.size)
    if what == "train":
        for scenario in (shapes, lookups, sessions, collectives, failures):
            scenario(t.rank, t.size)
        sok.init(tool, same_bits=True)
        lookups(t.rank, t.size)
        sok.init(tool)
        for name in OPTIMIZERS:
            for kind in FOUR[:3] if name == "adam" else ("distributed", "hybrid"):
                train_one(name, kind, t.rank, t.size, directory)
    else:
        for saved in sorted(directory.glob("*.npz")):
            load_one(*saved.stem.split(" ", 1), directory)
    print(f"rank {t.rank} of {t.size}: all well", flush=True)


if __name__ == "__main__":
    main()
