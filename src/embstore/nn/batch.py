"""A batch on its way through the engine: forward, and later backward, over several tables at once.

    requests = [Request(table_a, keys_a), Request(table_b, keys_b, Pooling.SUM, offsets=offsets_b)]
    vectors = run(requests, training=True, anchor=anchor)    # tensors that backward through autograd

All requests of a batch go to the engine in one call, so that its threads are shared among the tables.
The backward pass is one call too: it sums the gradients of each row and runs the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from embstore import _core
from embstore.arrays import as_keys, empty_tensor, engine_dtype, torch_dtype
from embstore.lookup import Access as Access
from embstore.lookup import Pooling as Pooling
from embstore.table import Table

# Takes keys (n); returns a uint8 for each, 0 where it is not to be stored unless it is already, and (n, dim)
# float32 as `Request.initial`. None: all may be stored, or the table's own initial vectors.
Gate = Callable[[torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]


@dataclass(slots=True, eq=False)
class Request:
    """The keys of one table in a batch. Everything is on the CPU and contiguous.

    keys       (n) int64
    offsets    (bags + 1) int64; not pooled: the runs of keys that `positions` places
    weights    (n) float32 or None, pooled only
    positions  (bags) int64: element offsets of the bags (or runs) in `out`, or None for one after the other
    initial    (n, dim) float32: what keys start with where they are not stored, or None for the initializer
    out        where the vectors go; made when None: (n, dim) or (bags, dim) of `dtype`
    gradient_positions  as `positions`, in the gradient as `Batch.arrange` returns it; None: the same
    gate       decides in training which missing keys are stored, or None for all
    missing    what the components of a missing key are where the access is READ_ZERO
    """

    table: Table
    keys: torch.Tensor
    pooling: Pooling = Pooling.NONE
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    initial: torch.Tensor | None = None
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    gradient_positions: torch.Tensor | None = None
    gate: Gate | None = None
    missing: float = 0.0

    @property
    def bags(self) -> int:
        return 0 if self.offsets is None else self.offsets.numel() - 1

    def output(self) -> torch.Tensor:
        if self.out is None:
            rows = self.bags if self.pooling else self.keys.numel()
            dtype = self.dtype or torch_dtype(self.table.options.dtype)
            self.out = empty_tensor((rows, self.table.dim), dtype)
        return self.out


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# Takes (table, gradient request, slots) of every table of a batch, and updates or keeps them.
Update = Callable[[Sequence[tuple[Table, _core.GradientRequest, _core.SlotList]]], None]


# Takes the gradient of the tensor that all requests wrote into, and returns it in the order of
# `Request.gradient_positions`.
Arrange = Callable[[torch.Tensor], torch.Tensor]


def update_rows(gradients: Sequence[tuple[Table, _core.GradientRequest, _core.SlotList]]) -> None:
    """The fused update: every row moves now."""
    _core.apply_gradients([request for _, request, _ in gradients])


def _engine_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    g = gradient.to("cpu")
    return (g if engine_dtype(g.dtype) is not None else g.float()).contiguous()


def _graph_is_kept() -> bool:
    """Whether the backward pass that runs was called with retain_graph=True."""
    asked: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or asked()  # unknown: rows stay pinned until the graph goes


@dataclass(frozen=True)
class Prepared:
    """A training lookup ahead of its forward pass: rows are inserted and pinned, scores and counts renewed.

    slots    of each request
    vectors  of each request (n, dim) float32: what the keys read that got no row
    """

    slots: list[_core.SlotList]
    vectors: list[torch.Tensor]


def prepare(requests: Sequence[Request]) -> Prepared:
    """Makes the training lookup of these requests now; `Batch.prepared` takes it over."""
    plain = [Request(r.table, r.keys, initial=r.initial, dtype=torch.float32, gate=r.gate) for r in requests]
    batch = Batch(plain)
    vectors = batch.forward(Access.TRAIN)
    return Prepared(batch.slots, vectors)


class Batch:
    """The requests of one forward pass, and the rows that it pinned for the backward pass."""

    def __init__(
        self,
        requests: Sequence[Request],
        update: Update = update_rows,
        *,
        counts: bool = True,
        out: torch.Tensor | None = None,
        gradient_scale: float = 1.0,
        arrange: Arrange | None = None,
        accumulates: bool = False,
    ) -> None:
        self.requests = requests
        self.accumulates = accumulates
        self.arrange = arrange
        self.update = update
        self.counts = counts
        self.out = out
        self.gradient_scale = gradient_scale
        self.slots: list[_core.SlotList] = []
        self.prepared: Prepared | None = None

    def forward(self, access: Access) -> list[torch.Tensor]:
        """Fills the outputs. Raises (or warns) when keys were refused, as their table asks for."""
        prepared = self.prepared if access == Access.TRAIN else None
        if prepared is not None:
            access, self.slots = Access.READ_INITIAL, prepared.slots  # a training lookup has been made
        outputs, core_requests, kept = [], [], []
        filled = access == Access.READ_ZERO and any(r.missing for r in self.requests)
        for number, r in enumerate(self.requests):
            admitted, initial = None, r.initial if prepared is None else prepared.vectors[number]
            if access == Access.TRAIN and r.gate is not None:
                admitted, initial = r.gate(r.keys)
            elif filled:
                initial = torch.full((r.keys.numel(), r.table.dim), r.missing, dtype=torch.float32)
            kept += [admitted, initial]
            out = r.output() if self.out is None else self.out
            dtype = engine_dtype(out.dtype)
            if dtype is None:
                raise ValueError(f"dtype should be float32, float16 or bfloat16 but is: {out.dtype}")
            outputs.append(out)
            core_requests.append(
                _core.LookupRequest(
                    r.table._core,
                    r.keys.data_ptr(),
                    r.keys.numel(),
                    int(r.pooling),
                    _pointer(r.offsets),
                    r.bags,
                    _pointer(r.weights),
                    out.data_ptr(),
                    int(dtype),
                    r.table.dim,
                    _pointer(r.positions),
                    _pointer(initial),
                    _pointer(admitted),
                )
            )
        results = _core.look_up(core_requests, int(Access.READ_INITIAL if filled else access))
        for r, (slots, refused) in zip(self.requests, results, strict=True):
            r.out = None  # the caller's from here on
            if prepared is None:
                self.slots.append(slots)
            if access == Access.TRAIN:
                r.table.pressure.after_batch(r.table)
            if refused:
                r.table.report_refused(refused, r.keys.numel())
        if self.out is not None:
            outputs, self.out = [self.out], None
        return outputs

    def require_slots(self) -> None:
        """Raises when the backward pass cannot run again."""
        if not self.slots:
            raise RuntimeError(
                "a batch can be backpropagated again only after backward(retain_graph=True)"
                if self.accumulates
                else "a batch can be backpropagated once: its rows have already been updated"
            )

    def backward(
        self, gradients: Sequence[torch.Tensor | None], weights_wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Hands the gradients of the outputs to `update`; returns those of the weights."""
        core_requests, of_weights = [], []
        given = [_engine_gradient(gradient) for gradient in gradients]
        if len(given) == 1:  # of the one tensor that all requests wrote into
            whole = given[0]
            if self.arrange is not None and whole is not None:
                whole = self.arrange(whole)
            given = [whole] * len(self.requests)
        for r, slots, g, wanted in zip(self.requests, self.slots, given, weights_wanted, strict=True):
            of_weight = None
            if g is not None:
                step = r.table.step_options(count=False)
                step.gradient_scale = self.gradient_scale
                request = _core.GradientRequest(
                    slots,
                    int(r.pooling),
                    _pointer(r.offsets),
                    r.bags,
                    _pointer(r.weights),
                    g.data_ptr(),
                    int(engine_dtype(g.dtype) or 0),
                    r.table.dim,
                    _pointer(r.positions if r.gradient_positions is None else r.gradient_positions),
                    step,
                )
                if wanted and r.weights is not None:
                    of_weight = torch.empty_like(r.weights)
                    _core.weight_gradients(request, of_weight.data_ptr())
                core_requests.append((r.table, request, slots))
            of_weights.append(of_weight)
        if core_requests:
            self.update(core_requests)
        if self.counts:
            # Also where no gradient arrived, so that the bias correction is the same everywhere.
            for r in self.requests:
                r.table.optimizer_step += 1
        if not self.accumulates or not _graph_is_kept():
            self.slots = []  # unpins the rows
        return of_weights


