"""Lookups."""

from sparse_operation_kit.lookup import (
    all2all_dense_embedding,
    lookup_sparse,
)

__all__ = [
    "all2all_dense_embedding",
    "lookup_sparse",
]
