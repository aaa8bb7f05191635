"""Serving: read-only processes that answer from a dump or follow an increment log.

reader = embstore.serving.Reader("/data/log")
reader.start()
vectors, found = reader.find("user", [7, -1])
"""

from typing import TYPE_CHECKING, Any

from embstore.serving.bases import RowDType, prepare
from embstore.serving.reader import Reader, State

if TYPE_CHECKING:
    from embstore.serving.models import serving_model

__all__ = ["Reader", "RowDType", "State", "prepare", "serving_model"]


def __getattr__(name: str) -> Any:
    if name == "serving_model":  # needs torch, which is imported when it is first used
        from embstore.serving.models import serving_model

        return serving_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
