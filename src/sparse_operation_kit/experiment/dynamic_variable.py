"""Tables for any keys, which grow without a bound unless var_type="hybrid" is asked for."""

from __future__ import annotations

from typing import Any

from sparse_operation_kit import dynamic
from sparse_operation_kit.interaction import assign, export

__all__ = ["DynamicVariable", "assign", "export"]


class DynamicVariable(dynamic.DynamicVariable):
    """`sparse_operation_kit.DynamicVariable` whose var_type is "hbm" by default."""

    def __init__(
        self, dimension: int, initializer: Any = None, var_type: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(dimension, initializer, var_type or "hbm", *args, **kwargs)
