"""Tables of a fixed number of rows."""

from sparse_operation_kit.static import (
    DistributedVariable,
    LocalizedVariable,
    Variable,
)

__all__ = [
    "DistributedVariable",
    "LocalizedVariable",
    "Variable",
]
