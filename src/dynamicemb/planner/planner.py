"""Planning: which tables are dynamic, how many rows a rank holds, and TorchRec's plan for the others.

constraints = {"user": DynamicEmbParameterConstraints(use_dynamicemb=True), ...}   # every table
planner = DynamicEmbeddingShardingPlanner(eb_configs, constraints=constraints)
plan = planner.collective_plan(model, [DynamicEmbeddingBagCollectionSharder()], dist.group.WORLD)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from dynamicemb.enumerations import BATCH_SIZE
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner.enumerators import (
    DynamicEmbeddingEnumerator,
    DynamicEmbParameterConstraints,
    is_dynamic,
)
from dynamicemb.planner.placement import place_tables
from dynamicemb.planner.rw_sharding import DynamicEmbParameterSharding, check_owner, describe
from embstore.distributed.ranks import ranks_of

logger = logging.getLogger(__name__)

HBM_CAP_BYTES = 32 << 30
DDR_CAP_BYTES = 128 << 30


def default_topology() -> Topology:
    """One node with as many ranks as there are, on the CPU where there is no GPU."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Topology(
        world_size=world,
        local_world_size=world,
        compute_device="cuda" if torch.cuda.is_available() else "cpu",
        hbm_cap=HBM_CAP_BYTES,
        ddr_cap=DDR_CAP_BYTES,
    )


