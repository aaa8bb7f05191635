"""The owner's part of a step: vectors for the keys that this rank owns, for all tables in one engine call,
and their way back to the ranks that asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

import embstore
from dynamicemb.agreement import raise_together
from dynamicemb.exchange import AnswersOfOwners, SumOfOwners
from dynamicemb.optimizers import DynamicEmbeddingFusedOptimizer
from dynamicemb.routing import Cell, OwnedKeys
from dynamicemb.tables import DynamicTable
from embstore.arrays import empty_tensor
from embstore.batch import Access, Pooling, Request, run


class Lookup(BaseEmbeddingLookup[Any, torch.Tensor], FusedOptimizerModule):
    """Base of the lookups. `_Sharded...` collections hand their train() and eval() on to it."""

    def __init__(
        self, tables: Sequence[DynamicTable], dtype: torch.dtype, group: dist.ProcessGroup | None, world: int
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._dtype, self._group, self._world = dtype, group, world
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward pass
        # TorchRec wants a parameter for every table. It has no rows: they live in the table.
        self._placeholders: dict[str, nn.Parameter] = {}
        for t in self._tables:
            placeholder = nn.Parameter(torch.empty(0, t.table.dim))
            placeholder._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            self._placeholders[t.name] = placeholder
        self._optimizer = DynamicEmbeddingFusedOptimizer(
            {f"{name}.weight": p for name, p in self._placeholders.items()},
            {t.name: t.table for t in self._tables},
        )
        for t, group_of_table in zip(self._tables, self._optimizer.param_groups, strict=True):
            t.param_group = group_of_table
        self._checks = any(t.table.options.check_mode == embstore.CheckMode.ERROR for t in self._tables)
        self._unscored = any(
            t.table.options.score_strategy == embstore.ScoreStrategy.CUSTOMIZED for t in self._tables
        )

    @property
    def fused_optimizer(self) -> DynamicEmbeddingFusedOptimizer:
        return self._optimizer

    def _answer(self, requests: list[Request], out: torch.Tensor) -> torch.Tensor:
        """One engine call. An error that one rank may have alone is raised by all of them."""
        access = Access.TRAIN if self.training else Access.READ_ZERO
        for t in self._tables:
            t.sync_learning_rate()
        scale = 1.0 / self._world if comm_ops.get_gradient_division() else 1.0
        share_errors = self.training and self._group is not None and (self._checks or self._unscored)
        error = None
        try:
            (out,) = run(requests, access=access, anchor=self._anchor, out=out, gradient_scale=scale)
        except (RuntimeError, MemoryError) as failure:
            if not share_errors:
                raise
            error = failure
        if share_errors:
            raise_together(error, self._group)
        # A score that was set once stays: from now on no rank can be without one.
        self._unscored &= not self.training
        return out

    # ---- what TorchRec asks of a lookup

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        return {}

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._placeholders.items()

    def flush(self) -> None:
        """Nothing is cached."""

    def purge(self) -> None:
        """Nothing is cached."""


class BagLookup(Lookup):
    """(samples, columns): the bags of all features side by side."""

    def __init__(
        self,
        tables: Sequence[DynamicTable],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        world: int,
        features: Sequence[int],
        mean: Sequence[bool],
    ) -> None:
        super().__init__(tables, dtype, group, world)
        self._features = list(features)  # of each table
        self._mean = list(mean)  # of each table
        widths = [t.table.dim for t, count in zip(tables, features, strict=True) for _ in range(count)]
        self._widths = torch.tensor(widths, dtype=torch.int64)
        self._columns = torch.cumsum(self._widths, 0) - self._widths
        self._width = sum(widths)
        self._positions: tuple[int, list[torch.Tensor]] = (-1, [])

    def _positions_for(self, samples: int) -> list[torch.Tensor]:
        """Of each table: where its bags begin in the output. Kept, as batches mostly have one size."""
        if self._positions[0] != samples:
            rows = torch.arange(samples, dtype=torch.int64) * self._width
            of_tables = [
                (columns[:, None] + rows).reshape(-1) for columns in self._columns.split(self._features)
            ]
            self._positions = (samples, of_tables)
        return self._positions[1]

    def forward(self, sparse_features: OwnedKeys) -> torch.Tensor:
        batch = sparse_features
        samples = sum(batch.samples)
        alone = self._world == 1
        requests = []
        bag, positions = 0, self._positions_for(samples)
        for t, features, mean, places in zip(
            self._tables, self._features, self._mean, positions, strict=True
        ):
            offsets = batch.offsets[bag : bag + features * samples + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            bag += features * samples
            requests.append(
                Request(
                    t.table,
                    batch.keys[first:last],
                    Pooling.MEAN if alone and mean and batch.weights is None else Pooling.SUM,
                    offsets - first,
                    None if batch.weights is None else batch.weights[first:last],
                    places,
                )
            )
        # Shares of several owners are added up in float32 before they are rounded.
        out = empty_tensor((samples, self._width), self._dtype if alone else torch.float32)
        out = self._answer(requests, out)
        if not alone:
            out = SumOfOwners.apply(out, batch.samples, self._group)
            if batch.mean_scale is not None:
                out = out * batch.mean_scale.repeat_interleave(self._widths, 1)
        return out.to(device=batch.device, dtype=self._dtype)


class KeyLookup(Lookup):
    """(n, dim): a vector for every key of the batch."""

    def __init__(
        self,
        tables: Sequence[DynamicTable],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        world: int,
        cells: Sequence[Sequence[Cell]],
    ) -> None:
        super().__init__(tables, dtype, group, world)
        self._runs = [len(of_table) * world for of_table in cells]  # of each table
        self._repeated = any(cell.unique for of_table in cells for cell in of_table)
        self._dim = tables[0].table.dim

    def forward(self, sparse_features: OwnedKeys) -> torch.Tensor:
        batch = sparse_features
        assert batch.runs is not None
        requests, run_ = [], 0
        for t, runs in zip(self._tables, self._runs, strict=True):
            offsets = batch.offsets[run_ : run_ + runs + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            places = batch.runs[run_ : run_ + runs] * self._dim
            requests.append(
                Request(t.table, batch.keys[first:last], offsets=offsets - first, positions=places)
            )
            run_ += runs
        out = self._answer(requests, empty_tensor((batch.keys.numel(), self._dim), self._dtype))
        if batch.index is not None:
            out = AnswersOfOwners.apply(
                out, batch.index, batch.asked, batch.owned, self._repeated, self._group
            )
        return out.to(batch.device)


class Arrived(BaseEmbeddingDist[Any, torch.Tensor, torch.Tensor]):
    """The lookup has brought the vectors back already."""

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any = None) -> Awaitable[torch.Tensor]:
        return NoWait(local_embs)
