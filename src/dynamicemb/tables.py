"""A dynamic table on one rank, and the base of the modules that hold such tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ShardingEnv

import embstore
from dynamicemb.optimizers import engine_optimizer, optimizer_args
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbParameterSharding, describe
from embstore.distributed.ranks import Ranks
from embstore.stores import row_bytes


@dataclass(eq=False)
class DynamicTable:
    """The part of a table that lives on this rank.

    name           of the table in its collection
    table          its rows here
    options        as planned: capacity, dtype and bounds are filled in
    ownership      which rank owns a key
    world, rank    of the ranks that share the table
    process_group  of those ranks
    param_group    its entry in the fused optimizer; "lr" is what the next update uses
    """

    name: str
    table: embstore.Table
    options: DynamicEmbTableOptions
    ownership: embstore.Ownership
    world: int
    rank: int
    process_group: dist.ProcessGroup | None
    param_group: dict[str, Any] = field(default_factory=dict)

    def optimizer_args(self) -> dict[str, Any]:
        """The optimizer as it stands, in the words of `{table}_opt_args.json`."""
        self.sync_learning_rate()
        return optimizer_args(self.table)

    def load_optimizer_args(self, args: Mapping[str, Any]) -> None:
        """Takes over the learning rate and the step from what `optimizer_args` gave."""
        if "lr" in args:
            self.param_group["lr"] = float(args["lr"])
        if "iters" in args:
            self.table.optimizer_step = int(args["iters"])
        self.sync_learning_rate()

    def sync_learning_rate(self) -> None:
        """Schedulers write into the parameter group; the table follows."""
        lr = self.param_group.get("lr")
        if lr is not None and lr != self.table.learning_rate:
            self.table.learning_rate = float(lr)


class HoldsDynamicTables:
    """Base of the sharded collections: what `find_collections` looks for."""

    dynamic_tables: dict[str, DynamicTable]


_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def engine_options(
    name: str, dim: int, planned: DynamicEmbTableOptions, fused_params: Mapping[str, Any], seed: int
) -> embstore.TableOptions:
    """The engine's options of a table whose capacity and bounds are settled."""
    whole = embstore.TableOptions(
        name=name,
        dim=dim,
        dtype=_DTYPES[planned.embedding_dtype or torch.float32],
        optimizer=engine_optimizer(fused_params, name),
        initializer=planned.initializer_args.to_engine(),
        init_capacity=planned.init_capacity,
        max_capacity=planned.max_capacity,
        bucket_capacity=planned.bucket_capacity,
        max_load_factor=planned.max_load_factor,
        score_strategy=planned.engine_strategy,
        seed=seed,
        check_mode=embstore.CheckMode(int(planned.safe_check_mode)),
        admission_threshold=planned.admit_strategy.threshold if planned.admit_strategy else 0,
    )
    return _within_budget(whole, planned)


def make_table(
    engine: embstore.TableOptions,
    planned: DynamicEmbTableOptions,
    *,
    world: int = 1,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> DynamicTable:
    """The part of this rank, empty, over the store that the options ask for."""
    make_store = planned.external_storage
    return DynamicTable(
        name=engine.name,
        table=embstore.Table(engine, store=None if make_store is None else make_store(engine, rank)),
        options=planned,
        ownership=planned.ownership,
        world=world,
        rank=rank,
        process_group=group,
    )


def _within_budget(options: embstore.TableOptions, planned: DynamicEmbTableOptions) -> embstore.TableOptions:
    """With `caching`, memory holds the rows that fit `local_hbm_for_values`; the others are in the store."""
    if not (planned.caching and planned.external_storage and planned.local_hbm_for_values):
        return options
    rows = planned.local_hbm_for_values // row_bytes(options.dim, options.optimizer, options.dtype)
    bucket = options.bucket_capacity
    capacity = min(options.max_capacity, max(rows // bucket, 1) * bucket)
    return replace(options, max_capacity=capacity, init_capacity=min(options.init_capacity, capacity))


def build_tables(
    infos: Sequence[EmbeddingShardingInfo], env: ShardingEnv, ranks: Ranks
) -> dict[str, DynamicTable]:
    """The tables of a plan on this rank. All ranks raise when they disagree about a table, or when one cannot
    make its part.

    The seed of the initial values is that of torch on rank 0.
    """

    def plan() -> dict[str, tuple[embstore.TableOptions, DynamicEmbTableOptions]]:
        tables = {}
        for info in infos:
            sharding = info.param_sharding
            assert isinstance(sharding, DynamicEmbParameterSharding) and sharding.dynamicemb_options
            name, planned = info.embedding_config.name, sharding.dynamicemb_options
            dim = info.embedding_config.embedding_dim
            tables[name] = (engine_options(name, dim, planned, info.fused_params or {}, seed), planned)
        return tables

    made: dict[str, DynamicTable] = {}

    def make() -> None:
        for name, (engine, planned) in tables.items():
            made[name] = make_table(
                engine, planned, world=env.world_size, rank=env.rank, group=env.process_group
            )

    call = "sharding a model with dynamic tables"
    seed = ranks.gather(torch.initial_seed(), call)[0]
    tables = ranks.together(plan, call)
    description = {name: f"{engine}, {describe(planned)}" for name, (engine, planned) in tables.items()}
    ranks.require_same("tables", description)
    try:
        ranks.together(make, call)
    except BaseException:
        for table in made.values():
            store = table.table.store
            table.table.close()
            if hasattr(store, "close"):
                store.close()
        raise
    return made
