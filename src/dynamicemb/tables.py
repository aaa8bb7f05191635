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
from dynamicemb.agreement import gather, require_agreement
from dynamicemb.optimizers import engine_optimizer, optimizer_args
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbParameterSharding, describe
from embstore.stores import Store, row_bytes


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


def _store(sharding: DynamicEmbParameterSharding, options: embstore.TableOptions, rank: int) -> Store | None:
    make = sharding.dynamicemb_options.external_storage
    return None if make is None else make(options, rank)


def _within_budget(options: embstore.TableOptions, planned: DynamicEmbTableOptions) -> embstore.TableOptions:
    """With `caching`, memory holds the rows that fit `local_hbm_for_values`; the others are in the store."""
    if not (planned.caching and planned.external_storage and planned.local_hbm_for_values):
        return options
    rows = planned.local_hbm_for_values // row_bytes(options.dim, options.optimizer, options.dtype)
    bucket = options.bucket_capacity
    capacity = min(options.max_capacity, max(rows // bucket, 1) * bucket)
    return replace(options, max_capacity=capacity, init_capacity=min(options.init_capacity, capacity))


def build_tables(infos: Sequence[EmbeddingShardingInfo], env: ShardingEnv) -> dict[str, DynamicTable]:
    """The tables of a plan on this rank. ValueError on every rank when the ranks disagree about one.

    The seed of the initial values is that of torch on rank 0.
    """
    group = env.process_group
    seed = gather(torch.initial_seed(), group)[0]
    options: dict[str, embstore.TableOptions] = {}
    shardings: dict[str, DynamicEmbParameterSharding] = {}
    for info in infos:
        sharding = info.param_sharding
        assert isinstance(sharding, DynamicEmbParameterSharding) and sharding.dynamicemb_options
        name, planned = info.embedding_config.name, sharding.dynamicemb_options
        shardings[name] = sharding
        whole = embstore.TableOptions(
            name=name,
            dim=info.embedding_config.embedding_dim,
            dtype=_DTYPES[planned.embedding_dtype or torch.float32],
            optimizer=engine_optimizer(info.fused_params or {}, name),
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
        options[name] = _within_budget(whole, planned)
    description = {
        name: f"{o}, {describe(shardings[name].dynamicemb_options)}" for name, o in options.items()
    }
    require_agreement("tables", description, group)
    return {
        name: DynamicTable(
            name=name,
            table=embstore.Table(table_options, store=_store(shardings[name], table_options, env.rank)),
            options=shardings[name].dynamicemb_options,
            ownership=shardings[name].dynamicemb_options.ownership,
            world=env.world_size,
            rank=env.rank,
            process_group=group,
        )
        for name, table_options in options.items()
    }
