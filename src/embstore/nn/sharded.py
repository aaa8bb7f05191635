"""Modules whose rows are spread over ranks: a key is looked up and updated by its owner.

    keys of this rank ──owner──► all-to-all ──► one batch of the owner's tables ──► all-to-all ──► vectors
                                                              ▲
    gradients / ranks ──────────────────► all-to-all ─────────┘

A rank sends one message to every owner, and gets one from it:

    header    mode | keys of feature 0, or -1 without that feature | keys of feature 1 | ...
    keys      of feature 0 | of feature 1 | ...
    floats    vectors (or gradients) of feature 0 | of feature 1 | ... | tail

The tail begins with a mark of failure; in backward a mark for each feature that has a gradient follows. Every
rank takes part in every exchange, whatever its batch holds; when one fails, all raise.

Owners see keys in the order feature, rank, sample. That is the order of the concatenated batch, so rows do
not depend on the number of ranks. Gradients are averaged over the ranks, as DistributedDataParallel does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from embstore.arrays import empty_tensor
from embstore.distributed.exchange import swap, swap_headers
from embstore.distributed.ranks import TorchRanks, ranks_of
from embstore.distributed.routing import Route, regroup, route_keys
from embstore.nn.batch import Access, Request
from embstore.nn.features import Asked
from embstore.nn.pooling import check_offsets, pool
from embstore.ownership import owner
from embstore.table import Table

if TYPE_CHECKING:
    from embstore.nn.table_module import TableModule

STEP = "forward() and backward() of a sharded module"  # in errors


def owners_of(process_group: dist.ProcessGroup | None, sharded: bool) -> Owners | None:
    """The ranks that share the rows of a module, None where it keeps them alone."""
    if process_group is None and not sharded:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("a sharded module needs torch.distributed.init_process_group first")
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group should be a process group that holds this rank but is: {group!r}")
    return Owners(group) if group.size() > 1 else None


class Owners:
    """The ranks of a process group, each of which owns the keys that `embstore.owner` gives it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Connections of their own: backward of DistributedDataParallel reduces gradients at the same time.
        steps, calls = ranks_of(group, STEP, purpose="rows"), ranks_of(group, "making a sharded module")
        assert isinstance(steps, TorchRanks)
        self.steps, self.calls, self.world, self.rank = steps, calls, steps.world, steps.rank

    def __deepcopy__(self, memo: object) -> Owners:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a sharded module should not be pickled: write its tables with embstore.dump")

    def make(self, make: Callable[[], list[Table]], description: Mapping[str, object]) -> list[Table]:
        """The tables of a module, alike on all ranks. New rows start with the seeds of rank 0."""
        tables = self.calls.together(lambda: self._checked(make()))
        seeds = self.calls.gather([table.seed for table in tables])[0]
        told = {name: repr(value) for name, value in description.items()}
        told |= {table.name: repr(replace(table.options, seed=0)) for table in tables}
        self.calls.require_same("a sharded module", told)
        for table, seed in zip(tables, seeds, strict=True):
            table.reseed(seed)
        return tables

    def over_ranks(self, squares: float, largest: float) -> tuple[float, float]:
        """The sum of the squares, and the largest of the magnitudes, of all ranks."""
        measures = np.stack(self.steps.all_gather_equal(np.array([squares, largest]), STEP))
        return float(measures[:, 0].sum()), float(measures[:, 1].max())

    def _checked(self, tables: list[Table]) -> list[Table]:
        for table in tables:
            for rows in table.resident(with_values=False, with_states=False):
                strange = rows.keys[owner(rows.keys, self.world) != self.rank]
                if len(strange):
                    raise ValueError(
                        f"rows of table {table.name!r} should be owned by rank {self.rank} of {self.world} "
                        f"but one is not: {int(strange[0])}; embstore.load spreads a dump over ranks"
                    )
        return tables


