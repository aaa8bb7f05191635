"""torch modules over tables.

    embedding = Embedding(dim=8, optimizer=Adam(lr=0.01))
    loss = model(embedding(ids)).sum()
    loss.backward()                  # the rows have moved: no optimizer.step() is needed

Training inserts missing ids; `eval()` reads 0.0 for them and changes nothing. Rows live in host memory:
ids may be on any device, and the vectors come back there. With `device_rows` the rows in use live on the
device of the module (see embstore.nn.device_tier).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embstore.extras import missing

try:
    import torch
except ImportError as error:
    raise missing("a module of embstore", "torch", error) from error

from embstore.arrays import engine_dtype
from embstore.nn.batch import (
    Access,
    Batch,
    Pooling,
    Request,
    Update,
    as_key_tensor,
    as_offsets,
    as_weights,
    run_batch,
)
from embstore.nn.batch import update_rows as update_now
from embstore.nn.compiled import number_of, run_in_graph
from embstore.nn.device_tier import DeviceTier, run_on_device
from embstore.nn.row_module import MARK, Gradients, PendingGradients, RowModule
from embstore.options import TableOptions
from embstore.table import Table


class TableModule(RowModule):
    """Base of the modules: some tables, trained in backward or by a step.

    update_in_backward  False: gradients wait for `step`, or for the step of a torch optimizer that holds the
                        parameters of the module; a GradScaler and clip_grad_norm_ then reach the rows
    max_norm            as clip_grad_norm_ over the rows of this module: gradients with a larger norm are
                        scaled down to it before each update
    device_rows         > 0: this many rows of each table are kept on the device of the module
                        (`.to(device)`, the CPU at first), where lookups and updates run; `flush` writes them
                        back to the tables

    `requires_grad_(False)` freezes it: nothing is inserted or updated, and a missing id reads the vector that
    it would start with.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
    ) -> None:
        super().__init__()
        if device_rows and not update_in_backward:
            raise ValueError("update_in_backward should be True with device_rows but is: False")
        if max_norm is not None and not 0 < max_norm < math.inf:
            raise ValueError(f"max_norm should be a number above 0 or None but is: {max_norm!r}")
        if device_rows and max_norm is not None:
            raise ValueError(f"max_norm should be None with device_rows but is: {max_norm!r}")
        self._tables = {table.name: table for table in tables}
        if len(self._tables) != len(tables):
            raise ValueError(f"names of tables should differ but are: {[t.name for t in tables]}")
        self.update_in_backward = update_in_backward
        self.max_norm = max_norm
        self._told_of_clipping = False
        self.device_rows = device_rows
        self._number = number_of(self)
        self._tiers: dict[str, DeviceTier] = {}
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if not self.device_rows or any(tier.device == device for tier in self._tiers.values()):
            return
        tiers = {name: DeviceTier(table, device, self.device_rows) for name, table in self._tables.items()}
        self.flush()
        self._tiers = tiers

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TableModule:
        for tier in list(self._tiers.values())[:1]:
            self._move(fn(torch.empty(0, device=tier.device)).device)  # `.float()` leaves it there
        super()._apply(fn, recurse)
        return self

    def flush(self) -> None:
        """Writes rows that were changed on the device back to their tables."""
        for tier in self._tiers.values():
            tier.flush()

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""
        return self._tables

    def _run(self, requests: Sequence[Request], weights: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        if self.trains:
            _refuse_replicas()
        if self._tiers:
            tiers = [self._tiers[request.table.name] for request in requests]
            return [
                self._in_dtype(run_on_device(tier, r, w, self.shadow, self._access, self._mark))
                for tier, r, w in zip(tiers, requests, weights, strict=True)
            ]
        if torch.compiler.is_compiling():
            return run_in_graph(self, requests, weights)
        batch = self._batch_of(requests)
        return [self._in_dtype(out) for out in run_batch(batch, self._access, self.shadow, weights)]

    def _table_at(self, position: int) -> Table:
        return list(self._tables.values())[position]

    def _batch_of(self, requests: Sequence[Request]) -> Batch:
        for request in requests:
            if self._output_dtype is not None and engine_dtype(self._output_dtype) is not None:
                request.dtype = self._output_dtype
        return Batch(
            requests,
            self._update_of(requests),
            counts=self.update_in_backward and self.max_norm is None,
            accumulates=not self.update_in_backward,
        )

    @property
    def _access(self) -> Access:
        if self.training:
            return Access.TRAIN if self.shadow.requires_grad else Access.READ_INITIAL
        return Access.READ_ZERO

    # ---- updates

    def _update_of(self, requests: Sequence[Request]) -> Update:
        if not self.update_in_backward:
            return self._keep_gradients
        tables = [request.table for request in requests]

        def update(gradients: Gradients) -> None:
            if self.max_norm is None:
                update_now(gradients)
            else:
                batch = PendingGradients()
                batch.add(gradients)
                batch.apply(tables, _clip(self.max_norm, math.sqrt(batch.measure()[0])))
            self._mark()

        return update

    def _mark(self) -> None:
        """Rows have moved: `before_step` sees by the mark whether their gradients were scaled too late."""
        self.shadow.grad = self.shadow.new_tensor([0.0, 0.0, MARK])

    def before_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if not self.update_in_backward or self.shadow.grad is None or not self.shadow.grad.any():
            return
        factor, _ = self._changes()
        scale = getattr(optimizer, "grad_scale", None)  # a GradScaler leaves scaling to a fused optimizer
        if scale is not None:
            factor /= float(scale)
        if factor == 1.0:
            return
        if math.frexp(factor)[0] == 0.5:  # a power of two, as of a GradScaler
            raise RuntimeError(
                f"the rows of tables {list(self._tables)} have moved in backward, by gradients that are now "
                f"scaled by {factor}: make the module with update_in_backward=False to use a GradScaler"
            )
        if self.max_norm is None and not self._told_of_clipping:
            self._told_of_clipping = True
            warnings.warn(
                f"the rows of tables {list(self._tables)} have moved in backward, before gradients were "
                "clipped: make the module with max_norm=..., or with update_in_backward=False",
                UserWarning,
                stacklevel=4,
            )

    def after_step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if not self.update_in_backward:
            self.step()

    def step(self, scale: float | None = None) -> bool:
        """Applies the gradients that backward left pending (update_in_backward=False), times `scale`, such as
        1 / scaler.get_scale(). With a scale, gradients that are not finite are dropped and the step is
        skipped; returns whether it was made."""
        if self.update_in_backward:
            raise RuntimeError("step should not be called: this module updates its rows in backward")
        self._drop_zeroed()
        if not len(self._pending):
            return True
        self._pending.change(*self._changes())
        if scale is not None:
            self._pending.change(scale, None)
        squares = 0.0 if scale is None and self.max_norm is None else self._pending.measure()[0]
        finite = scale is None or math.isfinite(squares)
        if finite:
            factor = 1.0 if self.max_norm is None else _clip(self.max_norm, math.sqrt(squares))
            self._pending.apply(list(self._tables.values()), factor)
        self._pending.clear()
        self.shadow.grad = None
        return finite

    def set_learning_rate(self, learning_rate: float) -> None:
        """For all tables, from the next update on."""
        for table in self._tables.values():
            table.learning_rate = learning_rate

    def get_extra_state(self) -> dict[str, dict[str, Any]]:
        """The rows for `state_dict`, as plain tensors and numbers (loads with weights_only=True)."""
        self.flush()
        return {
            name: {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in t.state().items()}
            for name, t in self._tables.items()
        }

    def set_extra_state(self, state: Any) -> None:
        if set(state) != set(self._tables):
            raise ValueError(
                f"state should hold the tables {sorted(self._tables)} but holds: {sorted(state)}"
            )
        for name, arrays in state.items():
            self._tables[name].load_state(
                {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in arrays.items()}
            )
        for tier in self._tiers.values():
            tier.clear()

    def __getstate__(self) -> dict[str, Any]:
        if len(self._pending):
            raise RuntimeError("a module with pending gradients cannot be copied: call step or zero_grad")
        self.flush()
        return {**self.__dict__, "_tiers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = number_of(self)
        self._move(torch.device("cpu"))

    def extra_repr(self) -> str:
        return "\n".join(repr(table) for table in self._tables.values())


def _refuse_replicas() -> None:
    """Raises inside of DistributedDataParallel, which averages gradients of parameters but knows no rows."""
    if torch.compiler.is_compiling() or not torch.distributed.is_available():
        return
    replica = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if replica is not None and replica.process_group.size() > 1:
        raise RuntimeError(
            "a module of embstore under DistributedDataParallel would train a separate table on each rank: "
            "keep it outside, or shard its rows with dynamicemb or one_embedding"
        )


def _clip(max_norm: float, norm: float) -> float:
    """The factor of clip_grad_norm_."""
    return min(1.0, max_norm / (norm + 1e-6))


def _new_table(options: TableOptions) -> Table:
    """A table of a module. Without a seed it gets one from torch's generator, so that modules start
    differently and torch.manual_seed governs them."""
    if options.seed is None:
        options = replace(options, seed=int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64)))
    return Table(options)


