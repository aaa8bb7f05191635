"""Planning: which tables are dynamic, how many rows a rank holds, and TorchRec's plan for the others."""

from dynamicemb.planner.enumerators import DynamicEmbeddingEnumerator, DynamicEmbParameterConstraints
from dynamicemb.planner.planner import DynamicEmbeddingShardingPlanner
from dynamicemb.planner.rw_sharding import DynamicEmbParameterSharding

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
