"""The device tier: rows of a table on a torch device, addressed by slots.

    tier = DeviceTier(table, "cuda", rows=1_000_000)
    vectors = tier.vectors(keys, Access.TRAIN)      # (n, dim) on the device, n different keys
    tier.update(keys, gradients)                    # the optimizer runs on the device
    tier.flush()                                    # changed rows go back to the table

    keys      40  -7  99          slots      0   1   2          rows[slot] = [vector | optimizer state]

It is a write-back cache of its table: missing rows are copied up, changed ones go down before their slot is
used again, with their optimizer state. Built of plain torch operations (index_select, index_copy_), so that
the same code runs on every device, the CPU too. It has not been measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from embstore.arrays import as_integer
from embstore.nn.batch import Access, Pooling, Request
from embstore.nn.pooling import check_offsets, pool
from embstore.optimizers import SGD, Adagrad, Adam, AdamW, EpsPlacement, Optimizer
from embstore.options import DType
from embstore.slot_map import Pairs, SlotMap
from embstore.table import Table


def require_rule(optimizer: Optimizer) -> None:
    """Raises NotImplementedError where the device does not have the rule of this optimizer."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adagrad, Adam, AdamW):
        raise NotImplementedError(f"a device tier has SGD, Adagrad, Adam and AdamW but not: {name}")
    if isinstance(optimizer, SGD) and optimizer.momentum:
        raise NotImplementedError(f"a device tier has no momentum for SGD but is given: {optimizer.momentum}")
    for option in ("clip_value", "clip_norm"):
        if getattr(optimizer, option):
            raise NotImplementedError(f"a device tier has no {option} but is given: {optimizer!r}")


