"""SparseOperationKit under the name that it had until the end of 2023.

    from sparse_operation_kit import experiment as sok

The names are those of `sparse_operation_kit`; a DynamicVariable is "hbm" unless var_type says otherwise.
"""

from sparse_operation_kit.experiment import (
    communication,
    distributed_variable,
    dump_load,
    dynamic_variable,
    lookup,
    optimizer,
    raw_ops,
    utils,
)
from sparse_operation_kit.experiment.communication import init, set_comm_tool
from sparse_operation_kit.experiment.distributed_variable import (
    DistributedVariable,
    LocalizedVariable,
    Variable,
)
from sparse_operation_kit.experiment.dump_load import dump, load
from sparse_operation_kit.experiment.dynamic_variable import DynamicVariable, assign, export
from sparse_operation_kit.experiment.lookup import all2all_dense_embedding, lookup_sparse
from sparse_operation_kit.experiment.optimizer import SGD, OptimizerWrapper
from sparse_operation_kit.experiment.utils import filter_variables

__all__ = [
    "SGD",
    "DistributedVariable",
    "DynamicVariable",
    "LocalizedVariable",
    "OptimizerWrapper",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "communication",
    "distributed_variable",
    "dump",
    "dump_load",
    "dynamic_variable",
    "export",
    "filter_variables",
    "init",
    "load",
    "lookup",
    "lookup_sparse",
    "optimizer",
    "raw_ops",
    "set_comm_tool",
    "utils",
]
