"""What every optimizer has: a learning rate, weight decay, clipping, and its options for the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from embstore import _core


def check_range(optimizer: Optimizer, name: str, low: float, high: float, *, open_high: bool = False) -> None:
    value = getattr(optimizer, name)
    ok = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not ok or value < low or value > high or (open_high and value >= high):
        bound = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} should be a finite number {bound} but is: {value!r}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base of all optimizers; use one of the subclasses.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch, unless the class says otherwise.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.

    Raises:
        TypeError: it is made itself, not one of its subclasses.
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> isinstance(embstore.Adam(lr=0.1), embstore.Optimizer)
        True
    """

    lr: float = 0.01
    weight_decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0

    engine_name: ClassVar[str] = ""
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.engine_name:
            raise TypeError("Optimizer should be one of its subclasses, such as SGD or Adam")
        for name in ("lr", "weight_decay", "clip_value", "clip_norm"):
            check_range(self, name, 0.0, math.inf)
        self.check()

    def check(self) -> None:
        """Validates what the subclass adds."""

    @property
    def initial_accumulator(self) -> float:
        """First value of accumulators that may start above zero."""
        return 0.0

    def step_values(self) -> dict[str, Any]:
        """What the subclass adds to the engine's step options."""
        return {}

    def step_options(self, learning_rate: float, step: int) -> _core.StepOptions:
        """The engine's options for step number `step` (from 1)."""
        options = _core.StepOptions()
        options.learning_rate = learning_rate
        options.step = step
        options.weight_decay = self.weight_decay
        options.decoupled_weight_decay = self.decoupled
        options.clip_value = self.clip_value
        options.clip_norm = self.clip_norm
        for name, value in self.step_values().items():
            setattr(options, name, value)
        return options

    def state_names(self, dim: int) -> list[tuple[str, int]]:
        """Names and widths of the states of a row, in the order in which they lie in it."""
        return list(_core.optimizer_states(self.engine_name, dim))

    def to_dict(self) -> dict[str, Any]:
        """The class name under "name" and every field; `from_dict` is the inverse."""
        return {"name": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields(self)}}