class DeviceTier:
    """`rows` rows of a table on a device. A batch may have at most so many different keys.

    While it is in use, read and write the table through it, or after `flush`. Not thread-safe.
    """

    def __init__(self, table: Table, device: torch.device | str, rows: int) -> None:
        self.device = torch.device(device)
        if self.device.type == "meta":
            raise ValueError("device should hold data but is: meta")
        if table.options.dtype != DType.FLOAT32:
            raise ValueError(f"dtype should be FLOAT32 for a device tier but is: {table.options.dtype.name}")
        for option in ("admission_threshold", "admission", "shared_rows"):
            if value := getattr(table.options, option):
                raise ValueError(
                    f"{option} should be 0 for a device tier, which holds every key of its batches, "
                    f"but is: {value!r}"
                )
        if table.options.ttl is not None:
            raise ValueError(
                f"ttl should be None for a device tier, whose rows do not expire, but is: {table.options.ttl}"
            )
        require_rule(table.options.optimizer)
        rows = as_integer(rows, 1, (1 << 29) - 1, "rows")
        self.table = table
        self.rows = torch.zeros(rows, table.dim + table.state_width, device=self.device)
        self._slots = SlotMap(rows)
        self._dirty = np.zeros(rows, bool)

    def __len__(self) -> int:
        return len(self._slots)

    # ---- a batch; the keys are different from each other, on the CPU

    def vectors(self, keys: torch.Tensor, access: Access) -> torch.Tensor:
        """Vectors on the device. Unless access is TRAIN, nothing moves and missing keys read what it says."""
        if access == Access.TRAIN:
            return self._gather(self._bring_up(keys))[:, : self.table.dim]
        slots = self._slots.find(keys, self._slots.last_time)
        out = self._gather(slots.clip(min=0))[:, : self.table.dim]
        (missing,) = np.nonzero(slots < 0)
        if len(missing):
            absent = keys.numpy()[missing]
            below, found = self.table.find(absent)
            if access == Access.READ_INITIAL:
                below = np.where(found[:, None], below, self.table.initial_values(absent))
            out.index_copy_(0, self._place(missing), self._place(below))
        return out

    def update(self, keys: torch.Tensor, gradients: torch.Tensor) -> None:
        """One optimizer step of the table: gradients (n, dim), one for each key."""
        # By key, not by the slots of the forward pass: another batch may have pushed a row out since.
        slots = self._bring_up(keys)
        at = self._place(slots)
        moved = self._moved(self.rows.index_select(0, at), gradients.to(self.rows))
        self.rows.index_copy_(0, at, moved)
        self._dirty[slots] = True

    def flush(self) -> None:
        """Writes changed rows to the table; they stay here too."""
        pairs = self._slots.used_since(0)
        self._write_back(pairs)

    def clear(self) -> None:
        """Forgets all rows, changed ones too: for a table that was replaced."""
        self._slots = SlotMap(self._slots.slots)
        self._dirty[:] = False

    # ---- how rows come and go

    def _bring_up(self, keys: torch.Tensor) -> Any:
        if keys.numel() > self._slots.slots:
            raise ValueError(
                f"rows of the device tier of table {self.table.name!r} should be at least {keys.numel()}, "
                f"the different keys of a batch, but are: {self._slots.slots}"
            )
        time = self._slots.last_time + 1
        slots = self._slots.find(keys, time)
        wanted = self._slots.missing - self._slots.free_slots
        if wanted > 0:
            self._write_back(self._slots.victims(wanted, time))
            self._slots.drop()
        if self._slots.missing:
            pairs = self._slots.admit()
            try:
                self._fetch(pairs)
            except BaseException:
                self._slots.forget(np.ascontiguousarray(pairs[:, 0]))
                raise
        return slots

    def _fetch(self, pairs: Pairs) -> None:
        keys = np.ascontiguousarray(pairs[:, 0])
        self.table.find_or_insert(keys)
        found = self.table.read(keys)
        rows = np.concatenate([found.values, found.states], axis=1)
        self.rows.index_copy_(0, self._place(pairs[:, 1]), self._place(rows))
        self._dirty[pairs[:, 1]] = False

    def _write_back(self, pairs: Pairs) -> None:
        changed = pairs[self._dirty[pairs[:, 1]]]
        if not len(changed):
            return
        rows = self._gather(changed[:, 1]).cpu().numpy()
        dim = self.table.dim
        self.table.insert_or_assign(np.ascontiguousarray(changed[:, 0]), rows[:, :dim], states=rows[:, dim:])
        self._dirty[changed[:, 1]] = False

    def _place(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _gather(self, slots: Any) -> torch.Tensor:
        return self.rows.index_select(0, self._place(slots))

    # ---- the optimizer, as core/src/optimizers.inc has it

    def _moved(self, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The rows after one step."""
        optimizer, dim = self.table.options.optimizer, self.table.dim
        require_rule(optimizer)
        rate, values = self.table.learning_rate, rows[:, :dim]
        decay = optimizer.weight_decay * values
        g = gradient if optimizer.decoupled else gradient + decay
        states: list[torch.Tensor] = []
        if isinstance(optimizer, Adam):
            beta1, beta2 = optimizer.betas
            first = beta1 * rows[:, dim : 2 * dim] + (1 - beta1) * g
            second = beta2 * rows[:, 2 * dim :] + (1 - beta2) * g * g
            t = self.table.optimizer_step + 1
            correction1 = 1 - beta1**t if optimizer.bias_correction else 1.0
            root = math.sqrt(1 - beta2**t) if optimizer.bias_correction else 1.0
            if optimizer.eps_placement == EpsPlacement.KERAS:
                step = rate * root / correction1 * first / (second.sqrt() + optimizer.eps)
            else:
                step = rate / correction1 * first / (second.sqrt() / root + optimizer.eps)
            states = [first, second]
        elif isinstance(optimizer, Adagrad):
            sums = rows[:, dim:] + g * g
            keras = optimizer.eps_placement == EpsPlacement.KERAS
            step = rate * g / ((sums + optimizer.eps).sqrt() if keras else sums.sqrt() + optimizer.eps)
            states = [sums]
        else:
            step = rate * g
        if optimizer.decoupled:
            step = step + rate * decay
        return torch.cat([values - step, *states], dim=1)


class _Rows(torch.autograd.Function):
    """Vectors of different keys; their gradients move the rows."""

    @staticmethod
    def forward(
        ctx: Any, tier: DeviceTier, keys: torch.Tensor, anchor: torch.Tensor, moved: Callable[[], None]
    ) -> torch.Tensor:
        ctx.tier, ctx.keys, ctx.moved, ctx.done = tier, keys, moved, False
        return tier.vectors(keys, Access.TRAIN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.done:
            raise RuntimeError("a batch can be backpropagated once: its rows have already been updated")
        ctx.done = True
        ctx.tier.update(ctx.keys, gradient)
        ctx.tier.table.optimizer_step += 1
        ctx.moved()
        return None, None, None, None


def run_on_device(
    tier: DeviceTier,
    request: Request,
    weights: torch.Tensor | None,
    anchor: torch.Tensor,
    access: Access,
    moved: Callable[[], None],
) -> torch.Tensor:
    """What `batch.run` gives for one request, made on the device of the tier; `moved` is called once the rows
    have been updated."""
    keys, inverse = torch.unique(request.keys, return_inverse=True)
    if access == Access.TRAIN and torch.is_grad_enabled():
        rows = _Rows.apply(tier, keys, anchor, moved)  # type: ignore[no-untyped-call]
    else:
        rows = tier.vectors(keys, access)
    vectors: torch.Tensor = rows.index_select(0, inverse.to(tier.device))
    if request.pooling == Pooling.NONE:
        return vectors
    assert request.offsets is not None
    check_offsets(request.offsets, request.keys.numel())
    return pool(
        vectors, request.offsets, weights if weights is not None else request.weights, request.pooling
    )
