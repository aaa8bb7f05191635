"""Which tables are dynamic, and TorchRec's enumerator that leaves them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingType

from dynamicemb.enumerations import BATCH_SIZE
from dynamicemb.options import DynamicEmbTableOptions


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    """TorchRec's constraints of a table, and whether it is dynamic. This is the one place to say so.

    Args:
        sharding_types: of a dynamic table. None or ["row_wise"] spreads its rows over all ranks,
            ["table_wise"] keeps it on one rank; with both it is table-wise where at least as many tables as
            ranks allow it.
        use_dynamicemb: True makes the table dynamic.
        dynamicemb_options: its options; each instance has its own.

    Examples:
        >>> from dynamicemb import DynamicEmbTableOptions
        >>> from dynamicemb.planner import DynamicEmbParameterConstraints
        >>> options = DynamicEmbTableOptions(init_capacity=1024)
        >>> constraint = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
    """

    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions | None = field(default_factory=DynamicEmbTableOptions)

    __hash__ = ParameterConstraints.__hash__


def is_dynamic(constraint: ParameterConstraints | None) -> bool:
    return bool(getattr(constraint, "use_dynamicemb", False))


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator; a dynamic table has one sharding option, that costs nothing.

    Args:
        topology: of the ranks.
        batch_size: samples of a batch on a rank.
        constraints: by table.
        estimator: of static tables; None is TorchRec's own.

    Examples:
        >>> from dynamicemb.planner import DynamicEmbeddingEnumerator, DynamicEmbParameterConstraints
        >>> from torchrec.distributed.planner import Topology
        >>> constraints = {"user": DynamicEmbParameterConstraints(use_dynamicemb=True)}
        >>> enumerator = DynamicEmbeddingEnumerator(Topology(2, "cpu"), constraints=constraints)
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, DynamicEmbParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(topology, batch_size or BATCH_SIZE, constraints, estimator, **keywords)

    def _dynamic(self, name: str) -> bool:
        return is_dynamic((self._constraints or {}).get(name))

    def _filter_sharding_types(self, name: str, *args: Any, **keywords: Any) -> list[str]:
        if self._dynamic(name):
            return [ShardingType.ROW_WISE.value]
        return super()._filter_sharding_types(name, *args, **keywords)

    def _filter_compute_kernels(self, name: str, *args: Any, **keywords: Any) -> list[str]:
        if self._dynamic(name):
            return [EmbeddingComputeKernel.FUSED.value]
        return super()._filter_compute_kernels(name, *args, **keywords)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        super().populate_estimates([o for o in sharding_options if not self._dynamic(o.name)])
        for option in sharding_options:
            if self._dynamic(option.name):
                for shard in option.shards:
                    shard.perf = Perf(0.0, 0.0, 0.0, 0.0)
                    shard.storage = Storage(hbm=0, ddr=0)
