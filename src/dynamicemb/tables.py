"""A dynamic table on one rank, and the base of the modules that hold such tables."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import data_type_to_dtype

import embstore
from dynamicemb.embedding_admission import FrequencyAdmissionStrategy
from dynamicemb.enumerations import DynamicEmbInitializerArgs
from dynamicemb.optimizers import engine_optimizer, optimizer_args
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbParameterSharding, describe
from embstore.display import as_html
from embstore.distributed.ranks import Ranks
from embstore.stores import row_bytes

logger = logging.getLogger(__name__)


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

    def _repr_html_(self) -> str:
        tables = [dynamic.table for dynamic in self.dynamic_tables.values()]
        return as_html(tables, title=type(self).__name__)

    def check_trained(self) -> None:
        """Raises RuntimeError in train mode when a table cannot be trained."""
        fixed = [name for name, t in self.dynamic_tables.items() if not t.options.training]
        if fixed and self.training:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"tables of training=False should be read in eval mode but the module trains: {fixed}"
            )


def engine_options(
    name: str, dim: int, planned: DynamicEmbTableOptions, fused_params: Mapping[str, Any], seed: int
) -> embstore.TableOptions:
    """The engine's options of a table whose capacity and bounds are settled."""
    admission = planned.admit_strategy
    assert admission is None or isinstance(admission, FrequencyAdmissionStrategy)
    if admission is not None and admission.initializer_args is not None:
        _warn_of_refused_vectors(name, planned, admission.initializer_args)
    if planned.admission_counter is not None:
        logger.info("table %s: keys without a row are counted in a filter of the table's size", name)
    whole = embstore.TableOptions(
        name=name,
        dim=dim,
        dtype=planned.embedding_dtype or torch.float32,
        optimizer=engine_optimizer(fused_params, name)
        if planned.training
        else _no_optimizer(fused_params, name),
        initializer=planned.initializer_args.to_engine(),
        init_capacity=planned.init_capacity,
        max_capacity=planned.max_capacity,
        bucket_capacity=planned.bucket_capacity,
        max_load_factor=planned.max_load_factor,
        score_strategy=planned.engine_strategy,
        evict_least_used=planned.evicts_least_used,
        seed=seed,
        check_mode=embstore.CheckMode(int(planned.safe_check_mode)),
        admission_threshold=admission.threshold if admission else 0,
    )
    return _within_budget(whole, planned)


def _no_optimizer(fused_params: Mapping[str, Any], name: str) -> embstore.Optimizer:
    """SGD has no state, and a table that is not trained never makes a step."""
    wanted = fused_params.get("optimizer", EmbOptimType.NONE)
    if wanted not in (EmbOptimType.NONE, EmbOptimType.SGD, EmbOptimType.EXACT_SGD):
        warnings.warn(
            f"table {name!r} has training=False: the optimizer {wanted} is not used",
            UserWarning,
            stacklevel=3,
        )
    return embstore.SGD()


def _warn_of_refused_vectors(
    name: str, planned: DynamicEmbTableOptions, wanted: DynamicEmbInitializerArgs
) -> None:
    """As the code of the original package, though not its document, has it."""
    if wanted.to_engine() != planned.initializer_args.to_engine():
        warnings.warn(
            f"initializer_args of the admit_strategy of table {name!r} have no effect yet: keys without a "
            f"row read the table's own initial vector",
            UserWarning,
            stacklevel=3,
        )


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
    rows = int(planned.local_hbm_for_values) // row_bytes(options.dim, options.optimizer, options.dtype)
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
            config, planned = info.embedding_config, sharding.dynamicemb_options
            if not sharding.num_embeddings:  # a client's own plan
                planned = planned.completed(
                    num_embeddings=config.num_embeddings,
                    dim=config.embedding_dim,
                    rows=sharding.sharding_spec.shards[0].shard_sizes[0],
                    dtype=data_type_to_dtype(config.data_type),
                )
            fused_params = dict(info.fused_params or {})
            sharding.pop_additional_fused_params(fused_params)
            engine = engine_options(config.name, config.embedding_dim, planned, fused_params, seed)
            tables[config.name] = (engine, planned)
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
