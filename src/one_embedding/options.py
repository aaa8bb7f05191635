"""Options as plain dicts, in the shape that OneEmbedding gives them, and what they mean to embstore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embstore import Constant, Initializer, Normal, ScoreStrategy, TruncatedNormal, Uniform
from embstore.options import as_age

Options = dict[str, Any]


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> Options:
    """Initial values uniform in [low, high).

    Args:
        low: lower bound.
        high: upper bound. Bounds that are no finite numbers raise ValueError when an embedding is made.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_uniform_initializer(low=-0.1, high=0.1)
        {'type': 'uniform', 'low': -0.1, 'high': 0.1}
    """
    return {"type": "uniform", "low": low, "high": high}


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> Options:
    """Normal initial values.

    Args:
        mean: of every component.
        std: standard deviation. A negative one raises ValueError when an embedding is made.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_normal_initializer(std=0.05)
        {'type': 'normal', 'mean': 0.0, 'std': 0.05}
    """
    return {"type": "normal", "mean": mean, "std": std}


def make_constant_initializer(value: float) -> Options:
    """Every component begins with one value.

    Args:
        value: a number; any other raises ValueError when an embedding is made.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_constant_initializer(0.5)
        {'type': 'constant', 'value': 0.5}
    """
    return {"type": "constant", "value": value}


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Options:
    """Normal initial values, drawn again until they are inside of absolute bounds.

    Args:
        mean: of the normal distribution.
        std: its standard deviation.
        a: lower bound.
        b: upper bound. Bounds that exclude nearly everything raise ValueError when an embedding is made.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_trunc_normal_initializer(std=0.05, a=-0.1, b=0.1)
        {'type': 'trunc_normal', 'mean': 0.0, 'std': 0.05, 'a': -0.1, 'b': 0.1}
    """
    return {"type": "trunc_normal", "mean": mean, "std": std, "a": a, "b": b}


def make_column_options(initializer: Options) -> Options:
    """A column of a table of `MultiTableMultiColumnEmbedding`.

    Args:
        initializer: from one of the make_*_initializer.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_column_options(one_embedding.make_constant_initializer(0.5))
        {'initializer': {'type': 'constant', 'value': 0.5}}
    """
    return {"initializer": initializer}


def make_table_options(param: Options | Sequence[Options]) -> Options:
    """A table, from its initializer or from the options of its columns. `make_table` is the same.

    Args:
        param: from one of the make_*_initializer, or a list of make_column_options.

    Raises:
        ValueError: it is neither of them.

    Examples:
        >>> import one_embedding
        >>> one_embedding.make_table_options(one_embedding.make_uniform_initializer(-0.1, 0.1))
        {'initializer': {'type': 'uniform', 'low': -0.1, 'high': 0.1}}
    """
    if isinstance(param, dict):
        return {"initializer": param}
    if isinstance(param, (list, tuple)):
        return {"columns": param}
    raise ValueError("param must be initializer or columns")


make_table = make_table_options


def _integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} should be an integer of at least {least} but is: {value!r}")
    return value


def _store_options(
    caches: list[Options],
    persistent_path: str | Sequence[str],
    capacity: int | None,
    size_factor: int,
    storage_dim: int,
    physical_block_size: int,
    ttl: float | None,
) -> Options:
    if ttl is not None:
        as_age(ttl, ScoreStrategy.TIMESTAMP, "ttl")
    if not persistent_path or not isinstance(persistent_path, (str, list, tuple)):
        raise ValueError(
            f"persistent_path should be a directory, or one for each rank, but is: {persistent_path!r}"
        )
    if physical_block_size not in (512, 4096):
        raise ValueError(f"physical_block_size should be 512 or 4096 but is: {physical_block_size!r}")
    _integer("size_factor", size_factor, 1)
    if storage_dim != -1:
        _integer("storage_dim", storage_dim, 1)
    table: Options = {"path": persistent_path, "physical_block_size": physical_block_size}
    if capacity is not None:
        table["capacity_hint"] = _integer("capacity", capacity, 1)
    return {
        "kv_store": {"caches": caches, "persistent_table": table},
        "size_factor": size_factor,
        "storage_dim": storage_dim,
        **({} if ttl is None else {"ttl": ttl}),  # else the dict of the original
    }


def make_device_mem_store_options(
    persistent_path: str | Sequence[str],
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    *,
    ttl: float | None = None,
) -> Options:
    """All rows in memory; files hold snapshots only.

    Args:
        persistent_path: the directory of snapshots, or one for each rank.
        capacity: rows of all ranks at most; a batch that needs more raises.
        size_factor: floats of a row over embedding_dim: 1 for SGD, 2 with momentum and for Adagrad, 3 for
            Adam and Ftrl.
        storage_dim: floats of a row, instead of size_factor. -1: not given.
        physical_block_size: of the files, 512 or 4096 bytes.
        ttl: not in the original: seconds after which a row that training has not used is removed. None:
            never.

    Raises:
        ValueError: a number is out of range, or persistent_path is empty.

    Examples:
        >>> import one_embedding
        >>> options = one_embedding.make_device_mem_store_options("/data/ads", capacity=1000, size_factor=3)
        >>> options["size_factor"]
        3
    """
    _integer("capacity", capacity, 1)
    caches = [{"policy": "full", "value_memory_kind": "device", "capacity": capacity}]
    return _store_options(
        caches, persistent_path, capacity, size_factor, storage_dim, physical_block_size, ttl
    )


def make_cached_ssd_store_options(
    cache_budget_mb: int,
    persistent_path: str | Sequence[str],
    capacity: int | None = None,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    host_cache_budget_mb: int = 0,
    *,
    ttl: float | None = None,
) -> Options:
    """Rows in files, with the recently used ones in memory.

    Args:
        cache_budget_mb: MiB of the cache.
        persistent_path: the directory of the files, or one for each rank.
        capacity: the expected number of rows, a hint: the store grows beyond it.
        size_factor: floats of a row over embedding_dim: 1 for SGD, 2 with momentum and for Adagrad, 3 for
            Adam and Ftrl.
        storage_dim: floats of a row, instead of size_factor. -1: not given.
        physical_block_size: of the files, 512 or 4096 bytes.
        host_cache_budget_mb: more MiB; both are host memory here and count together.
        ttl: not in the original: seconds after which a row that training has not used is removed. The files
            are searched eight times in that period. None: never.

    Raises:
        ValueError: a number is out of range, both budgets are 0, or persistent_path is empty.

    Examples:
        >>> import one_embedding
        >>> options = one_embedding.make_cached_ssd_store_options(64, "/data/ads")
        >>> options["kv_store"]["persistent_table"]["path"]
        '/data/ads'
        >>> forgetful = one_embedding.make_cached_ssd_store_options(64, "/data/ads", ttl=7 * 24 * 3600)
    """
    _integer("cache_budget_mb", cache_budget_mb, 0)
    _integer("host_cache_budget_mb", host_cache_budget_mb, 0)
    if cache_budget_mb + host_cache_budget_mb == 0:
        raise ValueError("cache_budget_mb or host_cache_budget_mb should be above 0 but both are 0")
    caches = [
        {"policy": "lru", "cache_memory_budget_mb": budget, "value_memory_kind": kind}
        for budget, kind in ((cache_budget_mb, "device"), (host_cache_budget_mb, "host"))
        if budget
    ]
    return _store_options(
        caches, persistent_path, capacity, size_factor, storage_dim, physical_block_size, ttl
    )


def make_cached_host_mem_store_options(
    cache_budget_mb: int,
    persistent_path: str | Sequence[str],
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    *,
    ttl: float | None = None,
) -> Options:
    """Rows in host memory below a device cache. On a CPU both are memory: as `make_device_mem_store_options`.

    Args:
        cache_budget_mb: MiB of the device cache; checked, no effect on a CPU.
        persistent_path: the directory of snapshots, or one for each rank.
        capacity: rows of all ranks at most; a batch that needs more raises.
        size_factor: floats of a row over embedding_dim: 1 for SGD, 2 with momentum and for Adagrad, 3 for
            Adam and Ftrl.
        storage_dim: floats of a row, instead of size_factor. -1: not given.
        physical_block_size: of the files, 512 or 4096 bytes.
        ttl: not in the original: seconds after which a row that training has not used is removed. None:
            never.

    Raises:
        ValueError: a number is out of range, or persistent_path is empty.

    Examples:
        >>> import one_embedding
        >>> options = one_embedding.make_cached_host_mem_store_options(64, "/data/ads", capacity=1000)
        >>> [cache["policy"] for cache in options["kv_store"]["caches"]]
        ['lru', 'full']
    """
    _integer("cache_budget_mb", cache_budget_mb, 1)
    _integer("capacity", capacity, 1)
    caches = [
        {"policy": "lru", "cache_memory_budget_mb": cache_budget_mb, "value_memory_kind": "device"},
        {"policy": "full", "value_memory_kind": "host", "capacity": capacity},
    ]
    return _store_options(
        caches, persistent_path, capacity, size_factor, storage_dim, physical_block_size, ttl
    )


# ---- what they mean


def initializer_from(options: object, name: str) -> Initializer:
    """The embstore initializer of a dict made by one of the functions above."""
    if not isinstance(options, dict) or "type" not in options:
        raise ValueError(f"{name} should be a dict made by a make_*_initializer but is: {options!r}")
    kind = options["type"]
    numbers = {key: value for key, value in options.items() if key != "type"}
    makers = {
        "uniform": lambda low=0.0, high=1.0: Uniform(low, high),
        "normal": lambda mean=0.0, std=1.0: Normal(mean, std),
        "constant": lambda value: Constant(value),
        "trunc_normal": lambda mean=0.0, std=1.0, a=-2.0, b=2.0: TruncatedNormal(mean, std, a, b),
    }
    if kind not in makers:
        raise ValueError(f"{name} should have a type of {sorted(makers)} but it is: {kind!r}")
    try:
        return makers[kind](**numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not right: {error}") from None


@dataclass(frozen=True)
class StoreOptions:
    """What a dict of store options says, checked."""

    path: str | tuple[str, ...]
    physical_block_size: int
    capacity: int | None
    cache_budget_bytes: int | None  # None: all rows in memory
    size_factor: int
    storage_dim: int
    ttl: float | None

    def row_floats(self, embedding_dim: int) -> int:
        return self.storage_dim if self.storage_dim != -1 else self.size_factor * embedding_dim

    @staticmethod
    def from_dict(options: object) -> StoreOptions:
        try:
            store = options["kv_store"]  # type: ignore[index]
            caches, table = store["caches"], store["persistent_table"]
            path, block = table["path"], table["physical_block_size"]
            full = [cache["capacity"] for cache in caches if cache["policy"] == "full"]
            budget = sum(cache["cache_memory_budget_mb"] for cache in caches if cache["policy"] == "lru")
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"store_options should be made by one of the make_*_store_options but is: {options!r}"
            ) from error
        assert isinstance(options, dict)
        return StoreOptions(
            path if isinstance(path, str) else tuple(path),
            block,
            full[0] if full else table.get("capacity_hint"),
            None if full else budget << 20,
            options.get("size_factor", 1),
            options.get("storage_dim", -1),
            options.get("ttl"),
        )


def columns_of(embedding_dim: int | Sequence[int]) -> tuple[int, ...]:
    """The widths of the columns of a row."""
    columns = tuple(embedding_dim) if isinstance(embedding_dim, (list, tuple)) else (embedding_dim,)
    if not columns or any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in columns):
        raise ValueError(f"embedding_dim should be positive integers but is: {embedding_dim!r}")
    return columns


def initializers_of(
    tables: Sequence[Options] | None, default: Options | None, columns: int
) -> tuple[tuple[Initializer, ...], ...]:
    """For each table the initializers of its columns."""
    if tables is None:
        chosen = make_normal_initializer(0.0, 0.05) if default is None else default
        tables = [{"initializer": chosen}]
    if not isinstance(tables, (list, tuple)) or not tables:
        raise ValueError(f"tables should be a list of make_table_options but is: {tables!r}")
    result = []
    for number, table in enumerate(tables):
        name = f"tables[{number}]"
        if isinstance(table, dict) and "columns" in table:
            given = [column.get("initializer") for column in table["columns"]]
        elif isinstance(table, dict) and "initializer" in table:
            given = [table["initializer"]] * columns
        else:
            raise ValueError(f"{name} should be made by make_table_options but is: {table!r}")
        if len(given) != columns:
            raise ValueError(f"{name} should have {columns} columns but has: {len(given)}")
        result.append(tuple(initializer_from(options, name) for options in given))
    return tuple(result)