class _SingleTable(TableModule):
    def __init__(
        self,
        dim: int | None = None,
        *,
        name: str = "embedding",
        table: Table | None = None,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
        **options: Any,
    ) -> None:
        if table is None:
            if dim is None:
                raise ValueError("dim should be given unless a table is")
            table = _new_table(TableOptions(name=name, dim=dim, **options))
        elif dim is not None or options:
            raise ValueError("table should come without dim and table options")
        super().__init__(
            [table], update_in_backward=update_in_backward, max_norm=max_norm, device_rows=device_rows
        )

    @property
    def table(self) -> Table:
        (table,) = self._tables.values()
        return table


class Embedding(_SingleTable):
    """Vectors of ids: the output has the shape of the ids with `dim` behind it.

    Takes the fields of `TableOptions` as keywords, or a `table` that exists already.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        keys = as_key_tensor(ids)
        (out,) = self._run([Request(self.table, keys)], [None])
        return out.view(*ids.shape, self.table.dim).to(ids.device)


class EmbeddingBag(_SingleTable):
    """Sums or means of the vectors of bags of ids, as `torch.nn.EmbeddingBag`."""

    def __init__(self, dim: int | None = None, *, mode: str = "sum", include_last_offset: bool = False,
                 **keywords: Any) -> None:  # fmt: skip
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode should be 'sum' or 'mean' but is: {mode!r}")
        super().__init__(dim, **keywords)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids (n) with offsets (bags), or ids (bags, length) without."""
        request = bag_request(
            self.table, ids, offsets, per_sample_weights, self.mode, include_last=self.include_last_offset
        )
        (out,) = self._run([request], [per_sample_weights])
        return out.to(ids.device)


