"""The names of 2023, `sparse_operation_kit.experiment`, and the raw operations that are not there."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit
from sparse_operation_kit import experiment as sok

NAMES = [
    "raw_ops",
    "set_comm_tool",
    "Variable",
    "DistributedVariable",
    "LocalizedVariable",
    "DynamicVariable",
    "assign",
    "export",
    "OptimizerWrapper",
    "SGD",
    "lookup_sparse",
    "all2all_dense_embedding",
    "dump",
    "load",
    "init",
    "filter_variables",
]
MODULES = [
    "communication",
    "distributed_variable",
    "dynamic_variable",
    "lookup",
    "optimizer",
    "dump_load",
    "utils",
    "raw_ops",
]


def test_every_name_of_the_package_is_there():
    assert [name for name in NAMES if not hasattr(sok, name)] == []
    for name in MODULES:
        module = importlib.import_module(f"sparse_operation_kit.experiment.{name}")
        for public in (n for n in module.__all__ if n[0] != "_"):
            assert callable(getattr(module, public))
    assert sok.communication.num_gpus() == 1


def test_a_dynamic_variable_is_hbm_by_default_and_one_of_ours():
    variable = sok.DynamicVariable(dimension=3, initializer="ones")
    assert variable.backend_type == "hbm" and isinstance(variable, sparse_operation_kit.DynamicVariable)
    assert sok.DynamicVariable(3, "ones", "hybrid").backend_type == "hybrid"
    assert sok.DynamicVariable(dimension=3, var_type="hybrid", max_capacity=64).backend_type == "hybrid"
    ids = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(variable, ids, combiners="sum"))
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.25)).apply_gradients(
        [(tape.gradient(loss, variable), variable)]
    )
    np.testing.assert_array_equal(sok.export(variable)[1], [[0.75] * 3, [0.5] * 3])


@pytest.mark.parametrize("package", [sparse_operation_kit, sok])
@pytest.mark.parametrize(
    ("operation", "named"),
    [
        ("dummy_var_handle", "sok.DynamicVariable"),
        ("dummy_var_initialize", "sok.DynamicVariable"),
        ("dummy_var_shape", "size"),
        ("dummy_var_sparse_read", "sok.lookup_sparse"),
        ("dummy_var_scatter_add", "scatter_add"),
        ("dummy_var_scatter_update", "scatter_update"),
        ("dummy_var_export", "sok.export"),
        ("dummy_var_assign", "sok.assign"),
        ("anything", "sok"),
    ],
)
def test_a_raw_operation_says_what_to_call_instead(package, operation, named):
    with pytest.raises(NotImplementedError, match=rf"raw_ops.{operation}.*{named}"):
        getattr(package.raw_ops, operation)
