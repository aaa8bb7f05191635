"""The way of a batch to the owners of its keys.

    keys of this rank ──route──► sent to owners ──► keys that this rank owns, of all ranks' batches

On one rank nothing is sent. Bags travel with their lengths and weights in one message, single keys after a
count for each cell (a feature, or a whole table where duplicates are dropped). What arrives is put in the
order feature, sender, sample: the order of the global batch, so that sums do not depend on the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from dynamicemb.exchange import STEP
from embstore.distributed.bag_messages import PackedBags, message_bytes, pack_bags, unpack_bags
from embstore.distributed.cells import Cells
from embstore.distributed.exchange import all_to_all, swap_headers, to_others
from embstore.distributed.ranks import Ranks, TorchRanks
from embstore.distributed.routing import regroup, route_keys
from embstore.nn.batch import as_key_tensor, as_weights
from embstore.ownership import AnyOwnership


@dataclass
class OwnedKeys(Multistreamable):
    """The keys of all ranks' batches that this rank owns.

    keys     (n) in the order feature, sender, sample
    offsets  bags: (features x samples + 1); single keys: (cells x senders + 1)
    samples  batch size of each rank (bags)
    runs     single keys: where each run of keys goes in the answer, in rows
    """

    keys: torch.Tensor
    offsets: torch.Tensor
    device: torch.device
    weights: torch.Tensor | None = None
    samples: list[int] = field(default_factory=list)
    mean_scale: torch.Tensor | None = None  # (own samples, features): 1 / length of the bags
    runs: torch.Tensor | None = None
    index: torch.Tensor | None = None  # of the own batch into the replies; None: they come in order
    asked: list[int] = field(default_factory=list)  # keys sent to each owner
    owned: list[int] = field(default_factory=list)  # keys that came from each rank
    cells: Cells | None = None  # where owners have whole cells; replies need no index

    def record_stream(self, stream: torch.Stream) -> None:
        """Everything is in host memory."""

    # TorchRec asks these of what an input dist returns; the answers are not used.
    def lengths(self) -> torch.Tensor:
        return torch.empty(0)

    def stride(self) -> int:
        return 1

    def variable_stride_per_key(self) -> bool:
        return False


@dataclass(frozen=True)
class Cell:
    """Features [first, last) of one table that are routed together, with or without duplicates."""

    first: int
    last: int
    unique: bool = False


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    flat = lengths.reshape(-1)
    offsets = torch.zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _runs(headers: torch.Tensor) -> torch.Tensor:
    """Where the runs of each cell and sender begin among keys that lie by (sender, cell)."""
    return _offsets(headers)[:-1].view(headers.shape).T.reshape(-1)


def _lengths(features: KeyedJaggedTensor) -> torch.Tensor:
    if features.variable_stride_per_key():
        raise ValueError("features of different batch sizes should have inverse_indices but have none")
    return features.lengths().to("cpu").view(len(features.keys()), features.stride())


class Step(Awaitable[Any]):
    """A wait that runs a function, once."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> Any:
        return self._function()


class _Routing(BaseSparseFeaturesDist[Any]):
    """Base: a header to every rank first, then the keys. A rank with bad input says so in the header, so
    that all of them raise and none waits."""

    header = 0

    def __init__(self, ownership: AnyOwnership, ranks: Ranks) -> None:
        super().__init__()
        self._ownership, self._ranks, self._world = ownership, ranks, ranks.world

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[OwnedKeys]]:
        ranks = self._ranks
        if not isinstance(ranks, TorchRanks):
            return NoWait(NoWait(self.alone(sparse_features)))
        prepared = None
        failures: list[BaseException] = []
        headers = torch.zeros((self._world, self.header), dtype=torch.int64)
        try:
            prepared, headers = self.prepare(sparse_features)
        except BaseException as failure:  # every rank gets to know
            failures.append(failure)
        received = swap_headers(headers, failures, ranks, STEP)
        return Step(lambda: self.exchange(prepared, received(), ranks))

    def alone(self, features: KeyedJaggedTensor) -> OwnedKeys:
        raise NotImplementedError

    def prepare(self, features: KeyedJaggedTensor) -> tuple[Any, torch.Tensor]:
        raise NotImplementedError

    def exchange(self, prepared: Any, headers: torch.Tensor, ranks: TorchRanks) -> Awaitable[OwnedKeys]:
        raise NotImplementedError


