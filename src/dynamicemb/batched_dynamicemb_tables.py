"""Several dynamic tables as one module, without sharding: what FBGEMM's table-batched embedding is for
static ones.

    tables = BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(dim=8, max_capacity=1 << 20)],
        table_names=["user"],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.1,
    )
    vectors = tables(indices, offsets)       # (samples, columns of all features)
    vectors.sum().backward()                 # the rows have moved
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from dynamicemb.checkpoint_files import (
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    encode_meta_json_file_path,
    find_files,
    get_loading_files,
)
from dynamicemb.enumerations import MAX_BUCKET_CAPACITY, DynamicEmbPoolingMode
from dynamicemb.external_storage import stores_of
from dynamicemb.lookup import BagLookup, KeyLookup, Lookup
from dynamicemb.optimizers import UNUSED_MATHEMATICS, OptimizerArgs
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.routing import Cell, OwnedKeys
from dynamicemb.served import ServedBatchedTables
from dynamicemb.tables import HoldsDynamicTables, engine_options, make_table
from dynamicemb.unavailable import unavailable_class
from dynamicemb.views import TablesByName
from embstore.distributed.ranks import Ranks
from embstore.nn.batch import Prepared, as_key_tensor, as_weights, prepare
from embstore.nn.served import ServedRows
from embstore.serving.models import ServedTables

__all__ = [
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
    "StorageLayout",
    "encode_checkpoint_file_path",
    "encode_counter_checkpoint_file_path",
    "encode_meta_json_file_path",
    "find_files",
    "get_loading_files",
]

_OPTIMIZER_ARGS = {field.name for field in dataclasses.fields(OptimizerArgs)}
_NUMBERS = (  # of V2 after `optimizer`, by position
    "stochastic_rounding",
    "gradient_clipping",
    "max_gradient",
    "max_norm",
    "learning_rate",
    "eps",
    "initial_accumulator_value",
    "momentum",
    "weight_decay",
    "weight_decay_mode",
    "eta",
    "beta1",
    "beta2",
    "counter_based_regularization",
    "cowclip_regularization",
)


class BatchedDynamicEmbeddingTables(TablesByName, HoldsDynamicTables, nn.Module):
    """Looks up the features of a batch in their tables, and trains the rows in backward.

    table_options      of each table; `dim` and `max_capacity` have to be set
    table_names        None: "t0", "t1", ...
    feature_table_map  the table of each feature, in ascending order; None: a feature for each table
    pooling_mode       SUM, MEAN, or NONE for a vector for every index
    output_dtype       of the vectors
    device             where the vectors go when the indices are on the CPU; rows live in host memory
    optimizer          and its numbers as keywords, such as learning_rate and eps: see OptimizerArgs

    use_index_dedup, enforce_hbm and bounds_check_mode are accepted and change nothing: duplicates are
    summed in any case, rows live in host memory, and every index is legal. Other keywords warn.

    `DynamicEmbDump`, `DynamicEmbLoad`, `incremental_dump`, `get_score` and `set_score` take the module as
    they take a sharded model.
    """

    def __init__(
        self,
        table_options: Sequence[DynamicEmbTableOptions],
        table_names: Sequence[str] | None = None,
        feature_table_map: Sequence[int] | None = None,
        use_index_dedup: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: Any = None,
        optimizer: EmbOptimType = EmbOptimType.SGD,
        **keywords: Any,
    ) -> None:
        super().__init__()
        names = [f"t{i}" for i in range(len(table_options))] if table_names is None else list(table_names)
        if not table_options or len(set(names)) != len(table_options):
            raise ValueError(f"table_names should be {len(table_options)} different names but is: {names}")
        for option in table_options:
            option.validate()
            if option != table_options[0]:
                raise ValueError(
                    f"table_options should agree in types but do not: {table_options[0]} and {option}"
                )
            for name in ("dim", "max_capacity"):
                if getattr(option, name) in (None, -1):
                    raise ValueError(f"{name} of table_options should be set but is: {getattr(option, name)}")
        self.feature_table_map = _checked_map(feature_table_map, len(names))
        self._features = len(self.feature_table_map)
        self._prefetches = False
        self._queue: deque[tuple[torch.Tensor, Prepared]] = deque()
        self.pooling_mode = DynamicEmbPoolingMode(pooling_mode)
        dims = [option.dim or 0 for option in table_options]
        if self.pooling_mode == DynamicEmbPoolingMode.NONE and len(set(dims)) > 1:
            raise ValueError(f"dim should be the same for all tables without pooling but is: {dims}")
        refused = {name: keywords.pop(name) for name in UNUSED_MATHEMATICS if name in keywords}
        unknown = [name for name in keywords if name not in _OPTIMIZER_ARGS]
        if unknown:
            warnings.warn(
                f"these arguments have no effect on dynamic tables: {unknown}", UserWarning, stacklevel=2
            )
        known = {name: value for name, value in keywords.items() if name in _OPTIMIZER_ARGS}
        self.optimizer_args = OptimizerArgs(**known)
        self._device = device
        fused_params = {**self.optimizer_args.fused_params(optimizer), **refused}
        planned = [_planned(option) for option in table_options]
        engines = [
            engine_options(name, option.dim or 0, option, fused_params, torch.initial_seed())
            for name, option in zip(names, planned, strict=True)
        ]
        pairs = list(zip(engines, planned, strict=True))
        tables = [
            make_table(engine, option, store=store, number=number, num_embeddings=option.max_capacity or 1)
            for number, ((engine, option), store) in enumerate(zip(pairs, stores_of(pairs, 0), strict=True))
        ]
        self.dynamic_tables = dict(zip(names, tables, strict=True))
        features = [self.feature_table_map.count(table) for table in range(len(names))]
        self._lookup: Lookup
        if self.pooling_mode == DynamicEmbPoolingMode.NONE:
            ends = [sum(features[: i + 1]) for i in range(len(features))]
            cells = [[Cell(f, f + 1) for f in range(e - n, e)] for n, e in zip(features, ends, strict=True)]
            self._lookup = KeyLookup(tables, output_dtype, Ranks(), cells)
        else:
            means = [self.pooling_mode == DynamicEmbPoolingMode.MEAN] * len(names)
            self._lookup = BagLookup(tables, output_dtype, Ranks(), features, means)

    def extra_repr(self) -> str:
        return "\n".join(repr(dynamic.table) for dynamic in self.dynamic_tables.values())

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> torch.Tensor:
        """Vectors of indices (n) whose bags begin at offsets (features x samples + 1), feature by feature:
        (samples, columns of all features), or (n, dim) without pooling."""
        if feature_requires_grad is not None:
            raise ValueError(f"feature_requires_grad should be None but is: {feature_requires_grad!r}")
        self.check_trained()
        keys, starts, samples = self._checked(indices, offsets, batch_size_per_feature_per_rank)
        device = self._device if self._device is not None and indices.device.type == "cpu" else indices.device
        if self.pooling_mode == DynamicEmbPoolingMode.NONE:
            return self._single(keys, starts, samples, device, per_sample_weights)
        weights = None if per_sample_weights is None else as_weights(per_sample_weights, keys.numel())
        if weights is not None and self.pooling_mode == DynamicEmbPoolingMode.MEAN:
            lengths = starts.diff()
            weights = weights / lengths.repeat_interleave(lengths)  # as FBGEMM: by length, not by weight
        return self._look_up(OwnedKeys(keys, starts, device, weights, samples=[samples]), samples)

    def _checked(
        self, indices: torch.Tensor, offsets: torch.Tensor, batch_sizes: list[list[int]] | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys, offsets and the number of samples of a batch."""
        if batch_sizes is not None:
            raise ValueError(f"batch_size_per_feature_per_rank should be None but is: {batch_sizes!r}")
        keys, starts = as_key_tensor(indices, "indices"), as_key_tensor(offsets, "offsets")
        samples, rest = divmod(starts.numel() - 1, self._features)
        if rest or starts.numel() == 0:
            raise ValueError(
                f"offsets should have samples x {self._features} features + 1 elements "
                f"but has: {starts.numel()}"
            )
        if int(starts[0]) != 0 or int(starts[-1]) != keys.numel() or bool((starts[1:] < starts[:-1]).any()):
            raise ValueError(
                f"offsets should ascend from 0 to the number of indices, {keys.numel()}, but is: {starts}"
            )
        return keys, starts, samples

    def to_serving(self, tables: ServedTables) -> ServedBatchedTables:
        """What `embstore.serving.serving_model` puts in its place."""
        rows = [ServedRows(tables.source, tables.name_of(name)) for name in self.dynamic_tables]
        of_features = [rows[table] for table in self.feature_table_map]
        return ServedBatchedTables(of_features, self.pooling_mode, self._lookup.dtype, self._device)

    def _single(
        self,
        keys: torch.Tensor,
        starts: torch.Tensor,
        samples: int,
        device: torch.device,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        """A vector for every key. `counts`: how often each of them occurred."""
        # of each feature; a batch without samples has nothing in any of them
        starts = starts[::samples].clone() if samples else torch.zeros(self._features + 1, dtype=torch.int64)
        if counts is None:
            return self._look_up(OwnedKeys(keys, starts, device, runs=starts[:-1]), 1)
        often = _as_counts(counts, keys.numel())
        ends = torch.cat([often.new_zeros(1), often.cumsum(0)])
        written_out = keys.repeat_interleave(often)
        starts = ends[starts]
        vectors = self._look_up(OwnedKeys(written_out, starts, device, runs=starts[:-1]), 1)
        return vectors[ends[:-1].to(device)]

    def _look_up(self, owned: OwnedKeys, samples: int) -> torch.Tensor:
        self._take_prefetched(owned.keys)
        recorded = self.cache.stats() if self.training and self.cache is not None else None
        vectors: torch.Tensor = self._lookup(owned)
        if recorded is not None and self.cache is not None:
            self.cache.record(recorded, self._keys_by_table(owned.keys, owned.offsets, samples))
        return vectors

    def _keys_by_table(
        self, keys: torch.Tensor, offsets: torch.Tensor, samples: int
    ) -> dict[str, torch.Tensor]:
        ends = [0, *(self.feature_table_map.index(t + 1) for t in range(self.feature_table_map[-1]))]
        bounds = [int(offsets[end * samples]) for end in [*ends, self._features]]
        pieces = [keys[first:last] for first, last in zip(bounds, bounds[1:])]
        return dict(zip(self.dynamic_tables, pieces, strict=True))

    # ---- prefetch

    @property
    def enable_prefetch(self) -> bool:
        """Whether `prefetch` makes lookups ahead; without it does nothing."""
        return self._prefetches

    @enable_prefetch.setter
    def enable_prefetch(self, value: bool) -> None:
        self._prefetches = bool(value)

    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        frequency_counters: torch.Tensor | None = None,
    ) -> None:
        """Makes the training lookup of a coming batch: keys are inserted, scores renewed, and the rows stay
        until the forward pass of the same batch. Forward passes come in the order of these calls. Does
        nothing in eval.

        frequency_counters  how often each index occurred
        """
        if not self.training or not self._prefetches:
            return
        self.check_trained()
        keys, starts, samples = self._checked(indices, offsets, batch_size_per_feature_per_rank)
        if frequency_counters is not None:
            often = _as_counts(frequency_counters, keys.numel())
            ends = torch.cat([often.new_zeros(1), often.cumsum(0)])
            keys, starts = keys.repeat_interleave(often), ends[starts]
        pieces = self._keys_by_table(keys, starts, samples)
        requests = [table.request(pieces[name]) for name, table in self.dynamic_tables.items()]
        self._queue.append((keys, prepare(requests)))

    def _take_prefetched(self, keys: torch.Tensor) -> None:
        if not self.training or not self._queue:
            return
        queued, prepared = self._queue[0]
        if not torch.equal(queued, keys):
            raise ValueError(
                f"indices should be those of the oldest prefetch, {queued.tolist()[:8]}..., but are: "
                f"{keys.tolist()[:8]}..."
            )
        self._queue.popleft()
        self._lookup.prepared = prepared

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """A placeholder without rows for each table: rows are read by `DynamicEmbDump` and `Table.rows()`."""
        return [weight.detach() for _, weight in self._lookup.named_parameters_by_table()]


