"""What ranks do in the tests of options that decide which rows stay. As in jobs.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from faces.dynamicemb.jobs import bags
from faces.dynamicemb.models import Spec, dmp, jagged, loss_of, outputs, rows, share, tables

import embstore
from dynamicemb import DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.discovery import find_collections
from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad


def _train(model: Any, first: int, steps: int) -> None:
    """Few ids are frequent, and others are every ten steps; a step depends on its number alone."""
    for step in range(first, first + steps):
        batch = jagged(["f0"], 48, step, ids=10**6)
        values = (400 ** (batch.values() / 10**6)).long() + 97 * (step // 10)
        (loss_of(model(share(_with(batch, values)))) * dist.get_world_size()).backward()


def _with(batch: Any, values: torch.Tensor) -> Any:
    return type(batch)(keys=batch.keys(), values=values, lengths=batch.lengths())


def train(options: dict[str, Any], steps: int, cut: int | None = None, path: str = "") -> dict[str, Any]:
    """Rows and counters after so many steps; with a cut, by another model that goes on from a dump of it."""
    model = dmp("ec", [Spec("t0", ("f0",), rows=512, options=options)])
    _train(model, 0, steps if cut is None else cut)
    if cut is not None:
        DynamicEmbDump(path, model, optim=True)
        model = dmp("ec", [Spec("t0", ("f0",), rows=512, options=options)])
        DynamicEmbLoad(path, model, optim=True)
        _train(model, cut, steps - cut)
    (table,) = tables(model).values()
    stats, shared = table.stats(), table.shared_rows()
    return {
        "rows": rows(model)["t0"],
        "shared": dict(zip(shared.keys.tolist(), shared.values.tolist())),
        "expired": stats.expired,
        "evictions": stats.evictions,
        "bytes": stats.bytes,
        "capacity": stats.max_capacity,
    }


def aged_counts_with_dedup() -> dict[int, int]:
    """Scores of ids that came three times, once and twice, where duplicates are dropped before sending."""
    options = {"score_strategy": DynamicEmbScoreStrategy.LFU, "half_life": 10**6}
    model = dmp("ec", [Spec("t0", ("f0",), options=options)], dedup=True)
    outputs(model(bags([5, 5, 6, 5, 7, 7])))
    (table,) = tables(model).values()
    return dict(zip(table.rows().keys.tolist(), table.rows().scores.tolist()))


def _counted() -> Any:
    counted = {"admit_strategy": FrequencyAdmissionStrategy(5), "admission_counter": KVCounter(1 << 16)}
    return dmp("ec", [Spec("t0", ("f0",), rows=512, options=counted)])


def _log_arguments(model: Any) -> dict[str, Any]:
    ((path, collection),) = find_collections(model).items()
    return {
        "tables": {path: {name: dynamic.table for name, dynamic in collection.tables.items()}},
        "group": dist.group.WORLD,
    }


def _seen(model: Any) -> dict[str, Any]:
    (table,) = tables(model).values()
    keys, counts = table.exact_counts.items()
    return {"rows": sorted(table), "counts": dict(zip(keys.tolist(), counts.tolist()))}


def write_counted_log(path: str) -> dict[str, Any]:
    """A log of a table that counts exactly; what it is after some steps more."""
    model = _counted()
    _train(model, 0, 5)
    log = embstore.IncrementLog.create(path, **_log_arguments(model))
    for first in (5, 10, 15):
        _train(model, first, 5)
        log.append(**_log_arguments(model))
    _train(model, 20, 10)
    return _seen(model)


def load_counted_log(path: str) -> dict[str, Any]:
    model = _counted()
    embstore.IncrementLog(path).load(**_log_arguments(model))
    _train(model, 20, 10)
    return _seen(model)
