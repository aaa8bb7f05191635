"""Modules whose weights are rows: what torch sees of them, and gradients that wait for a step.

Such a module has one parameter, its shadow, which stands for all rows. While gradients of rows are pending,
the shadow's gradient describes them:

    [M, R, T]      M  the largest magnitude of their components
                   R  sqrt(N^2 - M^2), where N is their norm: the norm of the vector is N
                   T  2^-64, a mark that nothing but scaling changes

So what torch does to the gradients of parameters reaches the rows: clip_grad_norm_ counts N, a GradScaler
finds what is not finite, and both scale T; clip_grad_value_ lowers M; `zero_grad` drops what is pending.
Freezing the parameter freezes the rows. The shadow itself stays 0.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from embstore import _core
from embstore.distributed.routing import route_keys, sum_rows
from embstore.table import Table

MARK = 2.0**-64

Gradients = Sequence[tuple[Table, _core.GradientRequest, _core.SlotList]]


@dataclass(slots=True, eq=False)
class _Sums:
    """Gradients of one table: keys (n), all different, and sums (n, dim). The rows stay pinned meanwhile, so
    that none is evicted before its update."""

    keys: torch.Tensor
    sums: torch.Tensor
    pins: list[_core.SlotList]

    def add(self, keys: torch.Tensor, sums: torch.Tensor, pins: _core.SlotList) -> None:
        both = torch.cat([self.keys, keys])
        route = route_keys(both, torch.tensor([0, both.numel()]), 1, unique=[True])
        self.sums = sum_rows(torch.cat([self.sums, sums]), route.index, route.keys.numel())
        self.keys = route.keys
        self.pins.append(pins)


class PendingGradients:
    """Gradients that wait for a step: "accumulate now, step later"."""

    def __init__(self) -> None:
        # By table; True: of its shared rows, by number, since a key may get a row before the step.
        self._sums: dict[tuple[str, bool], _Sums] = {}

    def add(self, gradients: Gradients) -> None:
        for table, request, pins in gradients:
            keys, sums, numbers = map(torch.from_numpy, _core.reduce_gradients(request))
            shared = numbers.numel()
            self._add((table.name, False), keys[shared:], sums[shared:], pins)
            if shared:
                self._add((table.name, True), numbers, sums[:shared], pins)

    def _add(
        self, where: tuple[str, bool], keys: torch.Tensor, sums: torch.Tensor, pins: _core.SlotList
    ) -> None:
        pending = self._sums.get(where)
        if pending is None:
            self._sums[where] = _Sums(keys, sums, [pins])
        else:
            pending.add(keys, sums, pins)

    def measure(self) -> tuple[float, float]:
        """The sum of squares, and the largest magnitude."""
        squares, largest = 0.0, 0.0
        for pending in self._sums.values():
            if pending.sums.numel():
                squares += float(torch.linalg.vector_norm(pending.sums, dtype=torch.float64)) ** 2
                low, high = (float(x) for x in torch.aminmax(pending.sums))
                largest = max(largest, -low, high) if low == low else math.nan
        return squares, largest

    def change(self, factor: float, bound: float | None) -> None:
        """Scales all, then limits their components to [-bound, bound]."""
        for pending in self._sums.values():
            pending.sums = _changed(pending.sums, factor, bound)

    def apply(self, tables: Sequence[Table], factor: float = 1.0, bound: float | None = None) -> None:
        """One update of every table, with gradients changed as by `change`; what is pending stays."""
        for table in tables:
            shared = self._sums.get((table.name, True))
            if shared is not None:
                table.apply_gradients_to_shared(shared.keys, _changed(shared.sums, factor, bound))
            pending = self._sums.get((table.name, False))
            if pending is None:
                table.optimizer_step += 1
            else:
                table.apply_gradients(pending.keys, _changed(pending.sums, factor, bound))

    def clear(self) -> None:
        self._sums = {}

    def __len__(self) -> int:
        return len(self._sums)


def _changed(sums: torch.Tensor, factor: float, bound: float | None) -> torch.Tensor:
    if factor != 1.0:
        sums = sums * factor
    return sums if bound is None else sums.clamp(-bound, bound)


class RowModule(nn.Module):
    """Base of modules whose weights are rows of tables; see the top of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = nn.Parameter(torch.zeros(3))
        self._pending = PendingGradients()
        self._shown = 0.0  # the M that the shadow's gradient had at first
        self._output_dtype: torch.dtype | None = None  # None: that of the table
        _modules.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _modules.add(self)

    @property
    def trains(self) -> bool:
        """Whether a lookup may insert and update rows: in training mode, unless the module is frozen."""
        return self.training and self.shadow.requires_grad

    # ---- gradients

    def _keep_gradients(self, gradients: Gradients) -> None:
        """Adds gradients to what is pending."""
        self._drop_zeroed()
        if len(self._pending):
            self._pending.change(*self._changes())
        self._pending.add(gradients)
        squares, largest = self._over_ranks(*self._pending.measure())
        rest = math.sqrt(max(0.0, squares - largest**2)) if math.isfinite(squares) else squares
        self.shadow.grad = self.shadow.new_tensor([largest, rest, MARK])
        self._shown = float(self.shadow.grad[0])

    def _over_ranks(self, squares: float, largest: float) -> tuple[float, float]:
        """The sum of squares and the largest magnitude over all ranks that share the rows."""
        return squares, largest

    def _changes(self) -> tuple[float, float | None]:
        """What happened to the shadow's gradient: its factor, and the bound of components if there is one."""
        assert self.shadow.grad is not None
        largest, _, mark = self.shadow.grad.tolist()
        factor = mark / MARK
        if abs(factor - 1.0) < 1e-6:  # the mean over ranks that DistributedDataParallel takes, rounded
            factor = 1.0
        clipped = abs(largest) < self._shown * abs(factor) * (1 - 1e-6)  # more than rounding
        return factor, abs(largest) if clipped else None

    def _drop_zeroed(self) -> None:
        """An optimizer's `zero_grad` reaches the shadow alone: what is pending goes with its gradient."""
        if self.shadow.grad is None or not self.shadow.grad.any():
            self._pending.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops pending gradients, beside those of parameters."""
        super().zero_grad(set_to_none)
        self._pending.clear()

    # ---- steps of optimizers that hold the shadow

    def before_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Raises where rows cannot follow this optimizer; nothing has moved yet."""

    def after_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Moves the rows that have gradients pending."""

    # ---- what torch does to modules

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RowModule:
        """`.to`, `.half` and the like: rows stay as they are, vectors come in the dtype that is asked for."""
        dtypes = {fn(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(dtypes) == 1:  # whatever it was before
            (dtype,) = dtypes
            if not dtype.is_floating_point:
                raise TypeError(f"dtype should be one of floating point for an embedding but is: {dtype}")
            self._output_dtype = dtype
        shadow = self.shadow

        def only_move(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            if applied.dtype != tensor.dtype and (tensor is shadow or tensor is shadow.grad):
                return tensor.detach().to(applied.device)  # float32 holds the mark
            return applied

        super()._apply(only_move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _in_dtype(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors if self._output_dtype is None else vectors.to(self._output_dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "shadow", None)  # it holds nothing

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        # The parameter stays the same, also with assign=True: optimizers know the rows by it.
        state = {**state_dict, prefix + "shadow": self.shadow}
        super()._load_from_state_dict(state, prefix, *arguments)


# ---- hooks of torch.optim

_modules: weakref.WeakSet[RowModule] = weakref.WeakSet()


def _shadows() -> dict[int, RowModule]:
    return {id(module.shadow): module for module in list(_modules)}


def is_shadow(parameter: torch.Tensor) -> bool:
    """Whether this parameter stands for the rows of a module."""
    return id(parameter) in _shadows()


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[RowModule, dict[str, Any]]]:
    """The modules whose shadow is in a param group of this optimizer, with the group."""
    if not _modules:
        return
    shadows = _shadows()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            module = shadows.get(id(parameter))
            if module is not None:
                yield module, group


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Before anything moves: an error must not leave dense parameters a step ahead of the rows.
    for module, group in held_by(optimizer):
        module.before_step(optimizer, group)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A fused optimizer under a GradScaler is called with gradients that are not finite, and skips the step.
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return
    for module, group in held_by(optimizer):
        module.after_step(optimizer, group)
        with torch.no_grad():
            module.shadow.zero_()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