class _Messages:
    """Where the floats of each feature lie in the messages of all ranks, one message after the other.

    counts  (ranks, features): keys
    """

    def __init__(self, counts: torch.Tensor, dims: torch.Tensor) -> None:
        self.counts = counts.tolist()
        self._dims = dims.tolist()
        self._tail = 1 + dims.numel()
        floats = counts * dims
        sizes = floats.sum(1) + self._tail
        ends = sizes.cumsum(0)
        self._starts = ((ends - sizes).unsqueeze(1) + floats.cumsum(1) - floats).tolist()
        self.sizes = sizes.tolist()
        self._tails = (ends - self._tail).unsqueeze(1) + torch.arange(self._tail)

    def empty(self) -> torch.Tensor:
        return empty_tensor((sum(self.sizes),), torch.float32)

    def mark(self, flat: torch.Tensor, failed: bool, marks: Sequence[bool] = ()) -> None:
        flat[self._tails] = torch.tensor(
            [failed, *(marks or [False] * (self._tail - 1))], dtype=torch.float32
        )

    def marks(self, flat: torch.Tensor) -> tuple[bool, list[bool]]:
        """Whether a rank failed, and which features are marked by any."""
        failed, *marks = flat[self._tails].any(0).tolist()
        return failed, marks

    def pieces(self, flat: torch.Tensor, feature: int) -> list[torch.Tensor]:
        """(n, dim) of this feature in the message of each rank."""
        dim = self._dims[feature]
        return [
            flat[starts[feature] : starts[feature] + counts[feature] * dim].view(-1, dim)
            for starts, counts in zip(self._starts, self.counts, strict=True)
        ]


class _Exchange:
    """One batch: vectors from the owners of its keys, and later their gradients to them."""

    def __init__(
        self, module: TableModule, owners: Owners, features: list[str], ask: Callable[[], dict[str, Asked]]
    ) -> None:
        self._owners, self._features = owners, features
        self._mode = 2 * int(module._access) + torch.is_grad_enabled()
        failures: list[BaseException] = []
        self.asked: dict[str, Asked] = {}
        self.routes: dict[int, Route] = {}
        try:
            self.asked = _checked(ask())
            for number, name in enumerate(features):
                if name in self.asked:
                    keys = self.asked[name].request.keys
                    self.routes[number] = route_keys(keys, torch.tensor([0, keys.numel()]), owners.world)
        except BaseException as error:  # every rank gets to know
            failures.append(error)
        sent, received = self._swap_headers(failures)
        tables = [module._table_of(name) for name in features]
        dims = torch.tensor([table.dim for table in tables])
        self.mine = _Messages(sent.clamp(min=0), dims)  # what owners answer
        self.theirs = _Messages(received.clamp(min=0), dims)  # what this rank answers
        requests = self._requests(self._swap_keys(), tables, (received >= 0).any(0).tolist())
        # float32 travels; what the table or the module has instead is rounded once, after pooling.
        self.batch = module._batch_of(requests, torch.float32)

    def _swap_headers(self, failures: list[BaseException]) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts (ranks, features) of keys for every owner, and of keys for this one; -1: no such feature."""
        world, ranks = self._owners.world, self._owners.steps
        counts = torch.full((world, len(self._features)), -1)
        for number, route in self.routes.items():
            counts[:, number] = route.counts[:, 0]
        mode = torch.full((world, 1), self._mode)
        received = swap_headers(torch.cat([mode, counts], 1), failures, ranks, STEP)()
        for rank, other in enumerate(received[:, 0].tolist()):
            if other != self._mode:
                raise ValueError(
                    "train(), requires_grad and no_grad should be the same on every rank but differ between "
                    f"rank {self._owners.rank} and rank {rank}"
                )
        return counts, received[:, 1:]

    def _swap_keys(self) -> torch.Tensor:
        """Keys that this rank owns, in the order feature, rank, sample."""
        pieces = [route.keys.split(route.counts[:, 0].tolist()) for route in self.routes.values()]
        keys = torch.cat([piece for of_owner in zip(*pieces, strict=True) for piece in of_owner])
        send = [sum(of_owner) for of_owner in self.mine.counts]
        receive = [sum(of_sender) for of_sender in self.theirs.counts]
        return regroup(swap(keys, send, receive, self._owners.steps, STEP), self.theirs.counts)

    def _requests(self, keys: torch.Tensor, tables: list[Table], present: list[bool]) -> list[Request]:
        """One for each table that any rank asks, and the features that it serves."""
        sizes = torch.tensor(self.theirs.counts).sum(0).tolist()
        parts = keys.split(sizes)
        requests = []
        self.features_of: list[list[int]] = []
        for table in dict.fromkeys(tables):
            numbers = [number for number, other in enumerate(tables) if other is table]
            if any(present[number] for number in numbers):
                requests.append(Request(table, torch.cat([parts[number] for number in numbers])))
                self.features_of.append(numbers)
        return requests

    def forward(self, access: Access) -> list[torch.Tensor]:
        """Vectors of the features of this rank, float32."""
        flat = self.theirs.empty()
        failures: list[BaseException] = []
        try:
            for numbers, vectors in zip(self.features_of, self.batch.forward(access), strict=True):
                pieces = self._owned(flat, numbers)
                for piece, part in zip(pieces, vectors.split([len(p) for p in pieces]), strict=True):
                    piece.copy_(part)
        except BaseException as error:  # every rank gets to know
            failures.append(error)
        self.theirs.mark(flat, bool(failures))
        mine = self._swap(flat, self.theirs, self.mine)
        if self.mine.marks(mine)[0]:
            self._owners.steps.share(failures.pop() if failures else None, STEP)
        return [
            torch.cat(self.mine.pieces(mine, number)).index_select(0, route.index)
            for number, route in self.routes.items()
        ]

    def _owned(self, flat: torch.Tensor, numbers: list[int]) -> list[torch.Tensor]:
        """Vectors or gradients of the features of a table, in the order of its keys."""
        return [piece for number in numbers for piece in self.theirs.pieces(flat, number)]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Sends the gradients to the owners, which update their rows."""
        self.batch.require_slots()
        flat, marks = self.mine.empty(), [False] * len(self._features)
        for (number, route), gradient in zip(self.routes.items(), gradients, strict=True):
            pieces = self.mine.pieces(flat, number)
            marks[number] = gradient is not None
            if gradient is None:
                for piece in pieces:
                    piece.zero_()
                continue
            ordered = torch.empty(gradient.shape)
            ordered[route.index] = gradient.to("cpu", torch.float32) / self._owners.world
            for piece, part in zip(pieces, ordered.split([len(p) for p in pieces]), strict=True):
                piece.copy_(part)
        self.mine.mark(flat, False, marks)
        received = self._swap(flat, self.mine, self.theirs)
        _, marks = self.theirs.marks(received)
        given = [
            torch.cat(self._owned(received, numbers)) if any(marks[n] for n in numbers) else None
            for numbers in self.features_of
        ]
        try:
            self.batch.backward(given, [False] * len(given))
        except BaseException as error:
            self._owners.steps.report(error)
            raise

    def _swap(self, flat: torch.Tensor, send: _Messages, receive: _Messages) -> torch.Tensor:
        return swap(flat, send.sizes, receive.sizes, self._owners.steps, STEP)