class BatchedDynamicEmbeddingTablesV2(BatchedDynamicEmbeddingTables):
    """`BatchedDynamicEmbeddingTables` with the order of arguments of the current original package.

    prefetch_pipeline  whether `prefetch` makes lookups ahead

    Without pooling, per_sample_weights are how often each index occurred.
    """

    def __init__(
        self,
        table_options: Sequence[DynamicEmbTableOptions],
        table_names: Sequence[str] | None = None,
        feature_table_map: Sequence[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: Any = None,
        optimizer: EmbOptimType = EmbOptimType.SGD,
        *numbers: Any,
        **keywords: Any,
    ) -> None:
        if len(numbers) > len(_NUMBERS):
            raise TypeError(f"arguments should be at most {11 + len(_NUMBERS)} but are: {11 + len(numbers)}")
        given = dict(zip(_NUMBERS, numbers))
        twice = sorted(given.keys() & keywords.keys())
        if twice:
            raise TypeError(f"arguments should be given once but these are given twice: {twice}")
        super().__init__(
            table_options,
            table_names,
            feature_table_map,
            use_index_dedup,
            pooling_mode,
            output_dtype,
            device,
            enforce_hbm,
            bounds_check_mode,
            optimizer,
            **given,
            **keywords,
        )
        self.enable_prefetch = prefetch_pipeline


StorageLayout = unavailable_class(
    "StorageLayout", __name__, "rows live in host memory, or below it in `external_storage`"
)


def _planned(option: DynamicEmbTableOptions) -> DynamicEmbTableOptions:
    """Complete, and with the capacity as it was given unless it is to be one bucket."""
    if option.bucket_capacity == MAX_BUCKET_CAPACITY:
        rows, dim = option.max_capacity or 0, option.dim or 0
        dtype = option.embedding_dtype or torch.float32
        return option.completed(num_embeddings=rows, dim=dim, rows=rows, dtype=dtype)
    return dataclasses.replace(option, init_capacity=option.init_capacity or option.max_capacity)


def _as_counts(counts: torch.Tensor, n: int) -> torch.Tensor:
    """How often each of n indices occurred, int64 on the CPU. The original keeps them as floats."""
    often = counts.detach().to("cpu").reshape(-1)
    whole = often.to(torch.int64)
    if often.numel() != n or not bool((whole == often).all()) or (n and int(whole.min()) < 1):
        raise ValueError(
            f"per_sample_weights without pooling are counts: {n} integers of at least 1, but are: {counts!r}"
        )
    return whole


def _checked_map(feature_table_map: Sequence[int] | None, tables: int) -> list[int]:
    if feature_table_map is None:
        return list(range(tables))
    found = list(feature_table_map)
    if found != sorted(found) or set(found) != set(range(tables)):
        raise ValueError(
            f"feature_table_map should ascend and name each of the {tables} tables but is: {found}"
        )
    return found
