"""Rows of keys that other ranks own: keys go out, rows come back, gradients follow the keys.

    my keys ──dispatch──► keys that I own ──read──► rows of those ──collect──► rows of my keys

All tables of a call share one exchange of keys and one of rows. Both carry a failure flag, so that the other
ranks raise instead of waiting for a rank that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import embstore
from sparse_operation_kit import bridge
from sparse_operation_kit.communication import agree, tool
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.rows import read_rows
from sparse_operation_kit.static import StaticVariable

# What went wrong on this rank since the last exchange of rows.
_failures: list[Exception] = []


def owners(variable: Any, keys: np.ndarray, size: int) -> np.ndarray:
    """The rank of each key. Raises for a key outside of a table of fixed size."""
    if isinstance(variable, StaticVariable):
        rows = int(variable.global_shape[0])
        outside = keys[(keys < 0) | (keys >= rows)]
        if len(outside):
            raise ValueError(
                f"keys of {variable.name!r} should be between 0 and {rows - 1} but one is: {outside[0]}"
            )
    if variable.target_gpu >= 0:
        return np.full(len(keys), variable.target_gpu, np.int64)
    return embstore.owner(keys, size)


def check_weights(samples: Sequence[np.ndarray]) -> None:
    """samples[2i] says of each key, samples[2i + 1] of each weight, which sample it belongs to."""
    for of_keys, of_weights in zip(samples[::2], samples[1::2]):
        if len(of_keys) != len(of_weights):
            raise ValueError(f"sp_weights should hold {len(of_keys)} weights but hold: {len(of_weights)}")
        differs = np.flatnonzero(of_keys != of_weights)
        if len(differs):
            raise ValueError(
                "sp_weights should have as many weights in each sample as sp_ids has keys "
                f"but differ in sample {min(of_keys[differs[0]], of_weights[differs[0]])}"
            )


def dispatch(
    variables: Sequence[Any], keys: Sequence[np.ndarray], samples: Sequence[np.ndarray] = ()
) -> list[np.ndarray]:
    """Sends keys to their owners. `samples` are for `check_weights`, whose error reaches every rank.

    Returns for each variable the keys that this rank owns (by asking rank), then for each the order in which
    its own keys went out, then counts (2, ranks, variables): keys sent to, and received from, each rank.
    """
    t, error = tool(), None
    sent = np.zeros((t.size, len(variables)), np.int64)
    orders = [np.arange(len(k)) for k in keys]
    try:
        check_weights(samples)
        for i, (variable, k) in enumerate(zip(variables, keys)):
            ranks = owners(variable, k, t.size)
            orders[i] = np.argsort(ranks, kind="stable")
            sent[:, i] = np.bincount(ranks, minlength=t.size)
    except ValueError as raised:
        error = raised
    flags = np.full((t.size, 1), error is not None, np.int64)
    headers = t.all_to_all(list(np.hstack([sent, flags])), [len(variables) + 1] * t.size)
    received = np.stack(headers)
    if received[:, -1].any():
        agree(error)
    received = received[:, :-1]
    sorted_keys = [k[order] for k, order in zip(keys, orders)]
    arrived = t.all_to_all(_by_rank(sorted_keys, sent), received.sum(axis=1))
    owned = _by_variable(arrived, received, [1] * len(variables))
    return [*(o.reshape(-1) for o in owned), *orders, np.stack([sent, received])]


def _by_rank(arrays: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """For each rank, its rows of all variables in one flat array. counts (ranks, variables)."""
    starts = np.vstack([np.zeros((1, counts.shape[1]), np.int64), np.cumsum(counts, axis=0)])
    return [
        np.concatenate([a[starts[rank, i] : starts[rank + 1, i]].reshape(-1) for i, a in enumerate(arrays)])
        for rank in range(len(counts))
    ]


def _by_variable(parts: Sequence[np.ndarray], counts: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    """The inverse: for each variable (rows, width), by rank."""
    cuts = [np.cumsum(row * widths)[:-1] for row in counts]
    split = [np.split(part, cut) for part, cut in zip(parts, cuts)]
    return [
        np.concatenate([pieces[i] for pieces in split]).reshape(-1, width) for i, width in enumerate(widths)
    ]


def move_rows(rows: Sequence[np.ndarray], sent: np.ndarray, received: np.ndarray) -> list[np.ndarray]:
    """Exchanges rows (by rank) of several variables. A collective that carries this rank's failure."""
    t = tool()
    widths = [r.shape[1] for r in rows]
    error = _failures.pop() if _failures else None
    _failures.clear()
    flag = np.full(1, error is not None, np.float32)
    parts = [np.concatenate([flag, part]) for part in _by_rank(rows, sent)]
    arrived = t.all_to_all(parts, 1 + (received * widths).sum(axis=1))
    if any(part[0] for part in arrived):
        agree(error)
    return _by_variable([part[1:] for part in arrived], received, widths)


