"""The original's GPU operations, which do not exist here; see `sparse_operation_kit.raw_ops`."""

from sparse_operation_kit.raw_ops import __getattr__

__all__ = ["__getattr__"]
