"""sok.DynamicVariable: rows for any 64-bit keys, in a table of the engine.

table = sok.DynamicVariable(dimension=16, initializer="normal")
tf.nn.embedding_lookup(table, [7, -1])      # inserts missing rows
table.size                                  # [2, 16]
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

import embstore
from embstore.options import DEFAULT_MAX_CAPACITY
from sparse_operation_kit import bridge
from sparse_operation_kit.bridge import unconverted
from sparse_operation_kit.communication import tool_or_single
from sparse_operation_kit.initializers import as_initializer
from sparse_operation_kit.kept import EVICT_STRATEGIES, OPTIONS, copy_kept, largest_scores
from sparse_operation_kit.keras_steps import require_trained
from sparse_operation_kit.keys import as_keys
from sparse_operation_kit.rows import read_rows
from sparse_operation_kit.states import continues
from sparse_operation_kit.static import parse_mode

VAR_TYPES = ("hybrid", "hbm")
DEFAULT_CAPACITY = 64 << 20
SMALLEST_BUCKET = 16
SIZES = ("init_capacity", "max_capacity", "max_bucket_size")

# The options of a hybrid variable and their defaults. Those that place vectors on a GPU have no effect.
CONFIG: dict[str, Any] = {
    "init_capacity": DEFAULT_CAPACITY,
    "max_capacity": DEFAULT_CAPACITY,
    "max_hbm_for_vectors": 16,
    "max_load_factor": 0.5,
    "max_bucket_size": 128,
    "block_size": 1024,
    "device_id": -1,
    "io_by_cpu": False,
    "evict_strategy": "kLru",
    "filter_ratio": 1.0,
}

_numbers = itertools.count()


def _as_capacity(name: str, value: Any) -> int:
    """The number of rows as a power of two of at least a bucket."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} should be a positive integer but is: {value!r}")
    return max(SMALLEST_BUCKET, 1 << (int(value) - 1).bit_length())


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise ValueError(f"{name} should be a number between {low:g} and {high:g} but is: {value!r}")


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a hybrid variable, checked, with its capacities as powers of two."""
    for name in config:
        if name not in CONFIG:
            known = ", ".join((*CONFIG, *OPTIONS))
            raise ValueError(f"{name} should not be given: a hybrid variable takes {known}")
    full = {**CONFIG, **config}
    for name in SIZES:
        full[name] = _as_capacity(name, full[name])
    full["init_capacity"] = min(full["init_capacity"], full["max_capacity"])
    changed = [
        f"{name} {config[name]} to {full[name]}"
        for name in config
        if name in SIZES and config[name] != full[name]
    ]
    if changed:
        warnings.warn(
            "capacities are powers of two and init_capacity is at most max_capacity: "
            f"changed {', '.join(changed)}",
            UserWarning,
            stacklevel=5,  # TensorFlow's metaclass is in between
        )
    _check_range("max_load_factor", full["max_load_factor"], 0.01, 1.0)
    _check_range("filter_ratio", full["filter_ratio"], 0.0, 1.0)
    _check_range("max_hbm_for_vectors", full["max_hbm_for_vectors"], 0, 1 << 40)
    if full["evict_strategy"] not in EVICT_STRATEGIES:
        raise ValueError(
            f"evict_strategy should be one of {', '.join(map(repr, EVICT_STRATEGIES))} "
            f"but is: {full['evict_strategy']!r}"
        )
    return full


def _capacity_options(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The engine's options for a configuration of which these entries were given."""
    options = {
        "max_capacity": config["max_capacity"],
        "bucket_capacity": min(config["max_bucket_size"], config["max_capacity"]),
    }
    # A default is no request: the table starts small and grows with its keys.
    if "init_capacity" in given:
        options["init_capacity"] = max(config["init_capacity"], options["bucket_capacity"])
    if "max_load_factor" in given:
        options["max_load_factor"] = float(config["max_load_factor"])
    return options


def _unsupported(name: str) -> Any:
    def raise_unsupported(self: DynamicVariable, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not supported by a DynamicVariable: its rows are found by key. "
            "Use sok.export, sok.assign, sok.dump and sok.load"
        )

    raise_unsupported.__name__ = name
    return raise_unsupported


