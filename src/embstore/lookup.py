"""Lookups and updates of several tables in one call of the engine, on numpy arrays.

    requests = [Request(users, [7, -1]), Request(items, [3, 3, 5], Pooling.SUM, offsets=[0, 2, 3])]
    of_users, of_items = look_up(requests, Access.TRAIN)

    apply_gradients([Update(users, [7, -1], of_users), Update(items, [3, 3, 5], of_items, [0, 2, 3])])

A result is float32 and has the shape (keys, dim), or (samples, dim) where it is pooled. torch is not needed:
`embstore.nn.batch` does the same with autograd.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_floats, as_keys, empty_floats
from embstore.options import Access as Access
from embstore.options import DType
from embstore.table import Table


class Pooling(enum.IntEnum):
    """How the vectors of a bag become one."""

    NONE = 0
    SUM = 1
    MEAN = 2


class Request(NamedTuple):
    """Keys (n) of a table. Pooled: also offsets (samples + 1), which the engine checks."""

    table: Table
    keys: Any
    pooling: Pooling = Pooling.NONE
    offsets: Any = None


def look_up(requests: Sequence[Request], access: Access) -> list[npt.NDArray[np.float32]]:
    """The vectors of each request. The engine's threads are shared among the tables; a table that appears
    again is looked up in a second pass. Raises (or warns) where keys are refused, as their table asks for."""
    outs: list[Any] = [None] * len(requests)
    for numbers in _passes([r.table for r in requests]):
        for i, out in zip(numbers, _one_pass([requests[i] for i in numbers], access)):
            outs[i] = out
    return outs


def _passes(tables: Sequence[Table]) -> Iterator[list[int]]:
    """The numbers of all tables, in groups in which no table comes twice."""
    if len(tables) == 1:
        yield [0]
        return
    waiting = list(range(len(tables)))
    while waiting:
        first = list({id(tables[i]): i for i in reversed(waiting)}.values())
        yield first
        waiting = [i for i in waiting if i not in first]


def _one_pass(requests: Sequence[Request], access: Access) -> list[npt.NDArray[np.float32]]:
    outs, engine_requests, kept = [], [], []
    for r in requests:
        if (r.offsets is None) != (r.pooling == Pooling.NONE):
            raise ValueError(f"offsets should be given with pooling, and only then, but are: {r.offsets!r}")
        keys = as_keys(r.keys)
        offsets = None if r.offsets is None else as_keys(r.offsets, "offsets")
        samples = 0 if offsets is None else offsets.n - 1
        if samples < 0:
            raise ValueError("offsets should have at least one item but are empty")
        out = empty_floats(keys.n if offsets is None else samples, r.table.dim)
        engine_requests.append(
            _core.LookupRequest(
                r.table._core,
                keys.address,
                keys.n,
                int(r.pooling),
                0 if offsets is None else offsets.address,
                samples,
                0,
                address(out),
                int(DType.FLOAT32),
                r.table.dim,
                0,
            )
        )
        kept.append((keys, offsets))
        outs.append(out)
    results = _core.look_up(engine_requests, int(access))
    for r, (keys, _), (_, refused) in zip(requests, kept, results, strict=True):
        if access == Access.TRAIN:
            r.table.pressure.after_batch(r.table)
        if refused:
            r.table.report_refused(refused, keys.n)
    return outs


class Update(NamedTuple):
    """Gradients (n, dim) of keys (n) of a table. With offsets (samples + 1) they are those of the sums of the
    keys of each sample: (samples, dim)."""

    table: Table
    keys: Any
    gradients: Any
    offsets: Any = None


def apply_gradients(updates: Sequence[Update], *, renew_scores: bool = False) -> None:
    """One optimizer step of every table, as `Table.apply_gradients`. A table that appears again moves a
    second time within the step."""
    steps = [u.table.step_options(count=False) for u in updates]
    for numbers in _passes([u.table for u in updates]):
        requests, kept = [], []
        for i in numbers:
            u = updates[i]
            keys = as_keys(u.keys)
            offsets = None if u.offsets is None else as_keys(u.offsets, "offsets")
            samples = 0 if offsets is None else offsets.n - 1
            if samples < 0:
                raise ValueError("offsets should have at least one item but are empty")
            rows = keys.n if offsets is None else samples
            gradients = as_floats(u.gradients, (rows, u.table.dim), "gradients")
            kept.append((keys, offsets, gradients))
            requests.append(
                _core.KeyGradients(
                    u.table._core,
                    keys.address,
                    keys.n,
                    0 if offsets is None else offsets.address,
                    samples,
                    address(gradients),
                    steps[i],
                )
            )
        _core.apply_gradients_by_key(requests, renew_scores)
    for table in {id(u.table): u.table for u in updates}.values():
        table.optimizer_step += 1