def averaged(weights: torch.Tensor, lengths: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Weights divided by the sum of those of their bag, as TorchRec's row-wise sharding does. lengths
    (features, samples), and for which of the features; None: for all."""
    flat = lengths.reshape(-1).long()
    sums = torch.zeros(flat.numel()).index_add_(0, torch.repeat_interleave(flat), weights)
    if mean is not None:
        sums[~mean.repeat_interleave(lengths.shape[1])] = 1.0
    sums[sums == 0.0] = 1.0
    return weights / sums.repeat_interleave(flat)


@dataclass
class _Bags:
    packed: PackedBags
    mean_scale: torch.Tensor | None
    device: torch.device


class BagRouting(_Routing):
    """Routing of bags: each owner sums its share of every bag, or has whole tables.

    mean             for each feature: whether its bags are averaged
    weighted         whether keys have weights. Those of averaged bags are divided by their sum, as TorchRec's
                     row-wise sharding does
    rank_of_feature  the owner of each feature where owners have whole tables; empty: the ownership decides
    """

    header = 2  # samples, keys

    def __init__(
        self,
        ownership: AnyOwnership,
        ranks: Ranks,
        mean: Sequence[bool],
        weighted: bool,
        rank_of_feature: Sequence[int] = (),
    ) -> None:
        super().__init__(ownership, ranks)
        self._mean = torch.tensor(mean, dtype=torch.bool)
        self._any_mean = any(mean)
        self._weighted = weighted
        self._features = len(mean)
        self._rank_of_feature = list(rank_of_feature)
        self._own_features = self._rank_of_feature.count(ranks.rank) if rank_of_feature else self._features

    def _inputs(self, features: KeyedJaggedTensor) -> tuple[Any, ...]:
        lengths = _lengths(features)
        keys = as_key_tensor(features.values(), "features")
        offsets = _offsets(lengths)
        weights = None
        if self._weighted:
            if features.weights_or_none() is None:
                raise ValueError("features should have weights: the collection is weighted")
            weights = as_weights(features.weights(), keys.numel())
            if self._any_mean:
                weights = averaged(weights, lengths, self._mean)
        return keys, lengths, offsets, weights, features.device()

    def alone(self, features: KeyedJaggedTensor) -> OwnedKeys:
        keys, lengths, offsets, weights, device = self._inputs(features)
        return OwnedKeys(keys, offsets, device, weights, samples=[lengths.shape[1]])

    def prepare(self, features: KeyedJaggedTensor) -> tuple[_Bags, torch.Tensor]:
        keys, lengths, offsets, weights, device = self._inputs(features)
        packed = pack_bags(
            keys,
            offsets,
            weights,
            self._features,
            self._world,
            self._ranks.rank,
            self._ownership,
            self._rank_of_feature,
        )
        scale = None
        if self._any_mean and weights is None and not self._rank_of_feature:
            scale = 1.0 / lengths.T.clamp(min=1).float()
            scale[:, ~self._mean] = 1.0
        own = torch.full((self._world,), lengths.shape[1])
        return _Bags(packed, scale, device), torch.stack([own, torch.tensor(packed.keys)], 1)

    def exchange(self, prepared: _Bags, headers: torch.Tensor, ranks: TorchRanks) -> Awaitable[OwnedKeys]:
        samples: list[int] = headers[:, 0].tolist()
        owned: list[int] = headers[:, 1].tolist()
        features, weighted = self._own_features, self._weighted
        receive = [message_bytes(n, features, s, weighted=weighted) for n, s in zip(owned, samples)]
        outgoing, own = prepared.packed.split(ranks.rank)
        incoming, wait = to_others(outgoing, prepared.packed.bytes, receive, ranks, STEP)

        def finish() -> OwnedKeys:
            wait()
            messages = list(incoming.split([n for r, n in enumerate(receive) if r != ranks.rank]))
            messages.insert(ranks.rank, own)
            keys, offsets, weights = unpack_bags(messages, owned, samples, features, weighted=weighted)
            return OwnedKeys(
                keys, offsets, prepared.device, weights, samples=samples, mean_scale=prepared.mean_scale
            )

        return Step(finish)


class KeyRouting(_Routing):
    """Routing of single keys: each owner answers with their vectors.

    rank_of_cell  the owner of each cell where owners have whole tables; empty: the ownership decides
    """

    def __init__(
        self,
        ownership: AnyOwnership,
        ranks: Ranks,
        cells: Sequence[Cell],
        rank_of_cell: Sequence[int] = (),
    ) -> None:
        super().__init__(ownership, ranks)
        self._cells = list(cells)
        self._rank_of_cell = list(rank_of_cell)
        self._unique = [cell.unique for cell in cells]
        self._whole = bool(rank_of_cell) and not any(self._unique)  # each cell goes to one rank as it is
        self.header = len(cells)

    def _inputs(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, list[int]]:
        keys = as_key_tensor(features.values(), "features")
        ends = features.offset_per_key()
        return keys, [*(ends[cell.first] for cell in self._cells), ends[-1]]

    def alone(self, features: KeyedJaggedTensor) -> OwnedKeys:
        keys, bounds = self._inputs(features)
        offsets = torch.tensor(bounds, dtype=torch.int64)
        return OwnedKeys(keys, offsets, features.device(), runs=offsets[:-1])

    def prepare(self, features: KeyedJaggedTensor) -> tuple[Any, torch.Tensor]:
        keys, bounds = self._inputs(features)
        offsets = torch.tensor(bounds, dtype=torch.int64)
        if self._whole:
            counts = torch.zeros((self._world, len(self._cells)), dtype=torch.int64)
            counts[self._rank_of_cell, torch.arange(len(self._cells))] = offsets.diff()
            return (keys, offsets.diff().tolist(), features.device()), counts
        route = route_keys(
            keys,
            offsets,
            self._world,
            self._ownership,
            unique=self._unique,
            rank_of_cell=self._rank_of_cell,
        )
        return (route, features.device()), route.counts

    def exchange(self, prepared: Any, headers: torch.Tensor, ranks: TorchRanks) -> Awaitable[OwnedKeys]:
        if self._whole:
            return self._exchange_whole(*prepared, headers, ranks)
        route, device = prepared
        asked: list[int] = route.counts.sum(1).tolist()
        owned: list[int] = headers.sum(1).tolist()
        keys, wait = all_to_all(route.keys, asked, owned, ranks, STEP)

        def finish() -> OwnedKeys:
            wait()
            return OwnedKeys(
                regroup(keys, headers.tolist()),
                _offsets(headers.T),
                device,
                runs=_runs(headers),
                index=route.index,
                asked=asked,
                owned=owned,
            )

        return Step(finish)

    def _exchange_whole(
        self,
        keys: torch.Tensor,
        sizes: list[int],
        device: torch.device,
        headers: torch.Tensor,
        ranks: TorchRanks,
    ) -> Awaitable[OwnedKeys]:
        cells = Cells(self._rank_of_cell, sizes, headers.tolist(), ranks.rank)
        owned, wait = cells.ask(keys, ranks, STEP)

        def finish() -> OwnedKeys:
            wait()
            return OwnedKeys(owned, _offsets(headers.T), device, runs=_runs(headers), cells=cells)

        return Step(finish)
