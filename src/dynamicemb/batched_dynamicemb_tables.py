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
from dynamicemb.lookup import BagLookup, KeyLookup, Lookup
from dynamicemb.optimizers import OptimizerArgs
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.routing import Cell, OwnedKeys
from dynamicemb.scores import get_score, set_score
from dynamicemb.tables import HoldsDynamicTables, engine_options, make_table
from dynamicemb.unavailable import unavailable_class
from embstore.distributed.ranks import Ranks
from embstore.nn.batch import as_key_tensor, as_weights

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


class BatchedDynamicEmbeddingTables(HoldsDynamicTables, nn.Module):
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
        self.pooling_mode = DynamicEmbPoolingMode(pooling_mode)
        dims = [option.dim or 0 for option in table_options]
        if self.pooling_mode == DynamicEmbPoolingMode.NONE and len(set(dims)) > 1:
            raise ValueError(f"dim should be the same for all tables without pooling but is: {dims}")
        unknown = [name for name in keywords if name not in _OPTIMIZER_ARGS]
        if unknown:
            warnings.warn(
                f"these arguments have no effect on dynamic tables: {unknown}", UserWarning, stacklevel=2
            )
        known = {name: value for name, value in keywords.items() if name in _OPTIMIZER_ARGS}
        self.optimizer_args = OptimizerArgs(**known)
        self._device = device
        fused_params = self.optimizer_args.fused_params(optimizer)
        tables = []
        for name, option in zip(names, table_options, strict=True):
            planned = _planned(option)
            engine = engine_options(name, option.dim or 0, planned, fused_params, torch.initial_seed())
            tables.append(make_table(engine, planned))
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

    @property
    def table_names(self) -> list[str]:
        return list(self.dynamic_tables)

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
        for name, value in (
            ("feature_requires_grad", feature_requires_grad),
            ("batch_size_per_feature_per_rank", batch_size_per_feature_per_rank),
        ):
            if value is not None:
                raise ValueError(f"{name} should be None but is: {value!r}")
        self.check_trained()
        keys, starts = as_key_tensor(indices, "indices"), as_key_tensor(offsets, "offsets")
        features = len(self.feature_table_map)
        samples, rest = divmod(starts.numel() - 1, features)
        if rest or starts.numel() == 0:
            raise ValueError(
                f"offsets should have samples x {features} features + 1 elements but has: {starts.numel()}"
            )
        if int(starts[0]) != 0 or int(starts[-1]) != keys.numel() or bool((starts[1:] < starts[:-1]).any()):
            raise ValueError(
                f"offsets should ascend from 0 to the number of indices, {keys.numel()}, but is: {starts}"
            )
        device = self._device if self._device is not None and indices.device.type == "cpu" else indices.device
        pooled = self.pooling_mode != DynamicEmbPoolingMode.NONE
        if per_sample_weights is not None and not pooled:
            raise ValueError("per_sample_weights should be None without pooling")
        weights = None if per_sample_weights is None else as_weights(per_sample_weights, keys.numel())
        if weights is not None and self.pooling_mode == DynamicEmbPoolingMode.MEAN:
            lengths = starts.diff()
            weights = weights / lengths.repeat_interleave(lengths)  # as FBGEMM: by length, not by weight
        if not pooled:
            # of each feature; a batch without samples has nothing in any of them
            starts = starts[::samples].clone() if samples else torch.zeros(features + 1, dtype=torch.int64)
            return self._lookup(OwnedKeys(keys, starts, device, runs=starts[:-1]))
        return self._lookup(OwnedKeys(keys, starts, device, weights, samples=[samples]))

    def set_learning_rate(self, lr: float) -> None:
        """For all tables, from the next update on."""
        for table in self.dynamic_tables.values():
            table.load_optimizer_args({"lr": lr})

    def get_score(self) -> dict[str, int]:
        """The score that the next training forward will give its keys, by table."""
        return (get_score(self) or {}).get("model", {})

    def set_score(self, named_score: dict[str, int]) -> None:
        """Sets the scores of CUSTOMIZED tables, by name."""
        set_score(self, {"model": named_score})

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """A placeholder without rows for each table: rows are read by `DynamicEmbDump` and `Table.rows()`."""
        return [weight.detach() for _, weight in self._lookup.named_parameters_by_table()]

    def flush(self) -> None:
        """Nothing is cached."""

    def reset_cache_states(self) -> None:
        """Nothing is cached."""


BatchedDynamicEmbeddingTablesV2 = unavailable_class(
    "BatchedDynamicEmbeddingTablesV2", __name__, "use BatchedDynamicEmbeddingTables of this module"
)
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


def _checked_map(feature_table_map: Sequence[int] | None, tables: int) -> list[int]:
    if feature_table_map is None:
        return list(range(tables))
    found = list(feature_table_map)
    if found != sorted(found) or set(found) != set(range(tables)):
        raise ValueError(
            f"feature_table_map should ascend and name each of the {tables} tables but is: {found}"
        )
    return found
