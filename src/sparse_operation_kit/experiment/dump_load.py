"""Dump and load."""

from sparse_operation_kit.dump import (
    dump,
    load,
)

__all__ = [
    "dump",
    "load",
]
