"""Names of the original package that exist so that imports and isinstance work, but do nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _refuse(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not available here; {instead}")


def unavailable_class(name: str, module: str, instead: str, base: type = object) -> type:
    """A class whose construction raises NotImplementedError that says what to use instead."""

    def refuse(cls: type, *arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name, instead)

    members = {"__new__": refuse, "__module__": module, "__doc__": f"Not available; {instead}."}
    return type(base)(name, (base,), members)


def unavailable_function(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError that says what to use instead."""

    def refuse(*arguments: Any, **keywords: Any) -> NoReturn:
        _refuse(name, instead)

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