def bag_request(
    table: Table,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    *,
    include_last: bool,
) -> Request:
    """The request of bags given as in `torch.nn.EmbeddingBag`."""
    keys = as_key_tensor(ids)
    if offsets is None:
        if ids.dim() != 2:
            raise ValueError(f"ids should have two dimensions without offsets but have: {ids.dim()}")
        offsets = torch.arange(ids.shape[0] + 1, dtype=torch.int64) * ids.shape[1]
    else:
        if ids.dim() != 1:
            raise ValueError(f"ids should have one dimension with offsets but have: {ids.dim()}")
        offsets = as_offsets(offsets, keys.numel(), include_last=include_last)
    pooling = Pooling.MEAN if mode == "mean" else Pooling.SUM
    values = None if weights is None else as_weights(weights, keys.numel())
    return Request(table, keys, pooling, offsets, values)


class TableCollection(TableModule):
    """Base of collections: tables, and the features that look them up. Tables may share features,
    and a table may serve several."""

    def __init__(
        self,
        tables: Sequence[TableOptions | Table],
        features: Mapping[str, str] | None = None,
        *,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
    ) -> None:
        made = [t if isinstance(t, Table) else _new_table(t) for t in tables]
        super().__init__(
            made, update_in_backward=update_in_backward, max_norm=max_norm, device_rows=device_rows
        )
        self.features = dict(features) if features is not None else {name: name for name in self._tables}
        for feature, name in self.features.items():
            if name not in self._tables:
                raise ValueError(
                    f"features[{feature!r}] should name one of {list(self._tables)} but is: {name!r}"
                )

    def _by_table(self, inputs: Mapping[str, Any]) -> dict[str, list[str]]:
        """Features of the input that each table serves, in the order of the collection."""
        unknown = [feature for feature in inputs if feature not in self.features]
        if unknown:
            raise ValueError(f"features should be among {list(self.features)} but are: {unknown}")
        groups: dict[str, list[str]] = {}
        for feature, name in self.features.items():
            if feature in inputs:
                groups.setdefault(name, []).append(feature)
        return groups


