"""Optimizers by the names of the current original package, and their numbers and sizes.

The optimizer classes say how wide a state is and carry arguments; rows are updated by the table, so their
update methods do not exist here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb.optimizers import OptimizerArgs
from dynamicemb.sizing import get_optimizer_ckpt_state_dim, get_optimizer_state_dim

__all__ = [
    "AdaGradDynamicEmbeddingOptimizer",
    "AdamDynamicEmbeddingOptimizer",
    "BaseDynamicEmbeddingOptimizer",
    "EmbOptimType",
    "OptimizerArgs",
    "RowWiseAdaGradDynamicEmbeddingOptimizer",
    "SGDDynamicEmbeddingOptimizer",
    "get_optimizer_ckpt_state_dim",
    "get_optimizer_state_dim",
    "get_required_arg",
    "pad_optimizer_states_from_checkpoint",
    "string_to_opt_type",
    "truncate_optimizer_states_for_checkpoint",
]


def string_to_opt_type(optimizer_str: str) -> EmbOptimType:
    """FBGEMM's optimizer of this value: string_to_opt_type("adam")."""
    try:
        return EmbOptimType(optimizer_str)
    except ValueError:
        allowed = [member.value for member in EmbOptimType]
        raise ValueError(f"optimizer_str should be one of {allowed} but is: {optimizer_str!r}") from None


def get_required_arg(args: Mapping[str, Any], key: str) -> Any:
    """args[key]; ValueError where it is missing."""
    if key not in args:
        raise ValueError(f"args should have {key!r} but has only: {sorted(args)}")
    return args[key]


class BaseDynamicEmbeddingOptimizer:
    """Arguments and sizes of an optimizer. Subclasses name what a dump keeps."""

    opt_type = EmbOptimType.NONE
    saved: tuple[str, ...] = ()

    def __init__(self, opt_args: OptimizerArgs, emb_dtype: torch.dtype = torch.float32) -> None:
        self._opt_args = replace(opt_args)
        self._emb_dtype = emb_dtype

    def get_state_dim(self, emb_dim: int) -> int:
        """Elements of state in memory, beside a vector of this width."""
        return get_optimizer_state_dim(self.opt_type, emb_dim, self._emb_dtype)

    def get_ckpt_state_dim(self, emb_dim: int) -> int:
        """Elements of state in a dump."""
        return get_optimizer_ckpt_state_dim(self.opt_type, emb_dim, self._emb_dtype)

    def get_initial_optim_states(self) -> float:
        """What the state of a new row is."""
        return 0.0

    def get_opt_args(self) -> dict[str, Any]:
        """The arguments as `{table}_opt_args.json` has them."""
        values = asdict(self._opt_args)
        found = {"lr": values["learning_rate"], **{name: values[name] for name in self.saved}}
        return {"opt_type": self.opt_type.value, **found}

    def set_opt_args(self, args: Mapping[str, Any]) -> None:
        """Takes over what `get_opt_args` gave. Raises ValueError where one is missing."""
        numbers = {"learning_rate": get_required_arg(args, "lr")}
        numbers |= {name: get_required_arg(args, name) for name in self.saved}
        self._opt_args = replace(self._opt_args, **numbers)

    def set_learning_rate(self, new_lr: float) -> None:
        self._opt_args.learning_rate = new_lr


class SGDDynamicEmbeddingOptimizer(BaseDynamicEmbeddingOptimizer):
    opt_type = EmbOptimType.SGD


class AdamDynamicEmbeddingOptimizer(BaseDynamicEmbeddingOptimizer):
    opt_type = EmbOptimType.ADAM
    saved = ("beta1", "beta2", "eps", "weight_decay")


class AdaGradDynamicEmbeddingOptimizer(BaseDynamicEmbeddingOptimizer):
    opt_type = EmbOptimType.EXACT_ADAGRAD
    saved = ("eps", "initial_accumulator_value")

    def get_initial_optim_states(self) -> float:
        return self._opt_args.initial_accumulator_value


class RowWiseAdaGradDynamicEmbeddingOptimizer(AdaGradDynamicEmbeddingOptimizer):
    opt_type = EmbOptimType.EXACT_ROWWISE_ADAGRAD


_KINDS = {
    kind.opt_type.value: kind
    for kind in (
        SGDDynamicEmbeddingOptimizer,
        AdamDynamicEmbeddingOptimizer,
        AdaGradDynamicEmbeddingOptimizer,
        RowWiseAdaGradDynamicEmbeddingOptimizer,
    )
}


def optimizer_from(args: Mapping[str, Any], dtype: torch.dtype) -> BaseDynamicEmbeddingOptimizer:
    """The optimizer that `get_opt_args` and `{table}_opt_args.json` describe."""
    kind = _KINDS[args["opt_type"]]
    numbers = {name: args[name] for name in kind.saved}
    return kind(OptimizerArgs(learning_rate=args["lr"], **numbers), dtype)


def truncate_optimizer_states_for_checkpoint(
    optimizer: BaseDynamicEmbeddingOptimizer, emb_dim: int, opt_states_runtime: torch.Tensor
) -> torch.Tensor:
    """The columns of states in memory that a dump keeps."""
    kept, columns = optimizer.get_ckpt_state_dim(emb_dim), opt_states_runtime.size(1)
    if kept > columns:
        raise ValueError(f"opt_states_runtime should have at least {kept} columns but has: {columns}")
    return opt_states_runtime.narrow(1, 0, kept).clone()


def pad_optimizer_states_from_checkpoint(
    optimizer: BaseDynamicEmbeddingOptimizer,
    emb_dim: int,
    opt_states_from_file: torch.Tensor,
    initial_accumulator_value: float,
    values_dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """States of a dump as wide as in memory; columns that the dump lacks get the initial value."""
    rows, columns = opt_states_from_file.shape
    width = optimizer.get_state_dim(emb_dim)
    states = torch.full((rows, width), initial_accumulator_value, dtype=values_dtype, device=device)
    known = min(columns, width)
    states[:, :known] = opt_states_from_file[:, :known].to(states)
    return states
