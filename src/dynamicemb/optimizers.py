"""From TorchRec's fused parameters to the engine's optimizers, and the fused optimizer that DMP shows.

{"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}   ->   embstore.AdamW(lr=0.01, ...)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.fused import FusedOptimizer

import embstore

SUPPORTED = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.SGD: "sgd",
    EmbOptimType.ADAM: "adam",
    EmbOptimType.EXACT_ADAGRAD: "exact_adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "exact_row_wise_adagrad",
}
LEARNING_RATE = 0.01  # and EPS: what FBGEMM takes where nothing is said
EPS = 1e-8

# Fused parameters that are for TorchRec or FBGEMM and say nothing about the optimizer of a dynamic table.
_NOT_OURS = frozenset(
    {
        "optimizer",
        "output_dtype",
        "cache_load_factor",
        "cache_precision",
        "cache_algorithm",
        "cache_sets",
        "enforce_hbm",
        "stochastic_rounding",
        "bounds_check_mode",
        "prefetch_pipeline",
        "multipass_prefetch_config",
    }
)
_ADAM = ("beta1", "beta2", "betas", "eps", "weight_decay")
_ADAGRAD = ("eps", "initial_accumulator_value")
_KNOWN = {"sgd": (), "adam": _ADAM, "exact_adagrad": _ADAGRAD, "exact_row_wise_adagrad": _ADAGRAD}
_COMMON = ("learning_rate", "gradient_clipping", "max_gradient")
# What other optimizers of FBGEMM compute with, and where it means nothing. Any other value is refused.
UNUSED_MATHEMATICS: dict[str, Any] = {
    "weight_decay_mode": 0,
    "max_norm": 0.0,
    "eta": 0.001,
    "momentum": 0.9,
    "counter_based_regularization": None,
    "cowclip_regularization": None,
}


@dataclass
class OptimizerArgs:
    """Numbers of an optimizer, in the words of FBGEMM.

    An optimizer takes those that it has a use for; any other that differs from its default warns when a table
    is made, and one that would change the mathematics raises.

    Args:
        stochastic_rounding: no effect.
        gradient_clipping: clip every component of a gradient to max_gradient.
        max_gradient: the bound.
        max_norm: 0.0.
        learning_rate: of the next training batch.
        eps: of Adam and Adagrad.
        initial_accumulator_value: of Adagrad.
        beta1: of Adam.
        beta2: of Adam.
        weight_decay: of Adam, decoupled.
        weight_decay_mode: 0.
        eta: of LARS, which is not supported.
        momentum: of LARS, which is not supported.
        counter_halflife: of counters of FBGEMM, which are not supported; so are all that follow.
        adjustment_iter: not supported.
        adjustment_ub: not supported.
        learning_rate_mode: not supported.
        grad_sum_decay: not supported.
        tail_id_threshold: not supported.
        is_tail_id_thresh_ratio: not supported.
        total_hash_size: not supported.
        weight_norm_coefficient: not supported.
        lower_bound: not supported.
        regularization_mode: not supported.

    Raises:
        ValueError: a number is out of range; when a table is made.

    Examples:
        >>> from dynamicemb import EmbOptimType, OptimizerArgs
        >>> OptimizerArgs(learning_rate=0.1).fused_params(EmbOptimType.EXACT_ADAGRAD)["learning_rate"]
        0.1
    """

    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    max_norm: float = 0.0
    learning_rate: float = LEARNING_RATE
    eps: float = EPS
    initial_accumulator_value: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    eta: float = 0.001
    momentum: float = 0.9
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: int = -1
    grad_sum_decay: int = -1
    tail_id_threshold: float = 0
    is_tail_id_thresh_ratio: int = 0
    total_hash_size: int = 0
    weight_norm_coefficient: float = 0
    lower_bound: float = 0
    regularization_mode: int = 0

    def fused_params(self, optimizer: EmbOptimType) -> dict[str, Any]:
        """What a sharder takes: the optimizer, and the numbers that differ from the defaults.

        Args:
            optimizer: an EmbOptimType of FBGEMM.
        """
        usual = asdict(OptimizerArgs())
        return {
            "optimizer": optimizer,
            **{name: value for name, value in asdict(self).items() if value != usual[name]},
        }


def engine_optimizer(fused_params: Mapping[str, Any], table: str) -> embstore.Optimizer:
    """The optimizer of a table. ValueError for one that is not supported, a warning for a parameter
    that has no effect."""
    wanted = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    kind = SUPPORTED.get(wanted)
    if kind is None:
        names = ", ".join(member.name for member in SUPPORTED)
        raise ValueError(f"optimizer of table {table!r} should be one of {names} but is: {wanted!r}")
    for name, default in UNUSED_MATHEMATICS.items():
        value = fused_params.get(name, default)
        if value not in (None, default) and getattr(value, "value", value) != default:
            raise ValueError(
                f"{name} of table {table!r} should be {default!r}, as {wanted.name} has no use for another, "
                f"but is: {value!r}"
            )
    for name, value in fused_params.items():
        # A weight decay of zero asks for nothing, and torch optimizers always bring one.
        known = name in {*_NOT_OURS, *_COMMON, *_KNOWN[kind], *UNUSED_MATHEMATICS}
        if not known and not (name == "weight_decay" and not value):
            warnings.warn(
                f"fused parameter {name!r} has no effect on the dynamic table {table!r}",
                UserWarning,
                stacklevel=2,
            )
    get = fused_params.get
    common: dict[str, Any] = {"lr": float(get("learning_rate", LEARNING_RATE))}
    if get("gradient_clipping", False):
        common["clip_value"] = float(get("max_gradient", 1.0))
    if kind == "sgd":
        return embstore.SGD(**common)
    eps = float(get("eps", EPS))
    if kind == "adam":
        beta1, beta2 = get("betas", (get("beta1", 0.9), get("beta2", 0.999)))
        decay = float(get("weight_decay", 0.0))
        return embstore.AdamW(**common, betas=(float(beta1), float(beta2)), eps=eps, weight_decay=decay)
    start = float(get("initial_accumulator_value", 0.0))
    adagrad = embstore.Adagrad if kind == "exact_adagrad" else embstore.RowwiseAdagrad
    return adagrad(**common, eps=eps, initial_accumulator_value=start)


def optimizer_args(table: embstore.Table) -> dict[str, Any]:
    """The optimizer of a table as `{table}_opt_args.json` describes it."""
    return described(table.options.optimizer, table.learning_rate, table.optimizer_step)


def described(optimizer: embstore.Optimizer, lr: float, step: int = 0) -> dict[str, Any]:
    """An optimizer in the words of `{table}_opt_args.json`."""
    args: dict[str, Any] = {"lr": lr}
    if isinstance(optimizer, embstore.Adam):
        args |= {
            "opt_type": "adam",
            "iters": step,
            "beta1": optimizer.betas[0],
            "beta2": optimizer.betas[1],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        }
    elif isinstance(optimizer, embstore.Adagrad):
        rowwise = isinstance(optimizer, embstore.RowwiseAdagrad)
        args |= {
            "opt_type": "exact_row_wise_adagrad" if rowwise else "exact_adagrad",
            "eps": optimizer.eps,
            "initial_accumulator_value": optimizer.initial_accumulator_value,
        }
    else:
        args["opt_type"] = "sgd"
    return args


class DynamicEmbeddingFusedOptimizer(FusedOptimizer):
    """The optimizer of the dynamic tables of a collection, as `dmp.fused_optimizer` shows it.

    Rows move inside of backward, so `step` moves nothing. Every table has a parameter group of its own;
    the "lr" in it is what the next training batch uses, so any scheduler reaches the tables.
    """

    def __init__(
        self, params: Mapping[str, torch.nn.Parameter], tables: Mapping[str, embstore.Table]
    ) -> None:
        groups = [
            {"params": [param], "lr": table.options.optimizer.lr}
            for param, table in zip(params.values(), tables.values(), strict=True)
        ]
        super().__init__(dict(params), {}, groups)

    def step(self, closure: Any = None) -> None:
        """Nothing is left to do."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing is left to do."""
