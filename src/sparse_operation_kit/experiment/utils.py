"""Sorting variables into ours and others; the original keeps it here."""

from sparse_operation_kit.interaction import (
    filter_variables,
)

__all__ = [
    "filter_variables",
]
