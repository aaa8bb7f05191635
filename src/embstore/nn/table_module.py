"""The base of the modules over tables: how a batch runs, when rows move, what torch saves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from embstore.arrays import engine_dtype, torch_dtype
from embstore.display import as_html
from embstore.nn.batch import Access, Batch, Request, Update, run_batch
from embstore.nn.batch import update_rows as update_now
from embstore.nn.compiled import number_of, run_in_graph
from embstore.nn.device_tier import DeviceTier, run_on_device
from embstore.nn.features import Asked, merge
from embstore.nn.row_module import MARK, Gradients, PendingGradients, RowModule
from embstore.nn.sharded import owners_of, run_sharded
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
    process_group       spreads the rows over the ranks of this group; sharded=True: of the default group.
                        Every rank calls forward and backward together, with its own batch; gradients are
                        averaged over the ranks, as in DistributedDataParallel

    `requires_grad_(False)` freezes it: nothing is inserted or updated, and a missing id reads the vector that
    it would start with.
    """

    def __init__(
        self,
        make: Callable[[], list[Table]],
        features: Mapping[str, str] | None = None,
        *,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        if device_rows and (sharded or process_group is not None):
            raise ValueError(f"device_rows should be 0 in a sharded module but is: {device_rows}")
        if device_rows and not update_in_backward:
            raise ValueError("update_in_backward should be True with device_rows but is: False")
        if max_norm is not None and not 0 < max_norm < math.inf:
            raise ValueError(f"max_norm should be a number above 0 or None but is: {max_norm!r}")
        if device_rows and max_norm is not None:
            raise ValueError(f"max_norm should be None with device_rows but is: {max_norm!r}")
        self._owners = owners_of(process_group, sharded)
        settings = {"update_in_backward": update_in_backward, "max_norm": max_norm, "features": features}
        tables = make() if self._owners is None else self._owners.make(make, settings)
        self._tables = {table.name: table for table in tables}
        if len(self._tables) != len(tables):
            raise ValueError(f"names of tables should differ but are: {[t.name for t in tables]}")
        # The table that each feature looks up.
        self._features = {name: name for name in self._tables} if features is None else dict(features)
        for feature, name in self._features.items():
            if name not in self._tables:
                raise ValueError(
                    f"features[{feature!r}] should name one of {list(self._tables)} but is: {name!r}"
                )
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

    def _run(self, ask: Callable[[], dict[str, Asked]]) -> dict[str, torch.Tensor]:
        """The answers to the features that `ask` returns."""
        if self.trains:
            self._refuse_replicas()
        if self._owners is not None:
            answers: dict[str, torch.Tensor] = run_sharded(self, self._owners, ask)
            return answers
        asked = ask()
        merged = merge(asked)
        outputs = self._answers([m.asked.request for m in merged], [m.asked.weights for m in merged])
        parts: dict[str, torch.Tensor] = {}
        for m, out in zip(merged, outputs, strict=True):
            parts |= m.split(out)
        return {name: parts[name] for name in asked}

    def _answers(
        self, requests: Sequence[Request], weights: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
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

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Of the vectors of each table."""
        return {
            name: self._output_dtype or torch_dtype(table.options.dtype)
            for name, table in self._tables.items()
        }

    def _table_of(self, feature: str) -> Table:
        return self._tables[self._features[feature]]

    def _table_at(self, position: int) -> Table:
        return list(self._tables.values())[position]

    def _batch_of(self, requests: Sequence[Request], dtype: torch.dtype | None = None) -> Batch:
        dtype = dtype or self._output_dtype
        for request in requests:
            if dtype is not None and engine_dtype(dtype) is not None:
                request.dtype = dtype
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
                squares, _ = self._over_ranks(*batch.measure())
                batch.apply(tables, _clip(self.max_norm, math.sqrt(squares)))
            self._mark()

        return update

    def _over_ranks(self, squares: float, largest: float) -> tuple[float, float]:
        return (squares, largest) if self._owners is None else self._owners.over_ranks(squares, largest)

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
        squares = 0.0
        if scale is not None or self.max_norm is not None:
            squares, _ = self._over_ranks(*self._pending.measure())
        finite = scale is None or math.isfinite(squares)
        if finite:
            factor = 1.0 if self.max_norm is None else _clip(self.max_norm, math.sqrt(squares))
            self._pending.apply(list(self._tables.values()), factor)
        self._pending.clear()
        self.shadow.grad = None
        return finite

    def _refuse_replicas(self) -> None:
        """Raises inside of DistributedDataParallel over other ranks than those that share the rows."""
        if torch.compiler.is_compiling() or not torch.distributed.is_available():
            return
        replica = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        sharers = 1 if self._owners is None else self._owners.world
        if replica is not None and replica.process_group.size() != sharers:
            raise RuntimeError(
                "a module of embstore under DistributedDataParallel would train a separate table on each "
                "rank: make it with sharded=True (or the process_group of DistributedDataParallel), or keep "
                "it outside"
            )

    def set_learning_rate(self, learning_rate: float) -> None:
        """For all tables, from the next update on."""
        for table in self._tables.values():
            table.learning_rate = learning_rate

    def get_extra_state(self) -> dict[str, dict[str, Any]]:
        """The rows for `state_dict`, as plain tensors and numbers (loads with weights_only=True). Those of a
        sharded module are of this rank."""
        self.flush()
        state: dict[str, dict[str, Any]] = {}
        for name, table in self._tables.items():
            arrays = table.state().items()
            state[name] = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arrays}
            if self._owners is not None:
                state[name] |= {"rank": self._owners.rank, "ranks": self._owners.world}
        return state

    def set_extra_state(self, state: Any) -> None:
        if set(state) != set(self._tables):
            raise ValueError(
                f"state should hold the tables {sorted(self._tables)} but holds: {sorted(state)}"
            )
        place = (0, 1) if self._owners is None else (self._owners.rank, self._owners.world)
        for name, arrays in state.items():
            rank, ranks = arrays.get("rank", 0), arrays.get("ranks", 1)
            if (rank, ranks) != place:
                raise ValueError(
                    f"state of table {name!r} should be of rank {place[0]} of {place[1]} but is of rank "
                    f"{rank} of {ranks}: use embstore.dump and embstore.load between numbers of ranks"
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

    def _repr_html_(self) -> str:
        return as_html(self._tables.values(), title=type(self).__name__)


def _clip(max_norm: float, norm: float) -> float:
    """The factor of clip_grad_norm_."""
    return min(1.0, max_norm / (norm + 1e-6))
