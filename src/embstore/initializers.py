"""Initial values of rows. Each is a pure function of (seed, table, key, column).

Uniform(-0.05, 0.05)   Normal(0.0, 0.01)   TruncatedNormal(0.0, 0.01, -0.02, 0.02)
Constant(0.0)          Debug()             # every component is uint64(key) % 100000
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from embstore import _core


def _check_finite(initializer: Initializer, *names: str) -> None:
    for name in names:
        value = getattr(initializer, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} should be a finite number but is: {value!r}")


@dataclass(frozen=True)
class Initializer:
    """Base of all initializers; use one of the subclasses.

    A row is a pure function of seed, table name and key: the same on any rank, thread and machine.

    Examples:
        >>> import embstore
        >>> table = embstore.Table("user", dim=2, initializer=embstore.Constant(0.5))
        >>> table.find_or_insert([7]).tolist()
        [[0.5, 0.5]]
    """

    code: ClassVar[int] = -1

    def values(self) -> list[float]:
        """value, mean, std_dev, lower, upper, as the engine takes them."""
        return [0.0, 0.0, 1.0, 0.0, 1.0]

    def rows(self, keys: object, dim: int, *, seed: int = 0, table: str = "") -> npt.NDArray[np.float32]:
        """The vectors (n, dim) that these keys begin with in a table of this name and seed.

        >>> Constant(0.5).rows([7, -1], 2).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
        """
        from embstore.arrays import address, as_keys  # it needs the options, which name an initializer

        wanted = as_keys(keys)
        out = np.empty((wanted.n, dim), np.float32)
        _core.initial_rows(self.code, self.values(), seed, table, wanted.address, wanted.n, dim, address(out))
        return out


def initial_values(
    initializer: Initializer, keys: object, dim: int, *, seed: int = 0, stream: str = ""
) -> npt.NDArray[np.float32]:
    """The vectors (n, dim) that keys start with in a table of this initializer, seed and name.

    >>> initial_values(Constant(2.0), [7, -1], dim=3).tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    flat = np.ascontiguousarray(keys, np.int64).reshape(-1)
    out = np.empty((len(flat), dim), np.float32)
    _core.initial_values(
        initializer.code,
        initializer.values(),
        seed & 0xFFFF_FFFF_FFFF_FFFF,
        stream,
        flat.ctypes.data,
        len(flat),
        dim,
        out.ctypes.data,
    )
    return out


@dataclass(frozen=True)
class Constant(Initializer):
    """Every component is `value`.

    Args:
        value: any finite number.

    Raises:
        ValueError: a number is not finite, or out of range.

    Examples:
        >>> import embstore
        >>> embstore.Constant(0.5).rows([7, -1], dim=2).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    value: float = 0.0
    code: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check_finite(self, "value")

    def values(self) -> list[float]:
        return [self.value, 0.0, 1.0, 0.0, 1.0]


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [lower, upper).

    Args:
        lower: smallest value.
        upper: bound that is not reached; at least `lower`.

    Raises:
        ValueError: a number is not finite, or out of range.

    Examples:
        >>> import embstore
        >>> embstore.Uniform(0.0, 1.0).rows([7, -1], dim=2).shape
        (2, 2)
    """

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
    """Normal with the given mean and standard deviation.

    Args:
        mean: of the components.
        std: standard deviation, at least 0.

    Raises:
        ValueError: a number is not finite, or out of range.

    Examples:
        >>> import embstore
        >>> embstore.Normal(0.0, 0.01).rows([7, -1], dim=2).shape
        (2, 2)
    """

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
    """Normal, cut at the absolute bounds `lower` and `upper`.

    Args:
        mean: before the cut.
        std: standard deviation before the cut, above 0.
        lower: smallest value.
        upper: largest value; above `lower`.

    Raises:
        ValueError: a number is not finite, or out of range.

    Examples:
        >>> import embstore
        >>> embstore.TruncatedNormal(0.0, 0.01, -0.02, 0.02).rows([7, -1], dim=2).shape
        (2, 2)
    """

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
    """Every component is float(uint64(key) % 100000): shows which row a vector came from.

    Examples:
        >>> import embstore
        >>> embstore.Debug().rows([7, 100003], dim=2).tolist()
        [[7.0, 7.0], [3.0, 3.0]]
    """

    code: ClassVar[int] = 4
