"""Sharded collections with dynamic tables, and the sharders that make them.

    sharders = [DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})]

Static tables of the same collection are TorchRec's, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import embstore
from dynamicemb.lookup import BagLookup, KeyLookup, Lookup, NoOutputDist
from dynamicemb.planner import DynamicEmbParameterSharding
from dynamicemb.routing import BagRouting, Cell, KeyRouting
from dynamicemb.tables import DynamicTable, HoldsDynamicTables, build_tables
from dynamicemb.variable_batch import expand_variable_batch
from embstore.distributed.ranks import Ranks, ranks_of

_PREFIX = "dynamicemb."  # of the names of our groups, beside TorchRec's sharding types


def _separate(groups: dict[str, list[EmbeddingShardingInfo]]) -> dict[str, list[EmbeddingShardingInfo]]:
    """Takes the dynamic tables out of TorchRec's groups: one group for each ownership."""
    separated: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, infos in groups.items():
        for info in infos:
            sharding = info.param_sharding
            name = sharding_type
            if isinstance(sharding, DynamicEmbParameterSharding):
                assert sharding.dynamicemb_options is not None
                name = _PREFIX + sharding.dynamicemb_options.dist_type
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


class DynamicSharding(EmbeddingSharding[Any, Any, torch.Tensor, torch.Tensor]):
    """Dynamic tables of a collection that share an ownership."""

    def __init__(
        self, infos: Sequence[EmbeddingShardingInfo], env: ShardingEnv, unique: bool = False
    ) -> None:
        super().__init__()
        ranks = ranks_of(env.process_group, purpose=None) if env.world_size > 1 else Ranks()
        self.tables = build_tables(infos, env, ranks)
        self._configs = [info.embedding_config for info in infos]
        self._dtype = _output_dtype(infos)
        self._ownership = next(iter(self.tables.values())).ownership
        self.ranks = ranks
        self._pooled = self._configs[0].pooling != PoolingType.NONE
        self._unique = unique and ranks.world > 1
        self._spread = {
            info.embedding_config.name: info.param_sharding.sharding_spec.shards[env.rank] for info in infos
        }

    def _cells(self) -> list[list[Cell]]:
        """For each table: its features one by one, or all together where duplicates are dropped. Where
        the number of occurrences counts, they are not."""
        cells, first = [], 0
        for config in self._configs:
            last = first + len(config.feature_names)
            table = self.tables[config.name]
            counts = table.table.options.score_strategy == embstore.ScoreStrategy.LFU
            if self._unique and not counts and table.options.admit_strategy is None:
                cells.append([Cell(first, last, unique=True)])
            else:
                cells.append([Cell(feature, feature + 1) for feature in range(first, last)])
            first = last
        return cells

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        if not self._pooled:
            cells = [cell for of_table in self._cells() for cell in of_table]
            return KeyRouting(self._ownership, self.ranks, cells)
        mean = [c.pooling == PoolingType.MEAN for c in self._configs for _ in c.feature_names]
        weighted = self._configs[0].is_weighted
        return BagRouting(self._ownership, self.ranks, mean, weighted)

    def create_lookup(self, *args: Any, **keywords: Any) -> Lookup:
        common = (list(self.tables.values()), self._dtype, self.ranks)
        if not self._pooled:
            return KeyLookup(*common, self._cells())
        features = [len(c.feature_names) for c in self._configs]
        return BagLookup(*common, features, [c.pooling == PoolingType.MEAN for c in self._configs])

    def create_output_dist(self, device: torch.device | None = None) -> NoOutputDist:
        return NoOutputDist()

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


