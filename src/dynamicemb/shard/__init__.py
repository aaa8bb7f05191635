"""Sharded collections with dynamic tables, and the sharders that make them.

sharders = [DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})]
"""

from dynamicemb.shard.embedding import (
    DynamicEmbeddingCollectionContext,
    DynamicEmbeddingCollectionSharder,
    ShardedDynamicEmbeddingCollection,
)
from dynamicemb.shard.embeddingbag import (
    DynamicEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionContext",
    "DynamicEmbeddingCollectionSharder",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
]
