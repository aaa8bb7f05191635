"""What the ranks of the tests of DynamicEmbDump, DynamicEmbLoad and incremental_dump do."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from faces.dynamicemb.models import Spec, dmp, jagged, loss_of, rows, share, tables

from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.incremental_dump import get_score, incremental_dump, set_score


def _train(model: Any, specs: list[Spec], first: int, steps: int, ids: int = 60) -> list[float]:
    features = list(dict.fromkeys(feature for spec in specs for feature in spec.features))
    losses = []
    for step in range(first, first + steps):
        answer = model(share(jagged(features, 12, step, ids=ids)))
        loss = loss_of(answer) * dist.get_world_size()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size() ** 2)
    return losses


def dump(path: str, kind: str, specs: list[Spec], params: Any, **keywords: Any) -> dict[str, Any]:
    """Trains, dumps, and trains on: what an interrupted training has to repeat."""
    model = dmp(kind, specs, params)
    _train(model, specs, 0, 4)
    before = rows(model)
    asynchronous = keywords.pop("async_", False)
    names = keywords.pop("table_names", None)
    handle = DynamicEmbDump(path, model, names, True, None, async_=asynchronous, **keywords)
    losses = _train(model, specs, 4, 4)
    if asynchronous:
        assert handle is not None
        handle.wait()
    else:
        assert handle is None
    return {"rows": before, "losses": losses, "after": rows(model), "score": get_score(model)}


def load(path: str, kind: str, specs: list[Spec], params: Any, table_names: Any = None) -> dict[str, Any]:
    model = dmp(kind, specs, params)
    for table in tables(model).values():
        table.reseed(4711)  # as after torch.manual_seed of another number
    assert DynamicEmbLoad(path, model, table_names, True, None) is None
    loaded = rows(model)
    return {
        "rows": loaded,
        "losses": _train(model, specs, 4, 4),
        "after": rows(model),
        "score": get_score(model),
    }


def increments(kind: str, specs: list[Spec], params: Any) -> list[Any]:
    """incremental_dump after each step, with what is stored on this rank before it."""
    model = dmp(kind, specs, params)
    answers = []
    score = 1
    threshold: Any = 0
    for step in range(4):
        for name, table in tables(model).items():
            if table.options.score_strategy.name == "CUSTOMIZED":
                score += 5
                set_score(model, {"model": {name: score}})
        _train(model, specs, step, 1, ids=40 + 20 * step)
        stored = {name: table.rows() for name, table in tables(model).items()}
        found = incremental_dump(model, threshold)
        assert found is not None
        tensors, scores = found
        answers.append({"threshold": threshold, "stored": stored, "tensors": tensors, "scores": scores})
        threshold = scores
    return answers


def refuse(thresholds: list[Any]) -> list[str]:
    model = dmp("ebc", [Spec("t0", ("f0",))], None)
    messages = []
    for threshold in thresholds:
        try:
            incremental_dump(model, threshold)
        except ValueError as error:
            messages.append(str(error))
    return messages


def plain_module(path: str) -> list[Any]:
    """A model without dynamic tables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = torch.nn.Linear(2, 2)
        answers = [DynamicEmbDump(path, plain), DynamicEmbLoad(path, plain), incremental_dump(plain, 0)]
    return [answers, [str(w.message) for w in caught if "dynamic table" in str(w.message)]]
