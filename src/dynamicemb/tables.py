"""A dynamic table on one rank, and the base of the modules that hold such tables."""

from __future__ import annotations

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
from dynamicemb.external_storage import StorageStore, is_storage, stores_of
from dynamicemb.gate import Gate, filter_threshold
from dynamicemb.optimizers import engine_optimizer, optimizer_args
from dynamicemb.options import OWNERSHIPS, DynamicEmbTableOptions
from dynamicemb.planner.rw_sharding import DynamicEmbParameterSharding, check_owner, describe
from embstore.display import as_html
from embstore.distributed.ranks import Ranks
from embstore.nn.batch import Request
from embstore.ownership import AnyOwnership, OnRank
from embstore.stores import Store, row_bytes

SHARDING = "sharding a model with dynamic tables"  # in errors


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
    gate           who gets a row, where the engine's own filter does not do it
    """

    name: str
    table: embstore.Table
    options: DynamicEmbTableOptions
    ownership: AnyOwnership
    world: int
    rank: int
    process_group: dist.ProcessGroup | None
    param_group: dict[str, Any] = field(default_factory=dict)
    gate: Gate | None = None

    @property
    def storage(self) -> StorageStore | None:
        """The user's Storage below it, if there is one."""
        store = self.table.store
        return store if isinstance(store, StorageStore) else None

    def request(self, keys: torch.Tensor, **keywords: Any) -> Request:
        """A request of a batch for these keys."""
        missing = self.options.eval_initializer_args.value
        return Request(self.table, keys, gate=self.gate, missing=missing, **keywords)

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
    name: str,
    dim: int,
    planned: DynamicEmbTableOptions,
    fused_params: Mapping[str, Any],
    seed: int,
    *,
    ranks: int = 1,
) -> embstore.TableOptions:
    """The engine's options of a table whose capacity and bounds are settled. `ranks` share its max_bytes."""
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
        admission_threshold=filter_threshold(planned) or 0,
        **planned.retention,
    )
    return _within_bytes(_within_budget(whole, planned), planned, ranks)


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


def make_table(
    engine: embstore.TableOptions,
    planned: DynamicEmbTableOptions,
    *,
    store: Store | None = None,
    number: int = 0,
    num_embeddings: int = 1,
    world: int = 1,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    owner: int | None = None,
) -> DynamicTable:
    """The part of this rank, empty, over its store. `number` is that of the table in its module, `owner` the
    rank that has all of it; None: the options decide."""
    shared_by = OWNERSHIPS.get(planned.dist_type, embstore.Ownership.ROUNDROBIN)
    if owner not in (None, rank):  # it stays empty here
        engine = replace(engine, init_capacity=engine.bucket_capacity)
    table = embstore.Table(engine, store=store, shared_by=shared_by)
    if isinstance(store, StorageStore):
        store.through = not planned.caching
    table.score_words = planned.score_words
    return DynamicTable(
        name=engine.name,
        table=table,
        options=planned,
        ownership=planned.ownership(num_embeddings) if owner is None else OnRank(owner),
        world=world,
        rank=rank,
        process_group=group,
        gate=Gate(planned, table, number) if filter_threshold(planned) is None else None,
    )


def _within_budget(options: embstore.TableOptions, planned: DynamicEmbTableOptions) -> embstore.TableOptions:
    """With `caching`, memory holds the rows that fit `local_hbm_for_values`; the others are in the store. A
    Storage that is the table itself leaves a bucket in memory."""
    storage = is_storage(planned)
    cached = planned.caching and planned.external_storage and (planned.local_hbm_for_values or storage)
    if not cached and not (storage and not planned.caching):
        return options
    budget = int(planned.local_hbm_for_values) if planned.caching else 0
    rows = budget // row_bytes(options.dim, options.optimizer, options.dtype)
    bucket = options.bucket_capacity
    capacity = min(options.max_capacity, max(rows // bucket, 1) * bucket)
    return replace(options, max_capacity=capacity, init_capacity=min(options.init_capacity, capacity))


def _within_bytes(
    options: embstore.TableOptions, planned: DynamicEmbTableOptions, ranks: int
) -> embstore.TableOptions:
    if planned.max_bytes is None:
        return options
    least = ranks * options.full_bytes(options.bucket_capacity)
    if planned.max_bytes < least:
        raise ValueError(
            f"max_bytes of table {options.name!r} should be at least {least}, for a bucket of "
            f"{options.bucket_capacity} rows on each of {ranks} ranks, but is: {planned.max_bytes}"
        )
    capacity = min(options.max_capacity, options.rows_within(planned.max_bytes // ranks))
    return replace(options, max_capacity=capacity, init_capacity=min(options.init_capacity, capacity))


def rows_of(info: EmbeddingShardingInfo) -> int:
    """The rows that the user asked for, before any rounding."""
    sharding = info.param_sharding
    assert isinstance(sharding, DynamicEmbParameterSharding)
    return sharding.num_embeddings or int(info.embedding_config.num_embeddings)


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
            if sharding.owner is not None:
                check_owner(sharding.owner, env.world_size, planned, config.name)
            sharing = env.world_size if sharding.owner is None else 1
            engine = engine_options(
                config.name, config.embedding_dim, planned, fused_params, seed, ranks=sharing
            )
            tables[config.name] = (engine, planned)
        return tables

    made: dict[str, DynamicTable] = {}

    def make() -> None:
        stores = stores_of(list(tables.values()), env.rank)
        for number, (name, (engine, planned)) in enumerate(tables.items()):
            made[name] = make_table(
                engine,
                planned,
                store=stores[number],
                number=number,
                num_embeddings=rows_of(infos[number]),
                world=env.world_size,
                rank=env.rank,
                group=env.process_group,
                owner=owners[number],
            )

    seed = ranks.gather(torch.initial_seed(), SHARDING)[0]
    tables = ranks.together(plan, SHARDING)
    owners = [info.param_sharding.owner for info in infos]  # type: ignore[attr-defined]
    description = {
        name: f"{engine}, {describe(planned)}" + ("" if owner is None else f", on rank {owner}")
        for (name, (engine, planned)), owner in zip(tables.items(), owners, strict=True)
    }
    ranks.require_same("tables", description)
    try:
        ranks.together(make, SHARDING)
    except BaseException:
        for table in made.values():
            store = table.table.store
            table.table.close()
            if hasattr(store, "close"):
                store.close()
        raise
    return made
