"""Ranks and collectives by SparseOperationKit's names, in one process; ranks.py has several."""

import numpy as np
import pytest
import tensorflow as tf

from sparse_operation_kit import communication


def test_one_process_is_rank_0_of_1_with_one_device():
    names = ("rank", "local_rank", "id_in_rank", "global_gpu_id")
    assert [getattr(communication, name)() for name in names] == [0, 0, 0, 0]
    assert [getattr(communication, name)() for name in ("num_ranks", "num_gpu_per_rank", "num_gpus")] == [
        1
    ] * 3


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32, tf.int64, tf.bfloat16, tf.uint8])
def test_collectives_of_one_process_return_what_they_are_given(dtype, graph):
    rows = tf.cast(tf.reshape(tf.range(6), [3, 2]), dtype)

    def run(rows):
        moved, received = communication.alltoall(rows, [3])
        reduced = [communication.allreduce(rows, op) for op in ("sum", "average", "max", "min")]
        return [moved, *reduced, communication.allgather(rows), communication.broadcast(rows, 0)], received

    results, received = (tf.function(run) if graph else run)(rows)
    assert received.numpy().tolist() == [3]
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, rows)


def test_a_number_can_be_reduced_and_broadcast():
    assert float(communication.allreduce(2.5, "sum")) == float(communication.broadcast(2.5, 0)) == 2.5


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: communication.alltoall([1, 2], [1]), r"splits.*2.*\[1\]"),
        (lambda: communication.alltoall([1, 2], [3, -1]), "splits"),
        (lambda: communication.allreduce([1], "product"), "op.*product"),
        (lambda: communication.allgather(["a"]), "numbers.*string"),
        (lambda: communication.allgather(1), "rows"),
        (lambda: communication.broadcast([1], 1), "root.*1"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_a_gradient_through_a_collective_is_refused():
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = communication.allreduce(tf.convert_to_tensor(variable), "sum")
    with pytest.raises(NotImplementedError, match="allreduce has no gradient"):
        tape.gradient(loss, variable)
