"""The getting-started document of SparseOperationKit, block by block, as one session.

Its beginning, with Horovod, is that of ranks.py. Where its comments contradict its code, the code is
followed: 15 x 16 tables on two ranks are [8, 16] and [7, 16]; the printed embeddings are those of 17 x 3 and
7 x 5 tables, and of "sum" twice.
"""

import runpy
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok

ROOT = Path(__file__).parents[3]


def indices():
    one = tf.SparseTensor(
        indices=[[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], values=[1, 1, 3, 4, 5], dense_shape=[2, 3]
    )
    two = tf.SparseTensor(indices=[[0, 0], [1, 0], [1, 1]], values=[1, 2, 3], dense_shape=[2, 2])
    return one, two


def test_the_document_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Defining variables: sok.Variable
    v1 = sok.Variable(np.arange(15 * 16).reshape(15, 16), dtype=tf.float32)
    v2 = sok.Variable(np.arange(15 * 16).reshape(15, 16), dtype=tf.float32, mode="localized:0")
    print("v1:\n", v1)
    print("v2:\n", v2)
    assert capsys.readouterr().out.count("shape=(15, 16)") == 2

    # sok.DynamicVariable
    v1 = sok.DynamicVariable(dimension=16, var_type="hbm", initializer="normal")
    v2 = sok.DynamicVariable(
        dimension=16,
        var_type="hybrid",
        initializer="uniform",
        init_capacity=1024 * 1024,
        max_capacity=1024 * 1024,
        max_hbm_for_vectors=2,
    )
    print("v1:\n", v1)
    print("v2:\n", v2)
    assert capsys.readouterr().out.count("<sok.DynamicVariable 'sok_dynamic_Variable_") == 2

    # Lookup
    indices1, indices2 = indices()
    with tf.GradientTape() as tape:
        embeddings = sok.lookup_sparse([v1, v2], [indices1, indices2], combiners=["sum", "mean"])
        loss = 0.0
        for i, embedding in enumerate(embeddings):
            loss += tf.reduce_sum(embedding)
            print(f"embedding{i + 1}:\n", embedding)
    first = {int(k): row for k, row in zip(*sok.export(v1))}
    second = {int(k): row for k, row in zip(*sok.export(v2))}
    np.testing.assert_allclose(embeddings[0], [2 * first[1], first[3] + first[4] + first[5]], rtol=1e-5)
    np.testing.assert_allclose(embeddings[1], [second[1], (second[2] + second[3]) / 2], rtol=1e-5)

    # Backward and update
    optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)
    sok_optimizer = sok.OptimizerWrapper(optimizer)
    grads = tape.gradient(loss, [v1, v2])
    for i, grad in enumerate(grads):
        print(f"grad{i + 1}:\n", grad)
    sok_optimizer.apply_gradients(zip(grads, [v1, v2]))
    print("v1:\n", v1)
    print("v2:\n", v2)
    assert capsys.readouterr().out.count("IndexedSlices") == 2
    moved = {int(k): row for k, row in zip(*sok.export(v1))}
    np.testing.assert_allclose(moved[1], first[1] - 2.0, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved[3], first[3] - 1.0, rtol=1e-5, atol=1e-6)
    moved = {int(k): row for k, row in zip(*sok.export(v2))}
    np.testing.assert_allclose(moved[2], second[2] - 0.5, rtol=1e-5, atol=1e-6)

    # Interaction with tensors
    with tf.device("CPU"):
        keys = tf.convert_to_tensor([i for i in range(24)], dtype=tf.int64)
        values = tf.convert_to_tensor(np.random.rand(24, 16), dtype=tf.float32)
    sok.assign(v1, keys, values)
    ex_v1_indices, ex_v1_values = sok.export(v1)
    np.testing.assert_array_equal(ex_v1_indices, keys)
    np.testing.assert_array_equal(ex_v1_values, values)

    # Dump and load
    sok_vars = [v1, v2]
    sok.dump("./weight", sok_vars, sok_optimizer)
    sok.assign(v1, keys, tf.zeros_like(values))
    sok.load("./weight", sok_vars, sok_optimizer)
    np.testing.assert_array_equal(sok.export(v1)[1], values)

    # Incremental dump
    utc_time_threshold = datetime.now(timezone.utc)  # the document takes pytz.utc, which is the same
    sok.lookup_sparse(sok_vars, [indices1, indices2])
    keys, values = sok.incremental_model_dump(sok_vars, utc_time_threshold)
    np.testing.assert_array_equal(keys[0], [1, 3, 4, 5])
    np.testing.assert_array_equal(keys[1], [1, 2, 3])
    assert [v.shape for v in values] == [(4, 16), (3, 16)]


def test_the_numbers_in_its_comments_are_those_of_the_tables_they_were_made_with():
    v1 = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=tf.float32)
    v2 = sok.Variable(np.arange(7 * 5).reshape(7, 5), dtype=tf.float32, mode="localized:0")
    one, two = sok.lookup_sparse([v1, v2], list(indices()), combiners=["sum", "sum"])
    np.testing.assert_array_equal(one, [[6, 8, 10], [36, 39, 42]])
    np.testing.assert_array_equal(two, [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]])


def test_a_keras_model_fits_with_a_layer_over_a_dynamic_variable():
    program = runpy.run_path(str(ROOT / "examples" / "sok_keras.py"))
    model, ids, history = program["main"]()
    assert history["squared_error"][-1] < 0.1 * history["squared_error"][0]
    assert int(model.embedding.table.size[0]) == len(np.unique(ids))
