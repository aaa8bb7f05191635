"""The original's GPU operations do not exist here: using one raises an error that names the call to use."""

from __future__ import annotations

from typing import Any

# By a part of the operation's name, the first that matches.
INSTEAD = {
    "sparse_read_and_evict": "sok.sparse_read_and_evict",
    "sparse_read": "sok.lookup_sparse or tf.nn.embedding_lookup",
    "scatter_add": "scatter_add of the variable",
    "scatter_sub": "scatter_sub of the variable",
    "scatter_update": "scatter_update of the variable",
    "export": "sok.export",
    "assign": "sok.assign",
    "shape": "size of the variable",
    "var_handle": "sok.DynamicVariable",
    "initialize": "sok.DynamicVariable",
    "lookup": "sok.lookup_sparse",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    instead = next((call for part, call in INSTEAD.items() if part in name), "the functions of sok")
    raise NotImplementedError(f"raw_ops.{name} runs on GPUs only: use {instead} instead")
