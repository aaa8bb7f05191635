"""Drop-in replacement for SparseOperationKit: embeddings for TensorFlow, on any machine.

    import sparse_operation_kit as sok

    sok.init()
    table = sok.DynamicVariable(dimension=16, initializer="normal")
    (vectors,) = sok.lookup_sparse([table], [ids], combiners=["sum"])

Rows live in host memory, in tables that grow with their keys; docs/sparse_operation_kit.md is the guide.
"""

try:
    import tensorflow as _tf
except ImportError as _error:
    from embstore.extras import missing as _missing

    raise _missing("sparse_operation_kit", "tensorflow", _error) from _error

from sparse_operation_kit import raw_ops
from sparse_operation_kit.communication import init, set_comm_tool
from sparse_operation_kit.dump import dump, incremental_model_dump, load
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.interaction import assign, export, filter_variables
from sparse_operation_kit.keras_models import trainable_variables
from sparse_operation_kit.lookup import all2all_dense_embedding, lookup_sparse, sparse_read_and_evict
from sparse_operation_kit.optimizer import SGD, OptimizerWrapper
from sparse_operation_kit.served import ServedVariable, serving_model
from sparse_operation_kit.static import DistributedVariable, LocalizedVariable, Variable

__version__ = "2.1.0"  # of the API
tf_version = [int(part) for part in _tf.__version__.split("-")[0].split(".")]

__all__ = [
    "SGD",
    "DistributedVariable",
    "DynamicVariable",
    "LocalizedVariable",
    "OptimizerWrapper",
    "ServedVariable",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "incremental_model_dump",
    "init",
    "load",
    "lookup_sparse",
    "raw_ops",
    "serving_model",
    "set_comm_tool",
    "sparse_read_and_evict",
    "tf_version",
    "trainable_variables",
]
