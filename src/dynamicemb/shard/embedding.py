"""The sharded EmbeddingCollection and its sharder. Static tables beside are TorchRec's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dynamicemb.score_strategies import ScoreStrategy
from dynamicemb.served import served_collection
from dynamicemb.shard.dynamic_tables import PREFIX, DynamicCollection, DynamicSharding, separate
from embstore.serving.models import ServedTables


class DynamicEmbeddingCollectionContext(EmbeddingCollectionContext):
    """TorchRec's context of a batch.

    A client may replace `__init__`, so nothing here needs it to have run.

    Args:
        sharding_contexts: as in TorchRec; so are the next three.
        input_features: as in TorchRec.
        reverse_indices: as in TorchRec.
        seq_vbe_ctx: as in TorchRec.
        frequency_counters: for clients that set it; ids are counted where their table is.

    Examples:
        >>> from dynamicemb.shard import DynamicEmbeddingCollectionContext
        >>> DynamicEmbeddingCollectionContext().frequency_counters
        []
    """

    def __init__(
        self,
        sharding_contexts: list[Any] | None = None,
        input_features: list[KeyedJaggedTensor] | None = None,
        reverse_indices: list[torch.Tensor] | None = None,
        seq_vbe_ctx: list[Any] | None = None,
        frequency_counters: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(
            sharding_contexts or [], input_features or [], reverse_indices or [], seq_vbe_ctx or []
        )
        self.frequency_counters = frequency_counters or []


def _without_samples(answer: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {name: JaggedTensor(jt.values(), lengths=jt.lengths()[:0]) for name, jt in answer.items()}


class ShardedDynamicEmbeddingCollection(DynamicCollection, ShardedEmbeddingCollection):
    """A sharded EmbeddingCollection, made by `DynamicEmbeddingCollectionSharder`.

    Its dynamic tables are in `dynamic_tables`, by name.

    Args:
        use_index_dedup: keys of a table travel once for each batch.
        score_strategy: no effect: the options of each table decide.
        has_admit_strategy: no effect: the options of each table decide.

    Examples:
        >>> from dynamicemb.shard import ShardedDynamicEmbeddingCollection
        >>> [m for m in model.modules() if isinstance(m, ShardedDynamicEmbeddingCollection)]  # it has bags
        []
    """

    _table_attribute = "embeddings"

    def __init__(
        self,
        *args: Any,
        use_index_dedup: bool = False,
        score_strategy: ScoreStrategy | None = None,
        has_admit_strategy: bool = False,
        **keywords: Any,
    ) -> None:
        # score_strategy and has_admit_strategy are accepted; the options of each table decide.
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
        return separate(super().create_grouped_sharding_infos(*args, **keywords))

    def create_embedding_sharding(  # type: ignore[override]
        self,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        **keywords: Any,
    ) -> Any:
        if sharding_type.startswith(PREFIX):
            codecs = keywords.get("qcomm_codecs_registry")
            return DynamicSharding(sharding_infos, env, codecs, self._drops_duplicates)
        return super().create_embedding_sharding(
            sharding_type=sharding_type, sharding_infos=sharding_infos, env=env, **keywords
        )

    def create_context(self) -> DynamicEmbeddingCollectionContext:
        context = DynamicEmbeddingCollectionContext()
        # What TorchRec's own __init__ sets, which a client's replacement may not know of.
        for name in ("table_name_to_unpruned_hash_sizes", "early_releasable_inputs"):
            if not hasattr(context, name):
                setattr(context, name, {} if name.startswith("table") else [])
        return context

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

    def to_serving(self, tables: ServedTables) -> Any:
        """What `embstore.serving.serving_model` puts in its place."""
        return served_collection(self, self._embedding_configs, "embeddings", tables, self._env.process_group)

    def _strip(self, ctx: Any, awaitable: Any) -> Any:
        if ctx.without_samples:
            awaitable.callbacks.append(_without_samples)
        return awaitable

    def load_state_dict(self, state_dict: Any, *args: Any, **keywords: Any) -> Any:
        if not self._complete:
            state_dict = dict(state_dict)
            self._without_dynamic_rows(state_dict)
        return super().load_state_dict(state_dict, *args, **keywords)


class DynamicEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """TorchRec's EmbeddingCollectionSharder, for collections whose tables may be dynamic.

    Its arguments are TorchRec's; fused_params choose the optimizer: EXACT_SGD, ADAM, EXACT_ADAGRAD or
    EXACT_ROWWISE_ADAGRAD. Another one raises ValueError when the model is sharded. With use_index_dedup keys
    of a table travel once for each batch; the result is the same.

    Examples:
        >>> from dynamicemb import EmbOptimType
        >>> from dynamicemb.shard import DynamicEmbeddingCollectionSharder
        >>> fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        >>> sharder = DynamicEmbeddingCollectionSharder(fused_params=fused, use_index_dedup=True)
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
