"""What both sharded collections share: the dynamic tables of a collection as a TorchRec sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.types import CommOp, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import embstore
from dynamicemb.lookup import BagLookup, KeyLookup, Lookup, OutputDist
from dynamicemb.planner import DynamicEmbParameterSharding
from dynamicemb.routing import BagRouting, Cell, KeyRouting
from dynamicemb.tables import SHARDING, DynamicTable, HoldsDynamicTables, build_tables, rows_of
from dynamicemb.wire import Wire, wire_of
from embstore.distributed.ranks import Ranks, ranks_of
from embstore.ownership import OnRank

# Strategies to which an id that comes twice is worth two.
COUNTING = (embstore.ScoreStrategy.LFU, embstore.ScoreStrategy.AGED_LFU)
PREFIX = "dynamicemb."  # of the names of our groups, beside TorchRec's sharding types


def separate(groups: dict[str, list[EmbeddingShardingInfo]]) -> dict[str, list[EmbeddingShardingInfo]]:
    """Takes the dynamic tables out of TorchRec's groups: one group for each ownership, and one for tables
    that are on one rank each."""
    separated: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, infos in groups.items():
        for info in infos:
            sharding = info.param_sharding
            name = sharding_type
            if isinstance(sharding, DynamicEmbParameterSharding):
                assert sharding.dynamicemb_options is not None
                name = PREFIX + sharding.dynamicemb_options.dist_type
                if sharding.owner is not None:
                    name = PREFIX + sharding.sharding_type
                elif sharding.dist_type == "continuous":  # blocks are as large as the table says
                    name += f".{rows_of(info)}"
            separated.setdefault(name, []).append(info)
    return separated


def _output_dtype(infos: Sequence[EmbeddingShardingInfo]) -> torch.dtype:
    found = set()
    for info in infos:
        wanted = (info.fused_params or {}).get("output_dtype")
        if wanted is None:
            found.add(torch.float32)
        elif isinstance(wanted, torch.dtype):
            found.add(wanted)
        else:  # FBGEMM's SparseType
            found.add(wanted.as_dtype())
    if len(found) > 1:
        raise ValueError(f"output_dtype should be the same for the tables of a collection but is: {found}")
    return found.pop()


def _shard_of(sharding: DynamicEmbParameterSharding, rank: int) -> ShardMetadata | None:
    """The part of a table on this rank, None where it has none."""
    shards = sharding.sharding_spec.shards
    if sharding.owner is None:
        return shards[rank]
    return shards[0] if sharding.owner == rank else None


class DynamicSharding(EmbeddingSharding[Any, Any, torch.Tensor, torch.Tensor]):
    """Dynamic tables of a collection that share an ownership, or are on one rank each."""

    def __init__(
        self,
        infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        codecs: Mapping[str, Any] | None = None,
        unique: bool = False,
    ) -> None:
        super().__init__()
        ranks = ranks_of(env.process_group, purpose=None) if env.world_size > 1 else Ranks()
        self._configs = [info.embedding_config for info in infos]
        self._pooled = self._configs[0].pooling != PoolingType.NONE
        self._wire = Wire()
        if ranks.world > 1:
            operation = self._operation(infos[0])
            self._wire = ranks.together(lambda: wire_of(codecs, operation), SHARDING)
            ranks.require_same("qcomm_codecs_registry", {operation.name: str(self._wire)})
        self.tables = build_tables(infos, env, ranks)
        self.dtype = _output_dtype(infos)
        self._ownership = next(iter(self.tables.values())).ownership
        self.ranks = ranks
        self._unique = unique and ranks.world > 1
        of_tables = [table.ownership for table in self.tables.values()]
        self._owners = [rule.rank for rule in of_tables if isinstance(rule, OnRank) and ranks.world > 1]
        self._spread = {
            info.embedding_config.name: _shard_of(info.param_sharding, env.rank) for info in infos
        }

    def _operation(self, info: EmbeddingShardingInfo) -> CommOp:
        """What TorchRec calls the exchange of vectors."""
        if not self._pooled:
            return CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        if info.param_sharding.sharding_type == ShardingType.TABLE_WISE.value:
            return CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
        return CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER

    def _cells(self) -> list[list[Cell]]:
        """For each table: its features one by one, or all together where duplicates are dropped. Where
        the number of occurrences counts, they are not."""
        cells, first = [], 0
        for config in self._configs:
            last = first + len(config.feature_names)
            table = self.tables[config.name]
            engine = table.table.options
            by_count = engine.evict_least_used or engine.score_strategy in COUNTING or engine.counts_keys
            if self._unique and not by_count and table.options.admit_strategy is None:
                cells.append([Cell(first, last, unique=True)])
            else:
                cells.append([Cell(feature, feature + 1) for feature in range(first, last)])
            first = last
        return cells

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        if not self._pooled:
            by_table = self._cells()
            cells = [cell for of_table in by_table for cell in of_table]
            owners = [o for o, of_table in zip(self._owners, by_table) for _ in of_table]
            return KeyRouting(self._ownership, self.ranks, cells, owners)
        mean = [c.pooling == PoolingType.MEAN for c in self._configs for _ in c.feature_names]
        weighted = self._configs[0].is_weighted
        owners = [o for o, c in zip(self._owners, self._configs) for _ in c.feature_names]
        return BagRouting(self._ownership, self.ranks, mean, weighted, owners)

    def create_lookup(self, *args: Any, **keywords: Any) -> Lookup:
        common = (list(self.tables.values()), self.dtype, self.ranks)
        if not self._pooled:
            return KeyLookup(*common, self._cells(), self._wire)
        features = [len(c.feature_names) for c in self._configs]
        mean = [c.pooling == PoolingType.MEAN for c in self._configs]
        return BagLookup(*common, features, mean, self._owners, self._wire)

    def create_output_dist(self, device: torch.device | None = None) -> OutputDist:
        return OutputDist()

    def feature_names(self) -> list[str]:
        return [name for config in self._configs for name in config.feature_names]

    def embedding_dims(self) -> list[int]:
        return [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def embedding_names(self) -> list[str]:
        return [name for config in self._configs for name in config.embedding_names]

    def embedding_names_per_rank(self) -> list[list[str]]:
        return [self.embedding_names()] * self.ranks.world

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        return [self._spread[config.name] for config in self._configs for _ in config.feature_names]


def signed(features: Any) -> Any:
    """The same batch with int64 ids where they are uint64, which many operators of torch do not know."""
    if not isinstance(features, KeyedJaggedTensor) or features.values().dtype != torch.uint64:
        return features
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        features.values().view(torch.int64),
        features.weights_or_none(),
        features.lengths_or_none(),
        features.offsets_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


class PlaceOfTable(torch.nn.Module):
    """Where TorchRec keeps the weight of a static table; of a dynamic one it shows the rows on this rank."""

    table: embstore.Table

    def extra_repr(self) -> str:
        return repr(self.table)


class DynamicCollection(HoldsDynamicTables):
    """What both sharded collections add to TorchRec's."""

    _table_attribute = ""

    def input_dist(self, ctx: Any, features: Any) -> Any:
        try:
            self.check_trained()
            return super().input_dist(ctx, self._prepared(ctx, signed(features)))  # type: ignore[misc]
        except BaseException as error:
            # TorchRec found a fault before our exchange: the other ranks wait in it, and will say why.
            for sharding in self._dynamic_shardings:
                sharding.ranks.report(error)
            raise

    def _prepared(self, ctx: Any, features: Any) -> Any:
        raise NotImplementedError

    def _adopt(self, shardings: Sequence[EmbeddingSharding[Any, Any, Any, Any]]) -> None:
        self._dynamic_shardings = [s for s in shardings if isinstance(s, DynamicSharding)]
        self.dynamic_tables: dict[str, DynamicTable] = {}
        for sharding in self._dynamic_shardings:
            self.dynamic_tables.update(sharding.tables)
        for name, module in getattr(self, self._table_attribute).items():
            if name in self.dynamic_tables:
                module.__class__ = PlaceOfTable  # TorchRec's is a plain Module, which shows nothing
                module.table = self.dynamic_tables[name].table

    def output_dtype(self, table: str) -> torch.dtype:
        """Of the vectors of a dynamic table."""
        return next(s.dtype for s in self._dynamic_shardings if table in s.tables)

    def train(self, mode: bool = True) -> Any:
        """TorchRec keeps its lookups in a plain list, which train() does not reach."""
        super().train(mode)  # type: ignore[misc]
        for lookup in self._lookups:  # type: ignore[attr-defined]
            if isinstance(lookup, Lookup):
                lookup.train(mode)
        return self

    def _without_dynamic_rows(self, state: dict[str, Any]) -> None:
        """The weights of a module that was not on the meta device are not those of dynamic tables."""
        for name, sharding in self.module_sharding_plan.items():  # type: ignore[attr-defined]
            if isinstance(sharding, DynamicEmbParameterSharding):
                key = f"{self._table_attribute}.{name}.weight"
                if key in state:
                    state[key] = torch.empty(0, state[key].shape[1])
