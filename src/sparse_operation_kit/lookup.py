"""Lookups: several tables at once, from all ranks, pooled over the keys of a sample.

ids          [[1, 1], [3, 4, 5]]                      SparseTensor or RaggedTensor
combiner     "sum": row 1 + row 1, row 3 + row 4 + row 5; "mean": divided by 2 and 3 (or by the weights)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import bridge
from sparse_operation_kit.bridge import unconverted
from sparse_operation_kit.communication import sums_duplicates, tool, tool_or_single
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.exchange import check_weights, owners, rows_of_all_ranks, rows_of_both_kinds
from sparse_operation_kit.keras_steps import require_trained
from sparse_operation_kit.keys import as_keys
from sparse_operation_kit.rows import pool_rows, read_and_evict
from sparse_operation_kit.served import ServedVariable, pool_served, read_served
from sparse_operation_kit.static import StaticVariable

COMBINERS = ("sum", "mean")


@unconverted
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    training: bool = True,
) -> Any:
    """Looks up and pools the rows of one or several variables, in one pass for all.

    Args:
        params: sok variables, or one of them.
        sp_ids: for each a tf.SparseTensor or tf.RaggedTensor (samples, keys of the sample).
        sp_weights: for each the same with the weights of the keys, or None.
        combiners: for each "sum" or "mean" (the default); a sample without keys gives zeros.
        use_low_frequency_filter: admits a new key with the variable's filter_ratio only; others read zeros.
        training: False only reads: missing keys of dynamic variables read zeros and are not inserted.

    Returns:
        A list of (samples, dimension), or one where sp_ids is not a list.

    Raises:
        ValueError: arguments are of different lengths, a combiner is another one, or keys of a static
            variable are out of range; on every rank.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, initializer="ones")
        >>> sok.lookup_sparse(table, tf.ragged.constant([[7, -1], [7]]), combiners="sum").numpy().tolist()
        [[2.0, 2.0], [1.0, 1.0]]
    """
    single = not isinstance(sp_ids, (list, tuple))
    variables = list(params) if isinstance(params, (list, tuple)) else [params]
    ids = [sp_ids] if single else list(sp_ids)
    weights = _listed(sp_weights, len(ids))
    combiners = _listed("mean" if combiners is None else combiners, len(ids), repeat=True)
    for name, values in (("params", variables), ("sp_weights", weights), ("combiners", combiners)):
        if len(values) != len(ids):
            raise ValueError(
                f"{name} should have as many items as sp_ids ({len(ids)}) but has: {len(values)}"
            )
    for combiner in combiners:
        if combiner not in COMBINERS:
            raise ValueError(f"combiners should be 'sum' or 'mean' but one is: {combiner!r}")
    for variable in variables:
        _require_variable(variable)
        if training and not isinstance(variable, ServedVariable):
            require_trained(variable)
    served = [i for i, v in enumerate(variables) if isinstance(v, ServedVariable)]
    if len(served) < len(ids):
        tool()
    samples = [_Samples(i, w) for i, w in zip(ids, weights)]
    pooled: list[Any] = [None] * len(ids)
    _pool_served(served, variables, samples, combiners, pooled)
    if len(served) == len(ids):
        return pooled[0] if single else pooled
    # On one rank the engine pools plain lookups itself.
    alone = tool().size == 1 and not use_low_frequency_filter
    quick = [i for i, v in enumerate(variables) if alone and weights[i] is None and _is_dynamic(v)]
    if quick:
        found = pool_rows(
            [variables[i] for i in quick],
            [samples[i].keys for i in quick],
            [samples[i].offsets() for i in quick],
            [combiners[i] for i in quick],
            training=training,
        )
        for i, vectors in zip(quick, found):
            pooled[i] = vectors
    rest = [i for i in range(len(ids)) if i not in quick and i not in served]
    if rest:
        keys = [samples[i].keys for i in rest]
        weighted = [samples[i].samples_of_weights() for i in rest if weights[i] is not None]
        rows, places = _rows([variables[i] for i in rest], keys, training, use_low_frequency_filter, weighted)
        for i, row, place in zip(rest, rows, places):
            pooled[i] = _pool(row, place, samples[i], combiners[i])
    return pooled[0] if single else pooled


@unconverted
def all2all_dense_embedding(param: Any, indices: Any) -> tf.Tensor:
    """A row for each key, from whichever rank has it.

    Args:
        param: a sok variable.
        indices: keys of any shape.

    Returns:
        indices.shape + (dimension,).

    Raises:
        ValueError: param is no sok variable, or keys of a static variable are out of range.
        RuntimeError: `sok.init` was not called.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, initializer="ones")
        >>> sok.all2all_dense_embedding(table, tf.constant([[7, -1]], tf.int64)).shape
        TensorShape([1, 2, 2])
    """
    _require_variable(param)
    if isinstance(param, ServedVariable):
        return read_served([param], [as_keys(indices, "indices")])[0]
    tool()
    require_trained(param)
    indices = as_keys(indices, "indices")
    (rows,), (places,) = _rows([param], [tf.reshape(indices, [-1])], True, False)
    if places is not None:
        rows = tf.gather(rows, places)
    return tf.reshape(rows, tf.concat([tf.shape(indices), [param.dimension]], axis=0))


@unconverted
def sparse_read_and_evict(var: DynamicVariable, indices: Any, name: str | None = None) -> Any:
    """Rows of the keys on this rank, and the keys and rows that were evicted to make room.

    The embeddings have a gradient, as those of a lookup; what was evicted has none.

    Args:
        var: a hybrid DynamicVariable.
        indices: keys (n).
        name: of the operation; no effect.

    Returns:
        (embeddings, evicted_keys, evicted_values).

    Raises:
        TypeError: var is something else.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, initializer="ones")
        >>> rows, keys, values = sok.sparse_read_and_evict(table, tf.constant([7, 8], tf.int64))
        >>> rows.numpy().tolist(), keys.numpy().tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [])
    """
    if not isinstance(var, DynamicVariable) or var.backend_type != "hybrid":
        raise TypeError(f"var should be a hybrid DynamicVariable but is: {var!r}")
    require_trained(var)
    return read_and_evict(var, as_keys(indices, "indices"))


def _listed(value: Any, count: int, *, repeat: bool = False) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value] * count if value is None or repeat else [value]


def _require_variable(variable: Any) -> None:
    if isinstance(variable, (DynamicVariable, StaticVariable, ServedVariable)):
        return
    kind = type(variable).__name__
    if "EmbeddingVariable" in kind:
        kind += ", which needs DeepRec's fork of TensorFlow: use sok.DynamicVariable instead"
    raise ValueError(f"params should be sok variables but one is: {kind}")


def _pool_served(
    served: Sequence[int],
    variables: Sequence[Any],
    samples: Sequence[_Samples],
    combiners: Sequence[str],
    pooled: list[Any],
) -> None:
    """Fills in the requests `served`, pooled as on one rank."""
    quick = [i for i in served if samples[i].weights is None]
    if quick:
        found = pool_served(
            [variables[i] for i in quick],
            [samples[i].keys for i in quick],
            [samples[i].offsets() for i in quick],
            [combiners[i] for i in quick],
        )
        for i, vectors in zip(quick, found):
            pooled[i] = vectors
    weighted = [i for i in served if samples[i].weights is not None]
    if weighted:
        keys = _checked(
            [samples[i].keys for i in weighted], [samples[i].samples_of_weights() for i in weighted]
        )
        for i, rows in zip(weighted, read_served([variables[i] for i in weighted], keys)):
            pooled[i] = _pool(rows, None, samples[i], combiners[i])


def _is_dynamic(variable: Any) -> bool:
    return isinstance(variable, DynamicVariable)


class _Samples:
    """Keys (n), the sample of each (n), weights (n) or None, and the number of samples."""

    def __init__(self, ids: Any, weights: Any) -> None:
        self._ids, self._weights = ids, weights
        self.keys, self.count = self._parts(ids, "sp_ids")
        self.keys = as_keys(self.keys, "sp_ids")
        self.weights = None
        if weights is not None:
            values, _ = self._parts(weights, "sp_weights")
            self.weights = tf.cast(values, tf.float32)

    @functools.cached_property
    def sample_of(self) -> tf.Tensor:
        """Only where it is needed: for a RaggedTensor, TensorFlow takes dozens of operations."""
        return self._samples(self._ids)

    def samples_of_weights(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The sample of each key, and that of each weight, which should be the same."""
        return tf.cast(self.sample_of, tf.int64), tf.cast(self._samples(self._weights), tf.int64)

    @staticmethod
    def _samples(value: Any) -> tf.Tensor:
        return value.indices[:, 0] if isinstance(value, tf.SparseTensor) else value.value_rowids()

    def offsets(self) -> tf.Tensor:
        """Where the keys of each sample begin, and where those of the last end."""
        if isinstance(self._ids, tf.RaggedTensor):
            return tf.cast(self._ids.row_splits, tf.int64)
        ordered = tf.debugging.assert_non_negative(
            self.sample_of[1:] - self.sample_of[:-1], "sp_ids should be in order: call tf.sparse.reorder"
        )
        with tf.control_dependencies([] if ordered is None else [ordered]):
            return tf.searchsorted(self.sample_of, tf.range(self.count + 1), out_type=tf.int64)

    @staticmethod
    def _parts(value: Any, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        if isinstance(value, tf.SparseTensor):
            if value.dense_shape.shape[0] not in (2, None):
                raise ValueError(f"{name} should have 2 dimensions but has: {value.dense_shape.shape[0]}")
            return value.values, value.dense_shape[0]
        if isinstance(value, tf.RaggedTensor):
            if value.ragged_rank != 1 or value.shape.rank != 2:
                raise ValueError(f"{name} should have 2 dimensions but has: {value.shape.rank}")
            return value.values, value.nrows()
        raise ValueError(
            f"{name} should be a tf.SparseTensor or tf.RaggedTensor but is: {type(value).__name__}"
        )


def _rows(
    variables: Sequence[Any],
    keys: Sequence[tf.Tensor],
    training: bool,
    low_frequency_filter: bool,
    weighted: Sequence[tuple[tf.Tensor, tf.Tensor]] = (),
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Rows for each request, and where in them its keys are (None: in their order).

    weighted   pairs of `_Samples.samples_of_weights`, refused before a row is made where they differ
    """
    merged = list({id(v): v for v in variables}.values())
    requests = [[i for i, v in enumerate(variables) if v is variable] for variable in merged]
    joined = [keys[r[0]] if len(r) == 1 else tf.concat([keys[i] for i in r], axis=0) for r in requests]
    places: list[tf.Tensor | None] = [None] * len(variables)
    whole: list[tf.Tensor | None]
    if tool_or_single().size == 1:
        if weighted:
            joined = _checked(joined, weighted)
        found, whole = _local_rows(merged, joined, training, low_frequency_filter), [None] * len(merged)
    else:
        whole = [None] * len(merged)
        if sums_duplicates():
            joined, whole = zip(*(tf.unique(k, tf.int64) for k in joined))
        found = rows_of_all_ranks(
            merged, joined, weighted, training=training, low_frequency_filter=low_frequency_filter
        )
    rows: list[Any] = [None] * len(variables)
    for request, row, place in zip(requests, found, whole):
        begin: Any = 0
        for i in request:
            rows[i], places[i] = row, place
            if len(request) > 1:
                n = tf.size(keys[i], out_type=tf.int64)
                span = tf.range(begin, begin + n)
                places[i] = span if place is None else tf.gather(place, span)
                begin += n
    return rows, places


def _checked(keys: Sequence[tf.Tensor], weighted: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    def check(*arrays: np.ndarray) -> list[np.ndarray]:
        check_weights(arrays[len(keys) :])
        return list(arrays[: len(keys)])

    flat = [samples for pair in weighted for samples in pair]
    checked = bridge.call(check, [*keys, *flat], [tf.int64] * len(keys))
    for out, k in zip(checked, keys):
        out.set_shape(k.shape)
    return checked


def _local_rows(
    variables: Sequence[Any], keys: Sequence[tf.Tensor], training: bool, low_frequency_filter: bool
) -> list[tf.Tensor]:
    def gather(variable: StaticVariable, keys: tf.Tensor) -> tf.Tensor:
        (checked,) = bridge.call(lambda k: [_inside(variable, k)], [keys], [tf.int64])
        checked.set_shape(keys.shape)
        return tf.gather(variable, checked)

    return rows_of_both_kinds(
        variables, keys, gather, training=training, low_frequency_filter=low_frequency_filter
    )


def _inside(variable: StaticVariable, keys: np.ndarray) -> np.ndarray:
    owners(variable, keys, 1)  # raises
    return keys


def _pool(rows: tf.Tensor, places: tf.Tensor | None, samples: _Samples, combiner: str) -> tf.Tensor:
    if samples.weights is None:
        pool = (
            tf.raw_ops.SparseSegmentSumWithNumSegments
            if combiner == "sum"
            else tf.raw_ops.SparseSegmentMeanWithNumSegments
        )
        if places is None:
            places = tf.range(tf.size(samples.keys, out_type=tf.int64))
        return pool(data=rows, indices=places, segment_ids=samples.sample_of, num_segments=samples.count)
    with tf.control_dependencies([rows]):  # by then the weights are known to fit, on every rank
        weights = tf.identity(samples.weights)
    each = rows if places is None else tf.gather(rows, places)
    count = tf.cast(samples.count, tf.int64)
    pooled = tf.math.unsorted_segment_sum(each * weights[:, tf.newaxis], samples.sample_of, count)
    if combiner == "sum":
        return pooled
    total = tf.math.unsorted_segment_sum(weights, samples.sample_of, count)
    return tf.math.divide_no_nan(pooled, total[:, tf.newaxis])
