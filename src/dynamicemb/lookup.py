"""The owner's part of a step: vectors for the keys that this rank owns, for all tables in one engine call,
and their way back to the ranks that asked, while the program goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

from dynamicemb.exchange import AnswersOfOwners, ColumnsOfOwners, Pending, Sent, SumOfOwners
from dynamicemb.external_storage import StorageStore
from dynamicemb.optimizers import DynamicEmbeddingFusedOptimizer
from dynamicemb.routing import Cell, OwnedKeys, Step
from dynamicemb.tables import DynamicTable
from dynamicemb.wire import Wire
from embstore.arrays import empty_tensor
from embstore.distributed.columns import Columns
from embstore.distributed.exchange import with_marks
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
        self._columns_of_ranks: Columns | None = None
        if owners:
            dims = [t.table.dim * count for t, count in zip(tables, features, strict=True)]
            self._columns_of_ranks = Columns(owners, dims, ranks.world)
            # Every rank has all tables, so that scores and steps go on together; others get no keys.
            features = [
                count if owner == ranks.rank else 0 for count, owner in zip(features, owners, strict=True)
            ]
        self._whole = ranks.world == 1 or bool(owners)  # bags are complete
        self._features = list(features)  # of each table, here
        widths = [t.table.dim for t, count in zip(tables, features, strict=True) for _ in range(count)]
        self._widths = torch.tensor(widths, dtype=torch.int64)
        self._columns = torch.cumsum(self._widths, 0) - self._widths
        self._row = max(sum(widths), 1)  # of the output; it is never without a column
        self._by_feature = Columns(ranks=range(len(widths)), widths=widths, world=len(widths))
        self._ends = list(accumulate(features, initial=0))  # features before each table
        self._places: tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]] = ([], [])

    def _places_for(self, samples_of_ranks: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each table: where its bags begin in the output, and in the gradient as `_arranged` has it.
        Kept, as batches mostly have one size."""
        if self._places[0] != samples_of_ranks:
            samples = sum(samples_of_ranks)
            numbers = torch.arange(samples, dtype=torch.int64)
            rows = numbers if self._world == 1 else with_marks(samples_of_ranks)
            of_tables = [
                (
                    (columns[:, None] + rows * self._row).reshape(-1),
                    (columns[:, None] * samples + numbers * t.table.dim).reshape(-1),
                )
                for t, columns in zip(self._tables, self._columns.split(self._features), strict=True)
            ]
            self._places = (samples_of_ranks, of_tables)
        return self._places[1]

    def _arranged(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient feature by feature. A row reads its bags in any order: those of one feature then lie
        in a piece that fits a cache, not one to a page."""
        return self._by_feature.split(gradient)

    def forward(self, sparse_features: OwnedKeys) -> torch.Tensor | Pending:
        batch = sparse_features
        samples = sum(batch.samples)
        alone = self._world == 1
        requests = []
        starts = batch.offsets[::samples].tolist() if samples else [0] * (self._ends[-1] + 1)
        bounds = [starts[end] for end in self._ends]
        for i, (t, mean, places) in enumerate(
            zip(self._tables, self._mean, self._places_for(batch.samples), strict=True)
        ):
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
        marks = 0 if alone else self._world
        whole = self._batch(
            requests,
            out=empty_tensor((samples + marks, self._row), dtype),
            gradient_scale=self._begin_step(),
            arrange=self._arranged,
        )
        whole.prepared, self.prepared = self.prepared, None
        if alone:
            (out,) = run_batch(whole, self._access, self._anchor, [r.weights for r in requests])
            return out.to(device=batch.device, dtype=self.dtype)
        return self._send(whole, batch)

    def _send(self, whole: Batch, batch: OwnedKeys) -> Pending:
        """Sends the bags, or the shares of them, to the ranks that asked."""
        columns, ranks, samples, trained = self._columns_of_ranks, self._ranks, batch.samples, self._trained
        assert isinstance(ranks, TorchRanks)
        widths = [self._row] * ranks.world if columns is None else columns.strides
        sent = Sent(whole, self._access, samples, [samples[ranks.rank]] * ranks.world, widths, ranks)

        def receive() -> torch.Tensor:
            if columns is not None:
                out = ColumnsOfOwners.apply(trained, sent, samples, columns, self._wire)
            else:
                out = SumOfOwners.apply(trained, sent, samples, self._wire)
            if batch.mean_scale is not None:
                out = out * batch.mean_scale.repeat_interleave(self._widths, 1)
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
        requests, run_ = [], 0
        for t, runs in zip(self._tables, self._runs, strict=True):
            offsets = batch.offsets[run_ : run_ + runs + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            places = batch.runs[run_ : run_ + runs]
            # Runs lie by cell and sender; what each sender gets ends with a mark.
            behind_marks = places if batch.index is None else places + torch.arange(runs) % self._world
            requests.append(
                t.request(
                    batch.keys[first:last],
                    offsets=offsets - first,
                    positions=behind_marks * self._dim,
                    gradient_positions=places * self._dim,
                )
            )
            run_ += runs
        marks, dtype = 0, self.dtype
        if batch.index is not None:
            marks, dtype = self._world, self._wire.forward or dtype
        whole = self._batch(
            requests,
            out=empty_tensor((batch.keys.numel() + marks, self._dim), dtype),
            gradient_scale=self._begin_step(),
        )
        whole.prepared, self.prepared = self.prepared, None
        if batch.index is None:
            (out,) = run_batch(whole, self._access, self._anchor)
            return out.to(batch.device)
        ranks, index, trained = self._ranks, batch.index, self._trained
        assert isinstance(ranks, TorchRanks)
        widths = [self._dim] * ranks.world
        sent = Sent(whole, self._access, batch.owned, batch.asked, widths, ranks)

        def receive() -> torch.Tensor:
            out = AnswersOfOwners.apply(
                trained, sent, index, batch.asked, batch.owned, self._repeated, self._wire
            )
            return out.to(device=batch.device, dtype=self.dtype)

        return Pending(receive)


class OutputDist(BaseEmbeddingDist[Any, torch.Tensor, torch.Tensor]):
    """The lookup has sent the vectors already: the program may go on until it needs them."""

    def forward(
        self, local_embs: torch.Tensor | Pending, sharding_ctx: Any = None
    ) -> Awaitable[torch.Tensor]:
        return Step(local_embs.receive) if isinstance(local_embs, Pending) else NoWait(local_embs)
