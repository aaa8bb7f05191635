"""Optimizers that run on rows inside the engine.

Each has the arguments and the arithmetic of its namesake in `torch.optim`, applied to the rows that
have a gradient (lazily): gradients of duplicates are summed first, then every row moves once.

    Adam(lr=1e-3)    SGD(lr=0.1, momentum=0.9)    RowwiseAdagrad(lr=0.05, clip_norm=1.0)
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from embstore.optimizer_base import Optimizer as Optimizer  # it is looked for here
from embstore.optimizer_base import check_range


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas should be a tuple of two numbers but is: {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{i}] should be at least 0 and below 1 but is: {beta!r}")


class EpsPlacement(enum.IntEnum):
    """Where eps enters the denominator: torch and Keras differ, which shows at small gradients.

    TORCH: sqrt(v) + eps, after the bias correction. KERAS: as Keras has it, before.

    Examples:
        >>> import embstore
        >>> embstore.Adam(eps_placement=embstore.EpsPlacement.KERAS).eps_placement.name
        'KERAS'
    """

    TORCH = 0
    KERAS = 1


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """w -= lr * g, with momentum as in torch.optim.SGD.

    With `velocity` as in Keras, where the state is the step itself: v = momentum * v - lr * g; w += v.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        momentum: factor of the state; 0 keeps no state.
        dampening: of the gradient that enters the momentum.
        nesterov: Nesterov's momentum.
        velocity: the state is the step, as in Keras.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.SGD(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9500
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    velocity: bool = False

    def check(self) -> None:
        check_range(self, "momentum", 0.0, math.inf)
        check_range(self, "dampening", -math.inf, math.inf)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov should come with a momentum above 0 and no dampening")
        if self.velocity and self.dampening != 0:
            raise ValueError(f"dampening should be 0 with velocity but is: {self.dampening!r}")

    @property
    def engine_name(self) -> str:  # type: ignore[override]
        return "momentum" if self.momentum else "sgd"

    def step_values(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "dampening": self.dampening,
            "nesterov": self.nesterov,
            "velocity": self.velocity,
        }


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """sum += g^2; w -= lr * g / (sqrt(sum) + eps), or / sqrt(sum + eps) as in Keras.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        eps: keeps the denominator above 0.
        initial_accumulator_value: what `sum` starts with.
        eps_placement: inside or outside of the root.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.Adagrad(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9000
    """

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    eps_placement: EpsPlacement = EpsPlacement.TORCH
    engine_name: ClassVar[str] = "adagrad"

    def check(self) -> None:
        check_range(self, "eps", 0.0, math.inf)
        check_range(self, "initial_accumulator_value", 0.0, math.inf)

    @property
    def initial_accumulator(self) -> float:
        return self.initial_accumulator_value

    def step_values(self) -> dict[str, Any]:
        return {"eps": self.eps, "eps_placement": int(self.eps_placement)}


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum for the row: sum += mean(g^2). Its state is one float a row.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        eps: keeps the denominator above 0.
        initial_accumulator_value: what `sum` starts with.
        eps_placement: inside or outside of the root.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.RowwiseAdagrad(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9000
    """

    engine_name: ClassVar[str] = "rowwise_adagrad"


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """torch.optim.Adam on the rows that have a gradient.

    The step t of the bias correction counts the updates of the table.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        betas: decay of the averages of g and of g^2.
        eps: keeps the denominator above 0.
        bias_correction: divides the averages by 1 - beta^t.
        eps_placement: after the bias correction as in torch, or before it as in Keras.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.Adam(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9000
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: bool = True
    eps_placement: EpsPlacement = EpsPlacement.TORCH
    engine_name: ClassVar[str] = "adam"

    def check(self) -> None:
        check_range(self, "eps", 0.0, math.inf)
        _check_betas(self.betas)

    def step_values(self) -> dict[str, Any]:
        return {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "bias_correction": self.bias_correction,
            "eps_placement": int(self.eps_placement),
        }


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: w -= lr * weight_decay * w beside Adam's own step.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: decoupled: taken off the row beside the step.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        betas: decay of the averages of g and of g^2.
        eps: keeps the denominator above 0.
        bias_correction: divides the averages by 1 - beta^t.
        eps_placement: as in Adam.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.AdamW(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.8990
    """

    weight_decay: float = 0.01
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Adamax(Adam):
    """torch.optim.Adamax: the second moment is a decayed maximum.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        betas: decay of the average of g and of the maximum.
        eps: keeps the denominator above 0.
        bias_correction: divides the average by 1 - beta^t.
        eps_placement: as in Adam.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.Adamax(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9000
    """

    lr: float = 0.002
    engine_name: ClassVar[str] = "adamax"


@dataclass(frozen=True, kw_only=True)
class Adadelta(Optimizer):
    """torch.optim.Adadelta.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        rho: decay of both averages.
        eps: keeps the denominator above 0.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.Adadelta(lr=1.0)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.9968
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    engine_name: ClassVar[str] = "adadelta"

    def check(self) -> None:
        check_range(self, "eps", 0.0, math.inf)
        check_range(self, "rho", 0.0, 1.0)

    def step_values(self) -> dict[str, Any]:
        return {"rho": self.rho, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class Ftrl(Optimizer):
    """FTRL-proximal.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: decoupled: taken off the row beside the step.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        lr_power: exponent of the accumulator.
        initial_accumulator_value: what the accumulator starts with.
        lambda1: L1 penalty; it makes components exactly 0.
        lambda2: L2 penalty.
        beta: added to the root of the accumulator.
        l2_shrinkage: L2 penalty on the gradient alone.
        paper_sign: raises the accumulator to -lr_power (the paper, TensorFlow); without, to +lr_power as in
            OneEmbedding.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.Ftrl(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.3810
    """

    lr_power: float = -0.5
    initial_accumulator_value: float = 0.1
    lambda1: float = 0.0
    lambda2: float = 0.0
    beta: float = 0.0
    l2_shrinkage: float = 0.0
    paper_sign: bool = True
    engine_name: ClassVar[str] = "ftrl"
    decoupled: ClassVar[bool] = True

    def check(self) -> None:
        if self.lr == 0:
            raise ValueError("lr should be above 0 for Ftrl, whose rule divides by it, but is: 0")
        check_range(self, "lr_power", -math.inf, math.inf)
        for name in ("initial_accumulator_value", "lambda1", "lambda2", "beta", "l2_shrinkage"):
            check_range(self, name, 0.0, math.inf)

    @property
    def initial_accumulator(self) -> float:
        return self.initial_accumulator_value

    def step_values(self) -> dict[str, Any]:
        return {
            "learning_rate_power": self.lr_power,
            "lambda1": self.lambda1,
            "lambda2": self.lambda2,
            "beta": self.beta,
            "l2_shrinkage": self.l2_shrinkage,
            "ftrl_paper_sign": self.paper_sign,
        }


@dataclass(frozen=True, kw_only=True)
class SmartDecayAdam(Optimizer):
    """Adam whose averages decay, and whose rows are caught up, for the steps in which a row had no gradient.

    For a row that had its last gradient k steps ago:

        m' = beta1^k m + (1 - beta1) g        v' = beta2^k v + (1 - beta2) g^2        no bias correction
        w' = w - lr (m' + c) / (sqrt(v') + eps)        c = m beta1 (1 - beta1^(k-1)) / (1 - beta1)

    A row keeps the number of its last step as the bits of an int64 in the last two floats of its state, as
    OneEmbedding does: `states[:, -2:].copy().view(np.int64)`.

    Args:
        lr: learning rate; `Table.learning_rate` overrides it from then on.
        weight_decay: added to the gradient, as in torch.
        clip_value: above 0, each component of a row's summed gradient is clamped to +-clip_value.
        clip_norm: above 0, a row's summed gradient is scaled down to this L2 norm.
        betas: decay of the averages of g and of g^2.
        eps: keeps the denominator above 0.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import embstore
        >>> rule = embstore.SmartDecayAdam(lr=0.1)
        >>> table = embstore.Table("t", dim=1, initializer=embstore.Constant(1.0), optimizer=rule)
        >>> vectors = table.find_or_insert([7])
        >>> table.apply_gradients([7], [[0.5]])
        >>> print(f"{table.find([7])[0].item():.4f}")
        0.6838
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    engine_name: ClassVar[str] = "smart_decay_adam"

    def check(self) -> None:
        check_range(self, "eps", 0.0, math.inf)
        _check_betas(self.betas)

    def step_values(self) -> dict[str, Any]:
        return {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


OPTIMIZERS: tuple[type[Optimizer], ...] = (
    SGD,
    Adagrad,
    RowwiseAdagrad,
    Adam,
    AdamW,
    Adamax,
    Adadelta,
    Ftrl,
    SmartDecayAdam,
)


def from_dict(description: dict[str, Any]) -> Optimizer:
    """The optimizer that `Optimizer.to_dict` described."""
    values = dict(description)
    name = values.pop("name", None)
    for optimizer in OPTIMIZERS:
        if optimizer.__name__ == name:
            if "betas" in values:
                values["betas"] = tuple(values["betas"])
            return optimizer(**values)
    known = ", ".join(optimizer.__name__ for optimizer in OPTIMIZERS)
    raise ValueError(f"name should be one of {known} but is: {name!r}")