class _ReadWithWeights(torch.autograd.Function):
    """Pooled vectors of a batch that leaves its tables alone, with gradients for the weights."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, access: Access, *weights: torch.Tensor | None) -> Any:
        # As they are now: a later update must not reach this gradient.
        ctx.vectors = [
            _vectors_of(r, access) if wanted else None
            for r, wanted in zip(batch.requests, ctx.needs_input_grad[2:], strict=True)
        ]
        ctx.requests = batch.requests
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        return tuple(batch.forward(access))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        of_weights: list[torch.Tensor | None] = []
        if len(gradients) == 1:  # of the one tensor that all requests wrote into
            gradients = gradients * len(ctx.requests)
        for r, w, vectors, g in zip(ctx.requests, ctx.saved_tensors, ctx.vectors, gradients, strict=True):
            if vectors is None or g is None:
                of_weights.append(None)
                continue
            lengths = r.offsets.diff()
            bag_of = torch.repeat_interleave(torch.arange(r.bags), lengths)
            g = g.to("cpu", torch.float32)
            if r.positions is not None:
                g = g.reshape(-1)[r.positions.unsqueeze(1) + torch.arange(r.table.dim)]
            if r.pooling == Pooling.MEAN:
                g = g / lengths.clamp(min=1).unsqueeze(1)
            of_weights.append((g[bag_of] * vectors).sum(1).view(w.shape).to(w))
        return None, None, *of_weights


def _vectors_of(request: Request, access: Access) -> torch.Tensor:
    """The vectors that a pooled request pools (n, dim)."""
    alone = Request(request.table, request.keys, dtype=torch.float32, missing=request.missing)
    (vectors,) = Batch([alone]).forward(access)
    return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, anchor: torch.Tensor, *weights: torch.Tensor | None) -> Any:
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        # The requests use their memory again in backward; autograd notices when it was changed.
        ctx.save_for_backward(*weights)
        return tuple(batch.forward(Access.TRAIN))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.batch.require_slots()
        weights = ctx.saved_tensors
        of_weights = ctx.batch.backward(gradients, ctx.needs_input_grad[2:])
        return (
            None,
            None,
            *(None if g is None else g.view(w.shape).to(w) for g, w in zip(of_weights, weights, strict=True)),
        )


def run(
    requests: Sequence[Request],
    *,
    access: Access,
    anchor: torch.Tensor,
    update: Update = update_rows,
    counts: bool = True,
    weights: Sequence[torch.Tensor | None] | None = None,
    out: torch.Tensor | None = None,
    gradient_scale: float = 1.0,
    arrange: Arrange | None = None,
    accumulates: bool = False,
) -> list[torch.Tensor]:
    """The vectors of a batch, connected to autograd where it trains or weights want a gradient.

    anchor   a tensor that requires grad, so that autograd calls the backward pass
    counts   whether the backward pass is an optimizer step of every table of the batch
    weights  the caller's weight tensors where they may want a gradient (the requests hold the values)
    out      a tensor that all requests write into, each at its positions; it is then the one result
    gradient_scale  factor of the summed gradients, such as 1 / world
    arrange  puts the gradient of `out` into the order of the requests' `gradient_positions`
    accumulates  whether `update` may get the gradients of a batch several times (retain_graph)
    """
    batch = Batch(
        requests,
        update,
        counts=counts,
        out=out,
        gradient_scale=gradient_scale,
        arrange=arrange,
        accumulates=accumulates,
    )
    return run_batch(batch, access, anchor, weights)


def run_batch(
    batch: Batch,
    access: Access,
    anchor: torch.Tensor,
    weights: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """`run` for a batch that the caller has made."""
    if torch.is_grad_enabled():
        inputs = weights or [None] * len(batch.requests)
        if access == Access.TRAIN:
            return list(_Lookup.apply(batch, anchor, *inputs))  # type: ignore[no-untyped-call]
        if any(w is not None and w.requires_grad for w in inputs):
            return list(_ReadWithWeights.apply(batch, access, *inputs))  # type: ignore[no-untyped-call]
    return batch.forward(access)


def as_key_tensor(ids: torch.Tensor, name: str = "ids") -> torch.Tensor:
    """Keys of any integer type, shape and device as a flat int64 tensor on the CPU."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} should be a tensor but is: {type(ids).__name__}")
    if ids.dtype == torch.int64 and ids.dim() == 1 and ids.is_cpu and ids.layout == torch.strided:
        return ids.contiguous()  # spares small batches of many features the rest
    if torch.compiler.is_compiling():  # without addresses
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"{name} should be integers but their dtype is: {ids.dtype}")
        return ids.to(device="cpu", dtype=torch.int64).reshape(-1)
    if ids.dtype == torch.int64 and ids.is_cpu and ids.layout == torch.strided and ids.is_contiguous():
        return ids if ids.dim() == 1 else ids.view(-1)  # as they are: most batches
    array: torch.Tensor = as_keys(ids, name).array
    return array.view(-1)


def as_offsets(offsets: torch.Tensor, n: int, *, include_last: bool) -> torch.Tensor:
    """Offsets of bags as int64 on the CPU, with the end of the last bag. The engine checks the order."""
    if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
        raise ValueError(f"offsets should be a tensor of one dimension but is: {offsets!r}")
    flat = as_key_tensor(offsets, "offsets")
    # Not pad(), whose value torch.export would take for a constant.
    return flat if include_last else torch.cat([flat, flat.new_full((1,), n)])


def as_weights(weights: torch.Tensor, n: int) -> torch.Tensor:
    """Per-sample weights as float32 on the CPU, one for each key; they keep their graph."""
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"per_sample_weights should be a tensor but is: {type(weights).__name__}")
    if not weights.is_floating_point():
        raise TypeError(f"per_sample_weights should be floats but their dtype is: {weights.dtype}")
    if weights.numel() != n:
        raise ValueError(f"per_sample_weights should have {n} elements but has: {weights.numel()}")
    return weights.to(device="cpu", dtype=torch.float32).contiguous().view(-1)
