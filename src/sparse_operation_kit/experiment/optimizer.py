"""Optimizers."""

from sparse_operation_kit.optimizer import (
    SGD,
    OptimizerWrapper,
)

__all__ = [
    "SGD",
    "OptimizerWrapper",
]
