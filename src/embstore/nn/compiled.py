"""Lookups as operators of torch.library, for graphs of torch.compile and torch.export.

    look_up(shadow, keys, offsets, weights, module, tables, pooling, access)   ->  [vectors.., ticket]
    update(ticket, gradients, numbers, weights)                   ->  [gradient of the shadow, of weights..]

A graph holds tensors and numbers alone: `module` is the number of a module of this process, `tables` are
positions among its tables, an absent tensor is an empty one. The ticket names the batch, whose rows stay
pinned until the ticket's memory is freed: after the backward pass, or with a graph that has none.

A graph keeps only operators whose results it needs, so `update` gives the shadow a gradient of 0.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from embstore.arrays import torch_dtype
from embstore.nn.batch import Access, Batch, Pooling, Request
from embstore.nn.pooling import pool

if TYPE_CHECKING:
    from embstore.nn.table_module import TableModule

_modules: weakref.WeakValueDictionary[int, TableModule] = weakref.WeakValueDictionary()
_batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def number_of(module: TableModule) -> int:
    """A number by which graphs know this module."""
    number = next(_numbers)
    _modules[number] = module
    return number


def _module(number: int) -> TableModule:
    module = _modules.get(number)
    if module is None:
        raise RuntimeError("a compiled or exported lookup needs its module, which is gone")
    return module


class _Ticket(np.ndarray[Any, np.dtype[np.int64]]):
    """The number of a batch; memory of torch that keeps the batch."""

    batch: Batch


def _ticket(batch: Batch) -> torch.Tensor:
    number = next(_numbers)
    _batches[number] = batch
    array: npt.NDArray[np.int64] = np.array([number], np.int64)
    ticket = array.view(_Ticket)
    ticket.batch = batch
    return torch.from_numpy(ticket)


@torch.library.custom_op("embstore::look_up", mutates_args=())
def look_up(
    shadow: torch.Tensor,
    keys: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    module: int,
    tables: Sequence[int],
    pooling: int,
    access: int,
) -> list[torch.Tensor]:
    owner = _module(module)
    requests = [
        Request(
            owner._table_at(table),
            k.contiguous(),
            Pooling(pooling),
            o.contiguous() if pooling else None,
            w.contiguous() if w.numel() else None,
        )
        for table, k, o, w in zip(tables, keys, offsets, weights, strict=True)
    ]
    batch = owner._batch_of(requests)
    outputs = batch.forward(Access(access))
    return [*map(owner._in_dtype, outputs), _ticket(batch)]


@look_up.register_fake
def _(
    shadow: torch.Tensor,
    keys: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    module: int,
    tables: Sequence[int],
    pooling: int,
    access: int,
) -> list[torch.Tensor]:
    owner = _module(module)
    outputs = []
    for table, k, o in zip(tables, keys, offsets, strict=True):
        options = owner._table_at(table).options
        rows = o.shape[0] - 1 if pooling else k.shape[0]
        dtype = owner._output_dtype or torch_dtype(options.dtype)
        outputs.append(torch.empty((rows, options.dim), dtype=dtype, device="cpu"))
    return [*outputs, torch.empty(1, dtype=torch.int64, device="cpu")]


@torch.library.custom_op("embstore::update", mutates_args=())
def update(
    ticket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    numbers: Sequence[int],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    batch = _batches.get(int(ticket))
    if batch is None:
        raise RuntimeError("the batch of a compiled lookup is gone: its ticket was copied")
    batch.require_slots()
    given: list[torch.Tensor | None] = [None] * len(batch.requests)
    for number, gradient in zip(numbers, gradients, strict=True):
        given[number] = gradient
    of_weights = batch.backward(given, [w.numel() > 0 for w in weights])
    return [
        torch.zeros(3),
        *(torch.zeros_like(w) if g is None else g.to(w) for g, w in zip(of_weights, weights, strict=True)),
    ]


@update.register_fake
def _(
    ticket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    numbers: Sequence[int],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    return [torch.empty(3), *map(torch.empty_like, weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    shadow, _, _, weights, _, _, _, access = inputs
    ctx.trains = access == Access.TRAIN
    ctx.device = shadow.device
    ctx.save_for_backward(output[-1], *weights)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    ticket, *weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3]
    weights = [w if needed else w.new_empty(0) for w, needed in zip(weights, wanted, strict=True)]
    present = [(i, g) for i, g in enumerate(gradients[:-1]) if g is not None]
    none = [None] * len(weights)
    of_shadow, *of_weights = update(
        ticket, [g.to("cpu").contiguous() for _, g in present], [i for i, _ in present], weights
    )
    return of_shadow.to(ctx.device), none, none, of_weights, None, None, None, None


look_up.register_autograd(_backward, setup_context=_save)


def run_in_graph(
    module: TableModule, requests: Sequence[Request], weights: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The vectors of a batch, by one operator of the graph that is being made."""
    if not requests:
        return []
    access, pooling = module._access, requests[0].pooling
    shadow: torch.Tensor = module.shadow
    positions = {name: position for position, name in enumerate(module.tables)}
    tables = [positions[request.table.name] for request in requests]
    keys = [request.keys for request in requests]
    offsets = [r.keys.new_empty(0) if r.offsets is None else r.offsets for r in requests]
    given = [torch.empty(0) if w is None else w.to("cpu", torch.float32).reshape(-1) for w in weights]
    factors: list[torch.Tensor] = []
    if access != Access.TRAIN:
        shadow = shadow.detach()
        if torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights):
            factors = [w if w.numel() else torch.ones(k.shape[0]) for w, k in zip(given, keys, strict=True)]
            pooling = Pooling.NONE  # which is left to torch, and with it the gradient of the weights
        given = [torch.empty(0) if factors else w.detach() for w in given]
    outputs: list[torch.Tensor] = look_up(
        shadow, keys, offsets, given, module._number, tables, int(pooling), int(access)
    )[:-1]
    if not factors:
        return outputs
    parts = zip(outputs, offsets, factors, requests, strict=True)
    return [pool(vectors, at, factor, request.pooling) for vectors, at, factor, request in parts]
