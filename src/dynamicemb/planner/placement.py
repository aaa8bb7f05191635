"""Which rank has which table, where dynamic tables are kept whole.

Row-wise, every rank sends a partial sum of every bag to every other rank. Table-wise, a bag travels once:
half as much on two ranks, less on more. Fewer tables than ranks would leave some ranks without work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from dynamicemb.planner.enumerators import is_dynamic

_ROW_WISE, _TABLE_WISE = ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value


def place_tables(
    configs: Sequence[BaseEmbeddingConfig], constraints: Mapping[str, ParameterConstraints], world: int
) -> dict[str, int]:
    """The rank of every dynamic table that is to be table-wise: the most expensive first, each to the rank
    with the least to do. Raises ValueError for sharding types that a dynamic table cannot have."""
    allowed = {
        c.name: _sharding_types(c.name, constraints) for c in configs if is_dynamic(constraints[c.name])
    }
    offered = [name for name, types in allowed.items() if _TABLE_WISE in types]
    chosen = {name for name in offered if _ROW_WISE not in allowed[name] or len(offered) >= world}
    by_cost = sorted(
        (config for config in configs if config.name in chosen),
        key=lambda config: -_cost(config, constraints[config.name]),
    )
    load = [0.0] * world
    owners = {}
    for config in by_cost:
        owner = min(range(world), key=load.__getitem__)
        load[owner] += _cost(config, constraints[config.name])
        owners[config.name] = owner
    return owners


def _sharding_types(name: str, constraints: Mapping[str, ParameterConstraints]) -> Sequence[str]:
    types = constraints[name].sharding_types or [_ROW_WISE]
    unknown = [t for t in types if t not in (_ROW_WISE, _TABLE_WISE)]
    if unknown:
        raise ValueError(
            f"sharding_types of dynamic table {name!r} should be {_ROW_WISE!r} or {_TABLE_WISE!r} "
            f"but are: {list(types)}"
        )
    return types


def _cost(config: BaseEmbeddingConfig, constraint: ParameterConstraints) -> float:
    """Components that a sample reads."""
    factors = constraint.pooling_factors or [1.0] * len(config.feature_names)
    return float(sum(factors)) * config.embedding_dim