def _checked(asked: dict[str, Asked]) -> dict[str, Asked]:
    if not asked:
        raise ValueError("inputs of a sharded module should have a feature, even without ids, but have none")
    for feature in asked.values():
        if feature.request.offsets is not None:
            check_offsets(feature.request.offsets, feature.request.keys.numel())
    return asked


class _FromOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: _Exchange) -> Any:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(exchange.forward(Access.TRAIN))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.exchange.backward(gradients)
        return None, None


@torch.compiler.disable(reason="a sharded module of embstore exchanges rows with other ranks")  # type: ignore[untyped-decorator]
def run_sharded(
    module: TableModule, owners: Owners, ask: Callable[[], dict[str, Asked]]
) -> dict[str, torch.Tensor]:
    """Vectors, or bags, of the features that `ask` returns. When it fails on a rank, all raise."""
    features = [
        f for table in module.tables.values() for f in module._features if module._table_of(f) is table
    ]
    exchange = _Exchange(module, owners, features, ask)
    access = module._access
    if access == Access.TRAIN and torch.is_grad_enabled():
        outputs = _FromOwners.apply(module.shadow, exchange)  # type: ignore[no-untyped-call]
    else:
        outputs = exchange.forward(access)
    answers: dict[str, torch.Tensor] = {}
    dtypes = module._dtypes()
    for number, vectors in zip(exchange.routes, outputs, strict=True):
        name = features[number]
        answers[name] = _pooled(vectors, exchange.asked[name]).to(dtypes[module._features[name]])
    return {name: answers[name] for name in exchange.asked}


def _pooled(vectors: torch.Tensor, asked: Asked) -> torch.Tensor:
    request = asked.request
    if not request.pooling:
        return vectors
    assert request.offsets is not None
    return pool(vectors, request.offsets, asked.weights, request.pooling)
