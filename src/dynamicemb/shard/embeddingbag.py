"""The sharded EmbeddingBagCollection and its sharder. Static tables beside are TorchRec's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dynamicemb.exchange import STEP
from dynamicemb.planner import DynamicEmbParameterSharding
from dynamicemb.served import served_collection
from dynamicemb.shard.dynamic_tables import DynamicCollection, DynamicSharding, separate
from dynamicemb.variable_batch import expand_variable_batch, padded
from embstore.distributed.ranks import TorchRanks
from embstore.serving.models import ServedTables


class ShardedDynamicEmbeddingBagCollection(DynamicCollection, ShardedEmbeddingBagCollection):
    """A sharded EmbeddingBagCollection, made by `DynamicEmbeddingBagCollectionSharder`.

    Its dynamic tables are in `dynamic_tables`, by name.

    Examples:
        >>> from dynamicemb.shard import ShardedDynamicEmbeddingBagCollection
        >>> bags = [m for m in model.modules() if isinstance(m, ShardedDynamicEmbeddingBagCollection)]
        >>> list(bags[0].dynamic_tables)
        ['user']
    """

    _table_attribute = "embedding_bags"

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._adopt(self._embedding_shardings)
        self._keep_means_apart()
        # TorchRec reduce-scatters row-wise static bags, for which gloo wants batches of one size.
        self._wants_one_size = bool(self._dynamic_shardings) and any(
            not isinstance(sharding, DynamicEmbParameterSharding)
            and sharding.sharding_type in (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
            for sharding in self.module_sharding_plan.values()
        )

    @classmethod
    def create_grouped_sharding_infos(
        cls, *args: Any, **keywords: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        return separate(super().create_grouped_sharding_infos(*args, **keywords))

    @classmethod
    def create_embedding_bag_sharding(
        cls, sharding_infos: list[EmbeddingShardingInfo], env: ShardingEnv, *args: Any, **keywords: Any
    ) -> Any:
        if isinstance(sharding_infos[0].param_sharding, DynamicEmbParameterSharding):
            return DynamicSharding(sharding_infos, env, keywords.get("qcomm_codecs_registry"))
        return super().create_embedding_bag_sharding(sharding_infos, env, *args, **keywords)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        # TorchRec checks the range of the ids of the first batch. Every id of a dynamic table is legal.
        configs = self._embedding_bag_configs
        self._embedding_bag_configs = [c for c in configs if c.name not in self.dynamic_tables]
        try:
            return super().input_dist(ctx, features)
        finally:
            self._embedding_bag_configs = configs

    def _prepared(self, ctx: Any, features: Any) -> Any:
        ctx.own_samples = None
        if self.dynamic_tables and isinstance(features, KeyedJaggedTensor):
            features = expand_variable_batch(features)
            ranks = self._dynamic_shardings[0].ranks
            if self._wants_one_size and isinstance(ranks, TorchRanks):
                own = np.array([features.stride()], np.int64)
                largest = int(max(size[0] for size in ranks.all_gather_equal(own, STEP)))
                if largest != features.stride():
                    ctx.own_samples = features.stride()
                    features = padded(features, largest)
        return features

    def output_dist(self, ctx: Any, output: list[torch.Tensor]) -> Any:
        return self._cut(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self._cut(ctx, super().compute_and_output_dist(ctx, input))

    def _cut(self, ctx: Any, awaitable: Any) -> Any:
        """Takes the samples away that `_prepared` added."""
        own = ctx.own_samples
        if own is not None:
            awaitable.callbacks.append(
                lambda bags: KeyedTensor(bags.keys(), bags.length_per_key(), bags.values()[:own])
            )
        return awaitable

    def to_serving(self, tables: ServedTables) -> Any:
        """What `embstore.serving.serving_model` puts in its place."""
        return served_collection(
            self, self._embedding_bag_configs, "embedding_bags", tables, self._env.process_group
        )

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


class DynamicEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's EmbeddingBagCollectionSharder, for collections whose tables may be dynamic.

    Its arguments are TorchRec's; fused_params choose the optimizer: EXACT_SGD, ADAM, EXACT_ADAGRAD or
    EXACT_ROWWISE_ADAGRAD. Another one raises ValueError when the model is sharded.

    Examples:
        >>> from dynamicemb import EmbOptimType
        >>> from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder
        >>> fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
        >>> sharder = DynamicEmbeddingBagCollectionSharder(fused_params=fused)
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec offers row-wise bags for GPUs only, though they run on the CPU too."""
        offered = list(super().sharding_types(compute_device_type))
        row_wise = ShardingType.ROW_WISE.value
        return offered if row_wise in offered else [*offered, row_wise]

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
