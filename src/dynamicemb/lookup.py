"""The owner's part of a step: vectors for the keys that this rank owns, for all tables in one engine call,
and their way back to the ranks that asked, while the program goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

from dynamicemb.exchange import (
    AnswersOfOwners,
    BagGradients,
    CellsOfOwners,
    ColumnsOfOwners,
    Pending,
    Sent,
    SumOfOwners,
)
from dynamicemb.external_storage import StorageStore
from dynamicemb.optimizers import DynamicEmbeddingFusedOptimizer
from dynamicemb.routing import Cell, OwnedKeys, Step
from dynamicemb.tables import DynamicTable
from dynamicemb.wire import Wire
from embstore.arrays import empty_tensor
from embstore.distributed.cells import CellLayout
from embstore.distributed.columns import Columns
from embstore.distributed.exchange import Layout
from embstore.distributed.ranks import Ranks, TorchRanks
from embstore.nn.batch import Access, Batch, Pooling, Prepared, run_batch


class Lookup(BaseEmbeddingLookup[Any, torch.Tensor], FusedOptimizerModule):
    """Base of the lookups. `_Sharded...` collections hand their train() and eval() on to it."""

    def __init__(
        self, tables: Sequence[DynamicTable], dtype: torch.dtype, ranks: Ranks, wire: Wire | None = None
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._wire = wire or Wire()
        self.dtype, self._ranks, self._world = dtype, ranks, ranks.world
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward pass
        # TorchRec wants a parameter for every table. It has no rows: they live in the table.
        self._placeholders: dict[str, nn.Parameter] = {}
        for t in self._tables:
            placeholder = nn.Parameter(torch.empty(0, t.table.dim))
            placeholder._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            self._placeholders[t.name] = placeholder
        self.prepared: Prepared | None = None  # of the next training forward
        self._optimizer = DynamicEmbeddingFusedOptimizer(
            {f"{name}.weight": p for name, p in self._placeholders.items()},
            {t.name: t.table for t in self._tables},
        )
        for t, group_of_table in zip(self._tables, self._optimizer.param_groups, strict=True):
            t.param_group = group_of_table

    @property
    def fused_optimizer(self) -> DynamicEmbeddingFusedOptimizer:
        return self._optimizer

    def _begin_step(self) -> float:
        """Passes learning rates on to the tables; returns the scale of gradients."""
        for t in self._tables:
            t.sync_learning_rate()
        return 1.0 / self._world if comm_ops.get_gradient_division() else 1.0

    def _batch(self, *arguments: Any, **keywords: Any) -> Batch:
        through = [store for t in self._tables if (store := t.storage) is not None and store.through]
        if not through:
            return Batch(*arguments, **keywords)
        return WriteThroughBatch(*arguments, **keywords)

    def prefetch(self, sparse_features: Any, forward_stream: Any = None) -> None:
        """TorchRec calls this a batch ahead. Rows are in host memory, so there is nothing to bring near."""

    @property
    def _access(self) -> Access:
        return Access.TRAIN if self.training else Access.READ_ZERO

    @property
    def _trained(self) -> torch.Tensor | None:
        """What makes autograd call the backward pass, where there is one."""
        return self._anchor if self.training else None

    # ---- what TorchRec asks of a lookup

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        return {}

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._placeholders.items()

    def flush(self) -> None:
        """Nothing is cached."""

    def purge(self) -> None:
        """Nothing is cached."""


class WriteThroughBatch(Batch):
    """A batch over tables whose rows live in a user's Storage: it gets them in each pass, not when memory is
    full. The first time new keys, the second time rows that moved, whose scores stay."""

    def forward(self, access: Access) -> list[torch.Tensor]:
        outputs = super().forward(access)
        if access == Access.TRAIN:
            self._write(updating=False)
        return outputs

    def backward(self, *arguments: Any) -> list[torch.Tensor | None]:
        of_weights = super().backward(*arguments)
        self._write(updating=True)
        return of_weights

    def _write(self, updating: bool) -> None:
        for request in self.requests:
            store = request.table.store
            if not isinstance(store, StorageStore) or not store.through:
                continue
            store.updating = updating
            try:
                request.table.flush()
            finally:
                store.updating = False


@dataclass(frozen=True)
class _BagPlan:
    """Where everything is that belongs to batches of these sizes.

    layout     of the answers; the own block is that of this rank's answer
    marks      see `Sent`
    gradients  layout of the gradients
    places     of each table: where its bags begin among the answers, and in the gradients
    """

    samples: list[int]
    layout: Layout
    marks: tuple[list[int], list[int]]
    gradients: BagGradients
    places: list[tuple[torch.Tensor, torch.Tensor]]


class BagLookup(Lookup):
    """(samples, columns): the bags of all features side by side.

    features  of each table
    mean      whether the bags of each table are averaged
    owners    the rank of each table, where ranks have whole tables; empty: rows are spread
    """

    def __init__(
        self,
        tables: Sequence[DynamicTable],
        dtype: torch.dtype,
        ranks: Ranks,
        features: Sequence[int],
        mean: Sequence[bool],
        owners: Sequence[int] = (),
        wire: Wire | None = None,
    ) -> None:
        super().__init__(tables, dtype, ranks, wire)
        self._mean = list(mean)  # of each table
        self._whole = ranks.world == 1 or bool(owners)  # bags are complete
        dims = [t.table.dim for t, count in zip(tables, features, strict=True) for _ in range(count)]
        self._dims = torch.tensor(dims)
        self._by_feature = Columns(ranks=range(len(dims)), widths=dims, world=len(dims))
        self._owners = [owner for owner, count in zip(owners, features) for _ in range(count)]
        self._columns_of_ranks = Columns(self._owners, dims, ranks.world) if owners else None
        # Every rank has all tables, so that scores and steps go on together; others get no keys.
        here = [not owners or owner == ranks.rank for owner in owners or [0] * len(tables)]
        self._features = [count if own else 0 for count, own in zip(features, here)]  # of each table, here
        columns = torch.cumsum(self._dims, 0) - self._dims
        if owners:
            columns = columns[torch.tensor(self._owners) == ranks.rank]
            dims = [dim for dim, owner in zip(dims, self._owners) if owner == ranks.rank]
        self._columns_of_answer = columns  # of each feature here
        self._columns = torch.tensor([*accumulate(dims, initial=0)][:-1], dtype=torch.int64)  # in a block
        self._row = max(sum(dims), 1)  # of a block; it is never without a column
        self._ends = list(accumulate(self._features, initial=0))  # features before each table
        self._plan: _BagPlan | None = None

    def _planned(self, samples: list[int]) -> _BagPlan:
        """Kept, as batches mostly have one size."""
        if self._plan is None or self._plan.samples != samples:
            self._plan = self._new_plan(samples)
        return self._plan

    def _new_plan(self, samples: list[int]) -> _BagPlan:
        rank, row, width = self._ranks.rank, self._row, self._by_feature.width
        own = samples[rank]
        strides = [row] * self._world if self._columns_of_ranks is None else self._columns_of_ranks.strides
        layout = Layout(
            [(n + 1) * row for n in samples], [(own + 1) * stride for stride in strides], own * width, rank
        )
        gradients = BagGradients(self._by_feature, self._owners, samples, rank, self._wire)
        marks = (
            [at + n * row for at, n in zip(layout.to, samples)],
            [at + own * stride for at, stride in zip(layout.of, strides)],
        )
        places = []
        for t, columns, of_answer in zip(
            self._tables,
            self._columns.split(self._features),
            self._columns_of_answer.split(self._features),
            strict=True,
        ):
            out, back = [], []
            for r, n in enumerate(samples):
                numbers = torch.arange(n, dtype=torch.int64)
                if r == rank:
                    out.append(layout.own + of_answer[:, None] + numbers * width)
                else:
                    out.append(layout.to[r] + columns[:, None] + numbers * row)
                back.append(gradients.layout.of[r] + columns[:, None] * n + numbers * t.table.dim)
            places.append((torch.cat(out, 1).reshape(-1), torch.cat(back, 1).reshape(-1)))
        return _BagPlan(samples, layout, marks, gradients, places)

    def forward(self, sparse_features: OwnedKeys) -> torch.Tensor | Pending:
        batch = sparse_features
        samples = sum(batch.samples)
        plan = self._planned(batch.samples)
        alone = self._world == 1
        requests = []
        starts = batch.offsets[::samples].tolist() if samples else [0] * (self._ends[-1] + 1)
        bounds = [starts[end] for end in self._ends]
        for i, (t, mean, places) in enumerate(zip(self._tables, self._mean, plan.places, strict=True)):
            first, last = bounds[i], bounds[i + 1]
            offsets = batch.offsets[self._ends[i] * samples : self._ends[i + 1] * samples + 1]
            requests.append(
                t.request(
                    batch.keys[first:last],
                    pooling=Pooling.MEAN if self._whole and mean and batch.weights is None else Pooling.SUM,
                    offsets=offsets - first,
                    weights=None if batch.weights is None else batch.weights[first:last],
                    positions=places[0],
                    gradient_positions=places[1],
                )
            )
        # Shares of several owners are added up in float32 before they are rounded.
        dtype = self.dtype if self._whole else torch.float32
        if not alone:
            dtype = self._wire.forward or dtype
        out = empty_tensor((plan.layout.size,), dtype)
        whole = self._batch(
            requests,
            out=out.view(samples, self._row) if alone else out,
            gradient_scale=self._begin_step(),
            arrange=(lambda gradient: plan.gradients.arranged(gradient)[1]) if alone else None,
        )
        whole.prepared, self.prepared = self.prepared, None
        if alone:
            (out,) = run_batch(whole, self._access, self._anchor, [r.weights for r in requests])
            return out.to(device=batch.device, dtype=self.dtype)
        return self._send(whole, batch, plan)

    def _send(self, whole: Batch, batch: OwnedKeys, plan: _BagPlan) -> Pending:
        """Sends the bags, or the shares of them, to the ranks that asked."""
        columns, ranks, trained = self._columns_of_ranks, self._ranks, self._trained
        assert isinstance(ranks, TorchRanks)
        sent = Sent(whole, self._access, plan.layout, plan.marks, ranks)

        def receive() -> torch.Tensor:
            if columns is not None:
                out = ColumnsOfOwners.apply(trained, sent, plan.gradients, columns)
            else:
                out = SumOfOwners.apply(trained, sent, plan.gradients)
            if batch.mean_scale is not None:
                out = out * batch.mean_scale.repeat_interleave(self._dims, 1)
            return out.to(device=batch.device, dtype=self.dtype)

        return Pending(receive)


class KeyLookup(Lookup):
    """(n, dim): a vector for every key of the batch."""

    def __init__(
        self,
        tables: Sequence[DynamicTable],
        dtype: torch.dtype,
        ranks: Ranks,
        cells: Sequence[Sequence[Cell]],
        wire: Wire | None = None,
    ) -> None:
        super().__init__(tables, dtype, ranks, wire)
        self._runs = [len(of_table) * ranks.world for of_table in cells]  # of each table
        self._repeated = any(cell.unique for of_table in cells for cell in of_table)
        self._dim = tables[0].table.dim

    def forward(self, sparse_features: OwnedKeys) -> torch.Tensor | Pending:
        batch = sparse_features
        assert batch.runs is not None
        dim, cells = self._dim, batch.cells
        alone = batch.index is None and cells is None
        own, owned, asked = batch.keys.numel(), batch.owned, batch.asked
        layout = Layout([0], [0], own * dim, 0)
        if cells is not None:
            owned = [sum(sizes) for sizes in cells.counts]
            asked = [0] * self._world  # vectors of other owners arrive in the own block
            layout = CellLayout(cells, dim)
        elif not alone:
            sent, received = ([(n + 1) * dim for n in counts] for counts in (owned, asked))
            layout = Layout(sent, received, asked[self._ranks.rank] * dim, self._ranks.rank)
        positions = batch.runs * dim
        if not alone:  # runs lie by cell and sender
            befores = accumulate(owned, initial=0)
            shifts = torch.tensor([at - before * dim for at, before in zip(layout.to, befores)])
            positions = positions.view(-1, self._world) + shifts
            if cells is not None:
                begins = torch.tensor([part.start for part in cells.mine], dtype=torch.int64)
                positions[:, self._ranks.rank] = layout.own + begins * dim
            positions = positions.reshape(-1)
        requests, run_ = [], 0
        for t, runs in zip(self._tables, self._runs, strict=True):
            offsets = batch.offsets[run_ : run_ + runs + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            requests.append(
                t.request(
                    batch.keys[first:last],
                    offsets=offsets - first,
                    positions=positions[run_ : run_ + runs],
                    gradient_positions=batch.runs[run_ : run_ + runs] * dim,
                )
            )
            run_ += runs
        dtype = self.dtype if alone else self._wire.forward or self.dtype
        out = empty_tensor((layout.size,), dtype)
        whole = self._batch(
            requests, out=out.view(own, dim) if alone else out, gradient_scale=self._begin_step()
        )
        whole.prepared, self.prepared = self.prepared, None
        if alone:
            (out,) = run_batch(whole, self._access, self._anchor)
            return out.to(batch.device)
        ranks, index, trained = self._ranks, batch.index, self._trained
        assert isinstance(ranks, TorchRanks)
        marks = (
            [at + n * dim for at, n in zip(layout.to, owned)],
            [at + n * dim for at, n in zip(layout.of, asked)],
        )
        pending = Sent(whole, self._access, layout, marks, ranks)

        def receive() -> torch.Tensor:
            if cells is not None:
                out = CellsOfOwners.apply(trained, pending, dim, cells, self._wire)
            else:
                out = AnswersOfOwners.apply(
                    trained, pending, dim, index, asked, owned, self._repeated, self._wire
                )
            return out.to(device=batch.device, dtype=self.dtype)

        return Pending(receive)


class OutputDist(BaseEmbeddingDist[Any, torch.Tensor, torch.Tensor]):
    """The lookup has sent the vectors already: the program may go on until it needs them."""

    def forward(
        self, local_embs: torch.Tensor | Pending, sharding_ctx: Any = None
    ) -> Awaitable[torch.Tensor]:
        return Step(local_embs.receive) if isinstance(local_embs, Pending) else NoWait(local_embs)
