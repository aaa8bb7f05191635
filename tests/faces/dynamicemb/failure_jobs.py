"""What ranks do in test_failures.py: one of them has a store that fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faces.dynamicemb.jobs import bags
from faces.dynamicemb.models import Spec, dmp, loss_of, outputs, rows
from torchrec.distributed.planner import EmbeddingShardingPlanner

from embstore.stores import Store, row_bytes

FAILING = 1


class DictStore(Store):
    """Rows in a dict; every access fails while it is broken."""

    broken = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rows: dict[int, tuple[Any, int]] = {}

    def _check(self) -> None:
        if self.broken:
            raise OSError(5, "the disk of this rank is gone")

    def get(self, keys: Any) -> Any:
        self._check()
        found = np.array([int(k) in self.rows for k in keys], bool)
        out = np.zeros((len(keys), self.row_bytes), np.uint8)
        scores = np.ones(len(keys), np.uint64)
        for i in np.flatnonzero(found):
            out[i], scores[i] = self.rows[int(keys[i])]
        return out, scores, found

    def put(self, keys: Any, rows: Any, scores: Any) -> None:
        self._check()
        for key, row, score in zip(keys, rows, scores):
            self.rows[int(key)] = (row.copy(), score)

    def erase(self, keys: Any) -> None:
        self._check()
        for key in keys:
            self.rows.pop(int(key), None)

    def scan(self) -> Any:
        self._check()
        if self.rows:
            keys = np.array(list(self.rows), np.int64)
            yield keys, np.stack([r for r, _ in self.rows.values()]), np.ones(len(keys), np.uint64)

    def __len__(self) -> int:
        return len(self.rows)


def model_over(
    stores: list[DictStore], kind: str, dedup: bool, fails: bool = False, sharding: str = "row_wise"
) -> torch.nn.Module:
    def store(options: Any, rank: int) -> DictStore:
        if fails and rank == FAILING:
            raise OSError(5, "the disk of this rank is gone")
        stores.append(DictStore(row_bytes(options.dim, options.optimizer, options.dtype)))
        return stores[-1]

    names = ["t0"] if sharding == "row_wise" else ["before", "t0", "after"]  # t0 is on rank 1
    specs = [
        Spec(name, ("f0",), rows=128, options={"external_storage": store}, sharding=sharding)
        for name in names
    ]
    return dmp(kind, specs, {"learning_rate": 0.5}, dedup=dedup)


def _outcome(action: Any) -> tuple[str, str]:
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def step(model: torch.nn.Module, keys: range) -> None:
    loss_of(model(bags(keys))).backward()


def fail_in_a_step(kind: str, dedup: bool, training: bool, sharding: str = "row_wise") -> dict[str, Any]:
    """Steps, a failure, and more steps; beside them the rows of a model that never failed."""
    rank = dist.get_rank()
    batches = [range(rank, 97), range(50, 400), range(3 * rank, 97, 2)]
    stores: list[DictStore] = []
    model, twin = (model_over(s, kind, dedup, sharding=sharding) for s in (stores, []))
    step(model, batches[0])
    for store in stores:
        store.broken = rank == FAILING
    model.train(training)
    answer = _outcome(lambda: step(model, batches[1]) if training else outputs(model(bags(batches[1]))))
    for store in stores:
        store.broken = False
    model.train()
    step(model, batches[2])
    for batch in (batches[0], batches[2]):
        step(twin, batch)
    # The failing batch may have inserted rows on ranks that did not fail; none was trained.
    ours, theirs = rows(model)["t0"], rows(twin)["t0"]
    return {"answer": answer, "same": all(ours[key] == value for key, value in theirs.items())}


def fail_in_construction(kind: str) -> dict[str, Any]:
    stores: list[DictStore] = []
    closed: list[int] = []
    DictStore.close = lambda self: closed.append(1)  # type: ignore[attr-defined]
    try:
        answer = _outcome(lambda: model_over(stores, kind, False, fails=True))
    finally:
        del DictStore.close  # type: ignore[attr-defined]
    model = model_over(stores, kind, False)
    step(model, range(97))
    return {"answer": answer, "closed": len(closed)}


def fail_in_planning() -> tuple[str, str]:
    def plan(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("no plan fits")

    original = EmbeddingShardingPlanner.plan
    EmbeddingShardingPlanner.plan = plan  # type: ignore[method-assign]
    try:
        return _outcome(lambda: dmp("ebc", [Spec("t0", ("f0",), rows=128)]))
    finally:
        EmbeddingShardingPlanner.plan = original  # type: ignore[method-assign]


def stay_away(kind: str) -> tuple[str, str]:
    """Rank 1 fails before the exchange and never comes to the next one."""
    model = dmp(kind, [Spec("t0", ("f0",), rows=128)])
    step(model, range(7))
    if dist.get_rank() == FAILING:
        return _outcome(lambda: model("not a batch"))
    return _outcome(lambda: model(bags(range(7))))