class EmbeddingCollection(TableCollection):
    """Vectors of the ids of several features in one call.

    collection({"user": ids, "item": more_ids})["user"]      # ids.shape + (dim,)
    """

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        groups = self._by_table(inputs)
        requests = []
        for name, features in groups.items():
            keys = [as_key_tensor(inputs[feature], feature) for feature in features]
            requests.append(Request(self._tables[name], keys[0] if len(keys) == 1 else torch.cat(keys)))
        outputs = self._run(requests, [None] * len(requests))
        vectors: dict[str, torch.Tensor] = {}
        for (name, features), out in zip(groups.items(), outputs, strict=True):
            parts = out.split([inputs[feature].numel() for feature in features])
            for feature, part in zip(features, parts, strict=True):
                ids = inputs[feature]
                vectors[feature] = part.view(*ids.shape, self._tables[name].dim).to(ids.device)
        return vectors


class EmbeddingBagCollection(TableCollection):
    """Pooled vectors of several features in one call.

    collection({"user": (ids, offsets), "item": (ids, offsets, weights)})["user"]   # (bags, dim)
    """

    def __init__(self, *args: Any, mode: str = "sum", **keywords: Any) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode should be 'sum' or 'mean' but is: {mode!r}")
        super().__init__(*args, **keywords)
        self.mode = mode

    def forward(self, inputs: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        groups = self._by_table(inputs)
        requests, all_weights, counts = [], [], []
        for name, features in groups.items():
            parts, weights = [], []
            for feature in features:
                ids, offsets, weight = (*inputs[feature], None, None)[:3]
                if ids is None:
                    raise TypeError(f"ids of {feature!r} should be a tensor but is: None")
                parts.append(
                    bag_request(self._tables[name], ids, offsets, weight, self.mode, include_last=False)
                )
                weights.append(weight)
            request, weight_input = _merge(parts, weights)
            requests.append(request)
            all_weights.append(weight_input)
            counts.append([part.bags for part in parts])
        outputs = self._run(requests, all_weights)
        pooled: dict[str, torch.Tensor] = {}
        for features, bags, out in zip(groups.values(), counts, outputs, strict=True):
            for feature, part in zip(features, out.split(bags), strict=True):
                ids = inputs[feature][0]
                assert ids is not None
                pooled[feature] = part.to(ids.device)
        return pooled


def _merge(parts: list[Request], weights: list[torch.Tensor | None]) -> tuple[Request, torch.Tensor | None]:
    """The features of one table as one request: a key that several share is then updated once."""
    if len(parts) == 1:
        return parts[0], weights[0]
    first = parts[0]
    offsets, base = [torch.zeros(1, dtype=torch.int64)], 0
    for part in parts:
        assert part.offsets is not None
        offsets.append(part.offsets[1:] + base)
        base += part.keys.numel()
    merged = Request(first.table, torch.cat([p.keys for p in parts]), first.pooling, torch.cat(offsets))
    given = None
    if any(w is not None for w in weights):
        full = [
            torch.ones(p.keys.numel()) if w is None else w.to("cpu", torch.float32).reshape(-1)
            for p, w in zip(parts, weights, strict=True)
        ]
        given = torch.cat(full)
        merged.weights = given.detach().contiguous()
    return merged, given
