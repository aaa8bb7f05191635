"""What ranks do in the tests of table options: scores, admission, room, stores below. As in jobs.py."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from faces.dynamicemb.jobs import bags
from faces.dynamicemb.models import Spec, dmp, outputs, rows, tables
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb import (
    DynamicEmbCheckMode,
    DynamicEmbScoreStrategy,
)
from dynamicemb.scores import get_score, set_score


def overfill(mode: DynamicEmbCheckMode) -> dict[str, Any]:
    """200 new even keys for a table of one bucket: with two ranks all of them belong to rank 0."""
    spec = Spec("t0", ("f0",), rows=128, options={"safe_check_mode": mode, "init_capacity": 128})
    model = dmp("ebc", [spec])
    batch = bags([2 * key for key in range(200)]) if dist.get_rank() == 0 else bags([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = outputs(model(batch))["f0"].detach()
    (table,) = tables(model).values()
    return {
        "zeros": int((answer == 0.0).all(1).sum()),
        "warnings": [str(w.message) for w in caught if "refused" in str(w.message)],
        "refusals": table.stats().refusals,
        "size": len(table),
    }


def mixed_scores() -> dict[str, Any]:
    strategies = DynamicEmbScoreStrategy
    specs = [Spec(f"t_{s.name}", ("f0",), options={"score_strategy": s}) for s in strategies]
    model = dmp("ebc", specs)
    first = get_score(model)
    set_score(model, {"model": {"t_CUSTOMIZED": 70}})
    model(bags([1, 1, 2]))
    model(bags([]) if dist.get_rank() == 0 else bags([3]))
    second = get_score(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_score(model, {"model": {"t_CUSTOMIZED": 7}})
    model(bags([2]))
    stored = {
        name: dict(zip(t.rows().keys.tolist(), t.rows().scores.tolist())) for name, t in tables(model).items()
    }
    return {
        "first": first,
        "second": second,
        "third": get_score(model),
        "stored": stored,
        "warned": [str(w.message) for w in caught],
    }


def customized_without_score(set_on: Sequence[int]) -> None:
    spec = Spec("t0", ("f0",), options={"score_strategy": DynamicEmbScoreStrategy.CUSTOMIZED})
    model = dmp("ebc", [spec])
    if dist.get_rank() in set_on:
        set_score(model, 5)
    outputs(model(bags([1, 2])))


def wrong_scores() -> list[str]:
    model = dmp("ebc", [Spec("t0", ("f0",))])
    custom = dmp("ebc", [Spec("t0", ("f0",), options={"score_strategy": DynamicEmbScoreStrategy.CUSTOMIZED})])
    messages = []
    for target, score in ((model, 3), (custom, 0), (custom, 1.5), (custom, True), (custom, {"model": 4})):
        try:
            set_score(target, score)
        except ValueError as error:
            messages.append(str(error))
    return messages


def admission(threshold: int) -> dict[str, Any]:
    from dynamicemb import FrequencyAdmissionStrategy

    spec = Spec("t0", ("f0",), options={"admit_strategy": FrequencyAdmissionStrategy(threshold)})
    model = dmp("ec", [spec], {"learning_rate": 1.0}, dedup=True)
    sizes, answers = [], []
    for _ in range(3):
        vectors = outputs(model(bags([1, 1, 2])))["f0"]
        answers.append(vectors.detach().clone())
        vectors.sum().backward()
        sizes.append(sorted(rows(model)["t0"]))
    return {"sizes": sizes, "answers": answers}


def count_with_dedup() -> dict[int, int]:
    spec = Spec("t0", ("f0",), options={"score_strategy": DynamicEmbScoreStrategy.LFU})
    model = dmp("ec", [spec], dedup=True)
    model(bags([5, 5, 6, 5]))
    (table,) = tables(model).values()
    return dict(zip(table.rows().keys.tolist(), table.rows().scores.tolist()))


def over_a_store() -> dict[str, Any]:
    """A table of one bucket over a store: 300 keys pass through, and all are there in the end."""
    from embstore.stores import MemoryStore, row_bytes

    def store(options: Any, rank: int) -> MemoryStore:
        return MemoryStore(row_bytes(options.dim, options.optimizer, options.dtype))

    model = dmp(
        "ec", [Spec("t0", ("f0",), rows=128, options={"external_storage": store})], {"learning_rate": 1.0}
    )
    for first in range(0, 300, 50):
        outputs(model(bags(range(first, first + 50))))["f0"].sum().backward()
    model.eval()
    vectors = outputs(model(bags(range(300))))["f0"]
    (table,) = tables(model).values()
    return {"vectors": vectors.unique().tolist(), "size": len(table), "evictions": table.stats().evictions}


def with_caching(budget_rows: int, caching: bool) -> dict[str, Any]:
    """A table of 4096 rows of dim 8 with Adam over a store, and a budget for fewer of them."""
    from embstore.stores import MemoryStore, row_bytes

    made: list[MemoryStore] = []

    def store(options: Any, rank: int) -> MemoryStore:
        made.append(MemoryStore(row_bytes(options.dim, options.optimizer, options.dtype)))
        return made[-1]

    adam = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    budget = budget_rows * 4 * 3 * 8  # vector, m and v
    options = {"external_storage": store, "caching": caching, "global_hbm_for_values": budget}
    model = dmp("ec", [Spec("t0", ("f0",), rows=4096, options=options)], adam)
    twin = dmp("ec", [Spec("t0", ("f0",), rows=4096)], adam)
    for first in (0, 100, 200, 0, 300, 100):
        for each in (model, twin):
            (outputs(each(bags(range(first, first + 100))))["f0"] ** 2).sum().backward()
    (table,), (whole,) = tables(model).values(), tables(twin).values()
    return {
        "in_memory": len(table),
        "max_capacity": table.stats().max_capacity,
        "below": len(made[0]),
        "same": bool((table.rows().values == whole.rows().values).all()),
    }