def _checked(
    configs: list[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, ParameterConstraints]:
    if constraints is None:
        raise ValueError("constraints should name every table but is: None")
    counts = Counter(config.name for config in configs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"eb_configs should have different names but these occur twice: {twice}")
    missing = [name for name in counts if name not in constraints]
    if missing:
        raise ValueError(
            f"constraints should name every table of eb_configs but these are missing: {missing}"
        )
    extra = [name for name in constraints if name not in counts]
    if extra:
        raise ValueError(
            f"constraints should name tables of eb_configs only but these are not there: {extra}"
        )
    return dict(constraints)


class DynamicEmbeddingShardingPlanner:
    """TorchRec's planner for static tables; dynamic ones are row-wise over all ranks.

    They are table-wise where their constraint says so. A rank may hold max(next power of two of
    num_embeddings / world, bucket_capacity) rows of a row-wise dynamic table: `planned` shows it. TorchRec's
    memory budget does not count dynamic tables.

    Args:
        eb_configs: the configs of every table of the model. They are read, never changed.
        topology: of the ranks. None: one node, on the CPU where there is no GPU.
        batch_size: samples of a batch on a rank; this and what follows is for TorchRec's planner.
        enumerator: None is `DynamicEmbeddingEnumerator`.
        storage_reservation: None is TorchRec's own.
        proposer: None is TorchRec's own.
        partitioner: None is TorchRec's own.
        performance_model: None is TorchRec's own.
        stats: None is TorchRec's own.
        constraints: one entry for every table, static ones too.
        debug: let TorchRec log its choice.

    Raises:
        ValueError: constraints and eb_configs do not name the same tables, or an option of a table is out of
            range; the message names it.

    Examples:
        >>> from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=1000)
        >>> constraints = {"user": DynamicEmbParameterConstraints(use_dynamicemb=True)}
        >>> planner = DynamicEmbeddingShardingPlanner([config], constraints=constraints)
        >>> planner.planned["user"].max_capacity
        1024
    """

    def __init__(
        self,
        eb_configs: list[BaseEmbeddingConfig],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, DynamicEmbParameterConstraints] | None = None,
        debug: bool = True,
        **keywords: Any,
    ) -> None:
        self._configs = list(eb_configs)
        self._constraints = _checked(self._configs, constraints)
        self._topology = default_topology() if topology is None else topology
        self._batch_size = batch_size or BATCH_SIZE
        self._planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            enumerator=enumerator
            or DynamicEmbeddingEnumerator(self._topology, self._batch_size, self._constraints),
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=self._constraints,
            debug=debug,
            **keywords,
        )
        # By table: the options as they will be used. `planned["user"].max_capacity` is rows a rank.
        self.planned: dict[str, DynamicEmbTableOptions] = {}
        self._num_embeddings: dict[str, int] = {}
        world = self._topology.world_size
        self._owners = place_tables(self._configs, self._constraints, world)
        for config in self._configs:
            constraint = self._constraints[config.name]
            if not is_dynamic(constraint):
                continue
            options = getattr(constraint, "dynamicemb_options", None) or DynamicEmbTableOptions()
            options.validate()  # it may have been changed since it was made
            dim = config.embedding_dim
            if options.dim not in (None, -1, dim):
                raise ValueError(
                    f"dim of table {config.name!r} should be {dim} as in its config but is: {options.dim}"
                )
            self.planned[config.name] = options.planned(
                num_embeddings=config.num_embeddings,
                dim=dim,
                world=1 if config.name in self._owners else world,
                dtype=data_type_to_dtype(config.data_type),
            )
            if config.name in self._owners:
                check_owner(self._owners[config.name], world, self.planned[config.name], config.name)
            self._num_embeddings[config.name] = config.num_embeddings
            logger.info(
                "dynamic table %s: %d rows a rank", config.name, self.planned[config.name].max_capacity
            )

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The plan of the model, made by rank 0. All ranks call it.

        Args:
            module: the model.
            sharders: those that DistributedModelParallel gets.
            pg: the ranks. None: all.

        Raises:
            ValueError: ranks disagree about a table, or the topology has another number of ranks; on every
                rank.
        """
        ranks = ranks_of(pg, "collective_plan()", purpose=None)

        def check() -> dict[str, str]:
            if dist.is_initialized() and ranks.world != self._topology.world_size:
                raise ValueError(
                    f"topology should have {ranks.world} ranks as the process group but has: "
                    f"{self._topology.world_size}"
                )
            return self._description()

        ranks.require_same("options of dynamic tables", ranks.together(check))
        return self._with_dynamic(module, ranks.lead(lambda: self._planner.plan(module, sharders)))

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan of the model, without asking other ranks.

        Args:
            module: the model.
            sharders: those that DistributedModelParallel gets.
        """
        return self._with_dynamic(module, self._planner.plan(module, sharders))

    def _description(self) -> dict[str, str]:
        return {
            name: f"{self._num_embeddings[name]} embeddings, {describe(options)}, "
            f"owner={self._owners.get(name)}"
            for name, options in self.planned.items()
        }

    def _with_dynamic(self, module: nn.Module, plan: ShardingPlan) -> ShardingPlan:
        modules: dict[str, Any] = {}
        for path, module_plan in plan.plan.items():
            entries = dict(module_plan)
            for name in entries:
                if name in self.planned:
                    entries[name] = self._sharding(name)
            modules[path] = EmbeddingModuleShardingPlan(entries)
        return ShardingPlan(plan=modules)

    def _sharding(self, name: str) -> DynamicEmbParameterSharding:
        options = self.planned[name]
        world, device = self._topology.world_size, self._topology.compute_device
        rows, dim = options.max_capacity, options.dim
        assert rows is not None and dim is not None
        per_node = self._topology.local_world_size or world
        owner = self._owners.get(name)
        ranks = list(range(world)) if owner is None else [owner]
        return DynamicEmbParameterSharding(
            sharding_type=(ShardingType.ROW_WISE if owner is None else ShardingType.TABLE_WISE).value,
            compute_kernel=EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value,
            ranks=ranks,
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[number * rows, 0],
                        shard_sizes=[rows, dim],
                        placement=f"rank:{rank}/{device}"
                        + (f":{rank % per_node}" if device == "cuda" else ""),
                    )
                    for number, rank in enumerate(ranks)
                ]
            ),
            output_dtype=self._constraints[name].output_dtype,
            dist_type=options.dist_type,
            dynamicemb_options=options,
            num_embeddings=self._num_embeddings[name],
        )
