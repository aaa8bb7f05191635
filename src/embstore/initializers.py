"""Initial values of rows. Each is a pure function of (seed, table, key, column).

Uniform(-0.05, 0.05)   Normal(0.0, 0.01)   TruncatedNormal(0.0, 0.01, -0.02, 0.02)
Constant(0.0)          Debug()             # every component is uint64(key) % 100000
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


def _check_finite(initializer: Initializer, *names: str) -> None:
    for name in names:
        value = getattr(initializer, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} should be a finite number but is: {value!r}")


@dataclass(frozen=True)
class Initializer:
    """Base of all initializers; use one of the subclasses."""

    code: ClassVar[int] = -1

    def values(self) -> list[float]:
        """value, mean, std_dev, lower, upper, as the engine takes them."""
        return [0.0, 0.0, 1.0, 0.0, 1.0]


@dataclass(frozen=True)
class Constant(Initializer):
    """Every component is `value`."""

    value: float = 0.0
    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check_finite(self, "value")

    def values(self) -> list[float]:
        return [self.value, 0.0, 1.0, 0.0, 1.0]


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [lower, upper)."""

    lower: float = -0.05
    upper: float = 0.05
    code: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_finite(self, "lower", "upper")
        if self.lower > self.upper:
            raise ValueError(f"lower should be at most upper ({self.upper}) but is: {self.lower}")

    def values(self) -> list[float]:
        return [0.0, 0.0, 1.0, self.lower, self.upper]


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_finite(self, "mean", "std")
        if self.std < 0:
            raise ValueError(f"std should be at least 0 but is: {self.std}")

    def values(self) -> list[float]:
        return [0.0, self.mean, self.std, 0.0, 1.0]


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal, cut at the absolute bounds `lower` and `upper`."""

    mean: float = 0.0
    std: float = 0.01
    lower: float = -0.02
    upper: float = 0.02
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _check_finite(self, "mean", "std", "lower", "upper")
        if self.std <= 0:
            raise ValueError(f"std should be above 0 but is: {self.std}")
        if self.lower >= self.upper:
            raise ValueError(f"lower should be below upper ({self.upper}) but is: {self.lower}")

    def values(self) -> list[float]:
        return [0.0, self.mean, self.std, self.lower, self.upper]


@dataclass(frozen=True)
class Debug(Initializer):
    """Every component is float(uint64(key) % 100000): shows which row a vector came from."""

    code: ClassVar[int] = 4