class DynamicVariable(ResourceVariable):
    """Rows for any keys, inserted when a key is first looked up.

    A hybrid variable also takes, by name: init_capacity and max_capacity (rows of a rank, rounded up to
    powers of two), max_load_factor, max_bucket_size, evict_strategy ("kLru" or "kLfu") and filter_ratio.
    max_hbm_for_vectors, block_size, device_id and io_by_cpu have no effect.

    By name as well, and not in the original package: evict_strategy "kStep" (as "kLru", by the number of the
    lookup) and "kImportance" (norms of gradients); with "kLfu" and "kImportance" half_life and
    admission="frequency"; for keys without a row of their own shared_rows and start_from_shared; ttl, after
    which an unused row is removed (seconds, or lookups with "kStep"; "hbm" takes it too); and in place of
    max_capacity max_bytes, the memory of a rank. `embstore.TableOptions` describes them.

    Args:
        dimension: components of a row, any positive integer.
        initializer: "normal", "uniform", "random", "ones", "zeros", "", a number as text, or a Keras
            initializer.
        var_type: "hybrid" (the default) evicts the least recently used rows beyond max_capacity, "hbm" grows
            without bound.
        name: of the table in dumps.
        constraint: None.
        trainable: whether gradient tapes watch it.
        key_type: tf.int64, or for "hbm" also tf.int32.
        dtype: tf.float32.
        mode: None: key % n is the rank of a key; "localized:<rank>": all are on that rank.

    Raises:
        ValueError: an option is out of range or unknown; the message names it.
        NotImplementedError: a dtype, a key_type or a constraint that is not supported.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, initializer="ones", max_capacity=1024)
        >>> sok.lookup_sparse(table, tf.ragged.constant([[7, -1]]), combiners="mean").numpy().tolist()
        [[1.0, 1.0]]
        >>> table.size.numpy().tolist()
        [2, 2]
        >>> bounded = sok.DynamicVariable(
        ...     dimension=16,
        ...     evict_strategy="kLfu",
        ...     admission="frequency",
        ...     shared_rows=1,
        ...     max_bytes=64 << 20,
        ... )
        >>> forgetful = sok.DynamicVariable(dimension=16, ttl=7 * 24 * 3600)
    """

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(dimension, bool) or not isinstance(dimension, (int, np.integer)) or dimension < 1:
            raise ValueError(f"dimension should be a positive integer but is: {dimension!r}")
        if var_type is not None and var_type not in VAR_TYPES:
            raise ValueError(f"var_type should be 'hybrid' or 'hbm' but is: {var_type!r}")
        if constraint is not None:
            raise NotImplementedError("constraint is not supported by a DynamicVariable")
        self._backend_type = var_type or "hybrid"
        self._key_type = tf.as_dtype(key_type or tf.int64)
        if self._key_type not in (tf.int32, tf.int64):
            raise NotImplementedError(f"key_type should be tf.int32 or tf.int64 but is: {self._key_type}")
        if self._backend_type == "hybrid" and self._key_type != tf.int64:
            raise NotImplementedError(
                f"key_type of a hybrid variable should be tf.int64 but is: {self._key_type}"
            )
        if tf.as_dtype(dtype or tf.float32) != tf.float32:
            raise NotImplementedError(f"dtype should be tf.float32 but is: {dtype!r}")
        if self._backend_type == "hbm":
            unknown = sorted(set(kwargs) - {*CONFIG, "ttl"})
            if unknown:
                raise ValueError(f"{unknown[0]} should not be given: an hbm variable has no such option")
            self._config_dict, options = dict(kwargs), {"ttl": kwargs.get("ttl")}
        else:
            extras = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            self._config_dict = {**_with_defaults(kwargs), **extras}
            options = {**_capacity_options(self._config_dict, kwargs), **extras}
            if extras.get("max_bytes") is not None and "max_capacity" not in kwargs:
                del self._config_dict["max_capacity"], options["max_capacity"]
        self._max_bytes = options.get("max_bytes")
        engine_initializer, seed, self._initializer_str = as_initializer(initializer)
        self._dimension = int(dimension)
        self._mode = mode
        self._target = parse_mode(mode)
        name = name or f"sok_dynamic_Variable_{next(_numbers)}"
        super().__init__(
            initial_value=tf.zeros([0, dimension]),
            trainable=trainable,
            name=name,
            shape=tf.TensorShape([None, dimension]),
        )
        self._table = embstore.Table(
            self.name,
            dim=self._dimension,
            initializer=engine_initializer,
            seed=seed,
            score_strategy=EVICT_STRATEGIES[self._config_dict.get("evict_strategy", "kLru")],
            **options,
        )
        self._admission = np.random.default_rng(0)

    # ---- what it is

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([None, self._dimension])

    @property
    def size(self) -> tf.Tensor:
        """Rows on this rank, and components of a row."""
        (size,) = bridge.call(
            lambda: (np.array([len(self._table), self._dimension], np.int32),), (), (tf.int32,)
        )
        size.set_shape([2])
        return size

    @property
    def dimension(self) -> int:
        return self._dimension

    @property
    def key_type(self) -> tf.DType:
        return self._key_type

    @property
    def handle_dtype(self) -> tf.DType:
        return tf.float32

    @property
    def backend_type(self) -> str:
        return self._backend_type

    @property
    def config_dict(self) -> dict[str, Any]:
        return dict(self._config_dict)

    @property
    def mode(self) -> str | None:
        return self._mode

    @property
    def target_gpu(self) -> int:
        return self._target

    @property
    def num_gpus(self) -> int:
        return tool_or_single().size

    @property
    def initializer_str(self) -> str:
        return self._initializer_str

    @property
    def table(self) -> embstore.Table:
        """The engine's table with the rows of this rank."""
        return self._table

    @property
    def indices(self) -> tf.Tensor:
        """The keys on this rank."""

        def read() -> list[np.ndarray]:
            blocks = self._table.export(with_values=False, with_states=False)
            keys = np.sort(np.concatenate([block.keys for block in blocks]))
            return [keys.astype(self._key_type.as_numpy_dtype)]

        (keys,) = bridge.call(read, (), (self._key_type,))
        keys.set_shape([None])
        return keys

    def is_static(self) -> bool:
        """False: rows are found by key."""
        return False

    def key_map(self, indices: Any) -> tf.Tensor:
        """Keys are the same on every rank."""
        return as_keys(indices, "indices")

    def __repr__(self) -> str:
        return f"<sok.DynamicVariable '{self.name}' shape=(None, {self._dimension}) dtype=float32>"

    __str__ = __repr__

    # ---- rows

    @unconverted
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """The rows of the keys on this rank; missing keys are inserted."""
        require_trained(self)
        return read_rows([self], [as_keys(indices, "indices")])[0]

    def scatter_update(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Sets rows; of duplicate keys the last counts."""
        return self._scatter(sparse_delta, lambda old, new: new)

    def scatter_add(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: Any = None) -> Any:
        """Adds to rows; duplicate keys add up."""
        return self._scatter(sparse_delta, np.add)

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: Any = None) -> Any:
        """Subtracts from rows; duplicate keys add up."""
        return self._scatter(sparse_delta, np.subtract)

    @unconverted
    def _scatter(self, delta: tf.IndexedSlices, combine: Any) -> tf.Tensor:
        if not isinstance(delta, tf.IndexedSlices):
            raise TypeError(f"sparse_delta should be tf.IndexedSlices but is: {type(delta).__name__}")

        def write(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray]:
            if combine in (np.add, np.subtract):
                keys, inverse = np.unique(keys, return_inverse=True)
                sums = np.zeros((len(keys), self._dimension), np.float32)
                np.add.at(sums, inverse, values)
                values = combine(self._table.find_or_insert(keys), sums)
            self._table.insert_or_assign(keys, values)
            return (np.int64(len(keys)),)

        return bridge.call(write, (as_keys(delta.indices, "indices"), delta.values), (tf.int64,))[0]

    def use_optimizer(
        self, optimizer: embstore.Optimizer, slots: Sequence[str], *, fresh: bool = False
    ) -> None:
        """Gives the rows the state of this optimizer; unless `fresh`, they keep theirs where it fits."""
        now = self._table.options.optimizer
        if not fresh and continues(self.name, now, optimizer, self._table.state_width):
            return
        options = self._table.options
        if self._max_bytes is None:
            options = replace(options, optimizer=optimizer)
        else:  # states take rows away
            options = replace(
                options, optimizer=optimizer, max_capacity=DEFAULT_MAX_CAPACITY, max_bytes=self._max_bytes
            )
        table = embstore.Table(options)
        if len(self._table):
            table.reserve(min(len(self._table), table.stats().max_capacity))
        kept = largest_scores(self._table, table.stats().max_capacity)
        for rows in self._table.export():
            mine = np.isin(rows.keys, kept) if kept is not None else slice(None)
            table.insert_or_assign(rows.keys[mine], rows.values[mine], scores=rows.scores[mine])
        copy_kept(self._table, table)
        self._table.close()
        self._table = table

    value = _unsupported("value")
    read_value = _unsupported("read_value")
    read_value_no_copy = _unsupported("read_value_no_copy")
    numpy = _unsupported("numpy")
    assign = _unsupported("assign")
    assign_add = _unsupported("assign_add")
    assign_sub = _unsupported("assign_sub")
    gather_nd = _unsupported("gather_nd")
    to_proto = _unsupported("to_proto")
    to_static = _unsupported("to_static")
    to_dynamic = _unsupported("to_dynamic")
    count_up_to = _unsupported("count_up_to")
    batch_scatter_update = _unsupported("batch_scatter_update")
    scatter_max = _unsupported("scatter_max")
    scatter_min = _unsupported("scatter_min")
    scatter_mul = _unsupported("scatter_mul")
    scatter_div = _unsupported("scatter_div")
    scatter_nd_add = _unsupported("scatter_nd_add")
    scatter_nd_sub = _unsupported("scatter_nd_sub")
    scatter_nd_update = _unsupported("scatter_nd_update")
    _dense_var_to_tensor = _unsupported("conversion to a tensor")
    _gather_saveables_for_checkpoint = _unsupported("tf.train.Checkpoint")
    _serialize_to_tensors = _unsupported("tf.train.Checkpoint")
    __deepcopy__ = _unsupported("deepcopy")