def collect(rows: Sequence[tf.Tensor], orders: Sequence[tf.Tensor], counts: tf.Tensor) -> list[tf.Tensor]:
    """Returns rows to the ranks that asked; gradients travel the other way."""
    n = len(rows)

    def forward(*arrays: np.ndarray) -> list[np.ndarray]:
        (sent, received), order = arrays[-1], arrays[n:-1]
        moved = move_rows(arrays[:n], received, sent)
        vectors = [np.empty_like(m) for m in moved]
        for vector, m, o in zip(vectors, moved, order):
            vector[o] = m
        return vectors

    def backward(*arrays: np.ndarray) -> list[np.ndarray]:
        (sent, received), order = arrays[-1], arrays[n:-1]
        return move_rows([g[o] for g, o in zip(arrays[:n], order)], sent, received)

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        vectors = bridge.call_together(forward, inputs, [tf.float32] * n)
        for vector, row in zip(vectors, rows):
            vector.set_shape([None, row.shape[1]])

        def gradient(*upstream: tf.Tensor) -> list[Any]:
            moved = bridge.call_together(backward, [*upstream, *inputs[n:]], [tf.float32] * n)
            for g, row in zip(moved, rows):
                g.set_shape([None, row.shape[1]])
            return [*moved, *([None] * (n + 1))]

        return vectors, gradient

    result = run(*rows, *orders, counts)
    return [result] if isinstance(result, tf.Tensor) else list(result)


def rows_of_both_kinds(
    variables: Sequence[Any],
    keys: Sequence[tf.Tensor],
    gather: Callable[[StaticVariable, tf.Tensor], tf.Tensor],
    **how: Any,
) -> list[tf.Tensor]:
    """The rows of keys[i] in variables[i]: all dynamic ones in one call of `read_rows`, which takes `how`;
    static ones by `gather`."""
    dynamic = [i for i, v in enumerate(variables) if isinstance(v, DynamicVariable)]
    rows: dict[int, tf.Tensor] = {}
    if dynamic:
        found = read_rows([variables[i] for i in dynamic], [keys[i] for i in dynamic], **how)
        rows.update(zip(dynamic, found))
    return [rows[i] if i in rows else gather(v, k) for i, (v, k) in enumerate(zip(variables, keys))]


def rows_of_all_ranks(
    variables: Sequence[Any],
    keys: Sequence[tf.Tensor],
    weighted: Sequence[tuple[tf.Tensor, tf.Tensor]],
    *,
    training: bool,
    low_frequency_filter: bool,
) -> list[tf.Tensor]:
    """The row of each key, from whichever rank has it. A collective.

    weighted   for each request with weights the samples of its keys and of its weights, to be compared
    """
    n = len(variables)
    flat = [samples for pair in weighted for samples in pair]
    results = bridge.call_together(
        lambda *arrays: dispatch(variables, arrays[:n], arrays[n:]), [*keys, *flat], [tf.int64] * (2 * n + 1)
    )
    owned, orders, counts = results[:n], results[n:-1], results[-1]
    for k in owned:
        k.set_shape([None])
    rows = rows_of_both_kinds(
        variables,
        owned,
        lambda variable, k: tf.gather(variable, variable.key_map(k)),
        training=training,
        low_frequency_filter=low_frequency_filter,
        guard=_failures.append,
    )
    return collect(rows, orders, counts)
