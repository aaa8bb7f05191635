"""Serving: read-only processes that answer from a dump or follow an increment log.

reader = embstore.serving.Reader("/data/log")
reader.start()
vectors, found = reader.find("user", [7, -1])
"""

from embstore.serving.bases import RowDType, prepare
from embstore.serving.reader import Reader, State

__all__ = ["Reader", "RowDType", "State", "prepare"]