def _without_samples(answer: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {name: JaggedTensor(jt.values(), lengths=jt.lengths()[:0]) for name, jt in answer.items()}


class _DynamicCollection(HoldsDynamicTables):
    """What both sharded collections add to TorchRec's."""

    _table_attribute = ""

    def input_dist(self, ctx: Any, features: Any) -> Any:
        try:
            return super().input_dist(ctx, self._prepared(ctx, features))  # type: ignore[misc]
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


class ShardedDynamicEmbeddingCollection(_DynamicCollection, ShardedEmbeddingCollection):
    """A sharded EmbeddingCollection; its dynamic tables are in `dynamic_tables`."""

    _table_attribute = "embeddings"

    def __init__(self, *args: Any, use_index_dedup: bool = False, **keywords: Any) -> None:
        self._drops_duplicates = use_index_dedup
        self._complete = False
        # FBGEMM's own de-duplication has no CPU kernel. Ours is part of the routing; static tables give
        # the same result without.
        super().__init__(*args, use_index_dedup=False, **keywords)
        self._use_index_dedup = False
        self._adopt(list(self._sharding_type_to_sharding.values()))
        self._complete = True

    @classmethod
    def create_grouped_sharding_infos(
        cls, *args: Any, **keywords: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        return _separate(super().create_grouped_sharding_infos(*args, **keywords))

    def create_embedding_sharding(  # type: ignore[override]
        self,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        **keywords: Any,
    ) -> Any:
        if sharding_type.startswith(_PREFIX):
            return DynamicSharding(sharding_infos, env, self._drops_duplicates)
        return super().create_embedding_sharding(
            sharding_type=sharding_type, sharding_infos=sharding_infos, env=env, **keywords
        )

    def _prepared(self, ctx: Any, features: Any) -> Any:
        # TorchRec cannot build the answer of a batch without samples, so it gets one empty sample.
        ctx.without_samples = isinstance(features, KeyedJaggedTensor) and features.stride() == 0
        if ctx.without_samples:
            features = KeyedJaggedTensor(
                features.keys(),
                features.values(),
                lengths=torch.zeros(len(features.keys()), dtype=torch.int64),
            )
        return features

    def output_dist(self, ctx: Any, output: list[torch.Tensor]) -> Any:
        return self._strip(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self._strip(ctx, super().compute_and_output_dist(ctx, input))

    def _strip(self, ctx: Any, awaitable: Any) -> Any:
        if ctx.without_samples:
            awaitable.callbacks.append(_without_samples)
        return awaitable

    def load_state_dict(self, state_dict: Any, *args: Any, **keywords: Any) -> Any:
        if not self._complete:
            state_dict = dict(state_dict)
            self._without_dynamic_rows(state_dict)
        return super().load_state_dict(state_dict, *args, **keywords)


class ShardedDynamicEmbeddingBagCollection(_DynamicCollection, ShardedEmbeddingBagCollection):
    """A sharded EmbeddingBagCollection; its dynamic tables are in `dynamic_tables`."""

    _table_attribute = "embedding_bags"

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._adopt(self._embedding_shardings)
        self._keep_means_apart()

    @classmethod
    def create_grouped_sharding_infos(
        cls, *args: Any, **keywords: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        return _separate(super().create_grouped_sharding_infos(*args, **keywords))

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: list[EmbeddingShardingInfo], env: ShardingEnv, *args: Any, **keywords: Any
    ) -> Any:
        if isinstance(sharding_infos[0].param_sharding, DynamicEmbParameterSharding):
            return DynamicSharding(sharding_infos, env)
        return super().create_embedding_bag_sharding(sharding_infos, env, *args, **keywords)

    def _prepared(self, ctx: Any, features: Any) -> Any:
        if self.dynamic_tables and isinstance(features, KeyedJaggedTensor):
            features = expand_variable_batch(features)
        return features

    def _keep_means_apart(self) -> None:
        """TorchRec divides the bags of row-wise MEAN features after the fact; ours are means already.

        It knows features, not tables, so a feature cannot be both.
        """
        means: dict[str, set[str]] = {"dynamic": set(), "static": set()}
        sums: list[str] = list(self._pooling_type_to_rs_features[PoolingType.SUM.value])
        for config in self._embedding_bag_configs:
            sharding = self.module_sharding_plan[config.name]
            if isinstance(sharding, DynamicEmbParameterSharding):
                means["dynamic"].update(config.feature_names)
            elif config.pooling == PoolingType.MEAN and sharding.sharding_type in (
                ShardingType.ROW_WISE.value,
                ShardingType.TABLE_ROW_WISE.value,
            ):
                means["static"].update(config.feature_names)
        both = means["dynamic"] & means["static"]
        if both:
            raise ValueError(
                f"features should not be shared by a dynamic table and a row-wise static table of MEAN "
                f"pooling but these are: {sorted(both)}"
            )
        self._has_mean_pooling_callback = bool(means["static"])
        self._pooling_type_to_rs_features[PoolingType.SUM.value] = [
            *(f for f in sums if f not in means["dynamic"]),
            *sorted(means["dynamic"]),
        ]
        self._pooling_type_to_rs_features[PoolingType.MEAN.value] = sorted(means["static"])


class DynamicEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """TorchRec's EmbeddingCollectionSharder, for collections whose tables may be dynamic.

    use_index_dedup  keys of a table travel once for each batch; the result is the same
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingCollection:
        return ShardedDynamicEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedDynamicEmbeddingCollection


class DynamicEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's EmbeddingBagCollectionSharder, for collections whose tables may be dynamic."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingBagCollection:
        return ShardedDynamicEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedDynamicEmbeddingBagCollection
