"""sok.Variable: a table of a fixed number of rows, spread over the ranks.

    rows of a 7-row table      0 1 2 3 4 5 6          rank 0            rank 1
    distributed (default)                             0 2 4 6           1 3 5
    mode="localized:1"                                -                 0 1 2 3 4 5 6

On each rank it is a tf.Variable of the rows that are there, so it prints, reads and saves like one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

import embstore
from sparse_operation_kit.bridge import unconverted
from sparse_operation_kit.communication import tool
from sparse_operation_kit.keras_steps import require_trained
from sparse_operation_kit.keys import as_keys
from sparse_operation_kit.states import continues, fresh_state

_numbers = itertools.count()


def parse_mode(mode: str | None) -> int:
    """The rank of "localized:<rank>", or -1 for "distributed" and None."""
    if mode is None or mode == "distributed":
        return -1
    head, _, rank = str(mode).partition(":")
    if head != "localized" or not rank.isdecimal():
        raise ValueError(f"mode should be None, 'distributed' or 'localized:<rank>' but is: {mode!r}")
    size = tool().size
    if int(rank) >= size:
        raise ValueError(f"mode should name a rank below {size} but is: {mode!r}")
    return int(rank)


def _whole_value(initial_value: Any, shape: Any, initializer: Any, dtype: Any) -> np.ndarray | tf.Tensor:
    if initial_value is None:
        if shape is None or initializer is None:
            raise ValueError("initial_value should be given, or both shape and initializer")
        if isinstance(initializer, str):
            initializer = tf.keras.initializers.get(initializer)
        initial_value = initializer(tf.TensorShape(shape).as_list(), dtype=dtype or tf.float32)
    elif callable(initial_value):
        initial_value = initial_value()
    value = tf.convert_to_tensor(initial_value)
    if value.shape.rank == 1:
        value = value[tf.newaxis, :]
    if value.shape.rank != 2:
        raise ValueError(f"initial_value should have 2 dimensions but has: {value.shape.rank}")
    if dtype is None and not value.dtype.is_floating:
        dtype = tf.float32
    return tf.cast(value, dtype or value.dtype)


class StaticVariable(ResourceVariable):
    """The part of a table of fixed size that is on this rank; use `Variable`."""

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        collections: Any = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        dtype: Any = None,
        variable_def: Any = None,
        import_scope: Any = None,
        constraint: Any = None,
        distribute_strategy: Any = None,
        synchronization: Any = None,
        aggregation: Any = None,
        shape: Any = None,
        initializer: Any = None,
        global_gpu_id: int | None = None,
        *,
        size: int | None = None,
        target: int = -1,
    ) -> None:
        rank = tool().rank if global_gpu_id is None else global_gpu_id
        size = tool().size if size is None else size
        with tf.init_scope():
            whole = _whole_value(initial_value, shape, initializer, dtype)
            if target < 0:
                part = whole[rank::size]
            else:
                part = whole if rank == target else whole[:0]
        self._global_shape = whole.shape
        self._global_gpu_id = rank
        self._num_gpus = size
        self._target = target
        self._row_optimizer: embstore.Optimizer | None = None
        self._slots: dict[str, tf.Variable] = {}
        more = {} if synchronization is None else {"synchronization": synchronization}
        if aggregation is not None:
            more["aggregation"] = aggregation
        super().__init__(
            initial_value=part,
            trainable=trainable,
            caching_device=caching_device,
            name=name or f"sok_static_Variable_{next(_numbers)}",
            dtype=whole.dtype,
            constraint=constraint,
            **more,
        )

    @property
    def global_shape(self) -> tf.TensorShape:
        """Of the whole table, over all ranks."""
        return self._global_shape

    @property
    def global_gpu_id(self) -> int:
        """The rank of this process."""
        return self._global_gpu_id

    @property
    def num_gpus(self) -> int:
        """How many ranks there are."""
        return self._num_gpus

    @property
    def target_gpu(self) -> int:
        """The rank that has the whole table, or -1 where it is distributed."""
        return self._target

    @property
    def dimension(self) -> int:
        """Components of a row."""
        return int(self._global_shape[1])

    def key_map(self, indices: Any) -> tf.Tensor:
        """Numbers of rows of the whole table as numbers of rows on the rank that has them."""
        keys = as_keys(indices, "indices")
        return keys if self._target >= 0 else keys // self._num_gpus

    @unconverted
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Rows on this rank by their numbers here."""
        require_trained(self)
        return super().sparse_read(indices, name)

    @property
    def slots(self) -> dict[str, tf.Variable]:
        """The state that `use_optimizer` made, by name."""
        return self._slots

    def use_optimizer(
        self, optimizer: embstore.Optimizer, slots: Sequence[str], *, fresh: bool = False
    ) -> None:
        """Gives the rows the state of this optimizer; unless `fresh`, they keep theirs where it fits."""
        if not fresh and continues(self.name, self._row_optimizer, optimizer, len(self._slots)):
            return
        name = self.name.partition(":")[0]
        state = np.split(fresh_state(optimizer, self.dimension), len(slots)) if slots else []
        with tf.init_scope():
            self._slots = {
                slot: tf.Variable(
                    tf.tile(tf.constant(row[np.newaxis]), [int(self.shape[0]), 1]),
                    trainable=False,
                    name=f"{name}/{slot}",
                )
                for slot, row in zip(slots, state)
            }
        self._row_optimizer = optimizer

    def local_keys(self) -> np.ndarray:
        """The numbers, in the whole table, of the rows on this rank."""
        rows = int(self.shape[0])
        if self._target >= 0:
            return np.arange(rows, dtype=np.int64)
        return np.arange(rows, dtype=np.int64) * self._num_gpus + self._global_gpu_id


class DistributedVariable(StaticVariable):
    """A table of a fixed number of rows; row i is on rank i % n. `Variable` makes one.

    Args:
        num_gpus: over how many parts the rows are spread. None: the number of ranks.

    Raises:
        ValueError: there is neither an initial value, nor shape and initializer.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DistributedVariable(tf.ones([29, 2]))
        >>> table.global_shape
        TensorShape([29, 2])
    """

    def __init__(self, *args: Any, num_gpus: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, size=num_gpus, **kwargs)


class LocalizedVariable(StaticVariable):
    """A table of a fixed number of rows, all on one rank. `Variable` makes one.

    Args:
        target_gpu: the rank.

    Raises:
        ValueError: there is neither an initial value, nor shape and initializer, or no such rank.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.LocalizedVariable(tf.ones([29, 2]), target_gpu=0)
    """

    def __init__(self, *args: Any, target_gpu: int | None = None, **kwargs: Any) -> None:
        target = parse_mode(f"localized:{target_gpu}")
        super().__init__(*args, target=target, **kwargs)


def Variable(*args: Any, mode: str | None = None, **kwargs: Any) -> StaticVariable:
    """A table of a fixed number of rows. Takes what tf.Variable takes, or shape= and initializer=.

    Args:
        mode: None or "distributed": row i is on rank i % n. "localized:<rank>": all rows are on that rank.

    Returns:
        A `DistributedVariable` or a `LocalizedVariable`.

    Raises:
        ValueError: mode is another one, or there is neither an initial value, nor shape and initializer.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.Variable(tf.ones([29, 2]), mode="localized:0")
        >>> sok.lookup_sparse(table, tf.ragged.constant([[0, 28]]), combiners="sum").numpy().tolist()
        [[2.0, 2.0]]
    """
    target = parse_mode(mode)
    if target < 0:
        return DistributedVariable(*args, **kwargs)
    return LocalizedVariable(*args, target_gpu=target, **kwargs)
