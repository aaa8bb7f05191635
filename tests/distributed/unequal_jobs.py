"""What ranks of sharded modules may do differently, and wrongly. Every function runs on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed.sharded_jobs import IDS, SAMPLES, answers, module_of, rows_of, table, train

import embstore


def missing_features() -> dict[str, int]:
    """Rank 0 has "u" alone, the others "v" alone; nobody has "w"."""
    module = module_of("collection", "adam")
    rank = dist.get_rank()
    feature = "v" if rank else "u"
    for _ in range(3):
        out = module({feature: IDS[: 5 + rank]})
        assert list(out) == [feature]
        out[feature].sum().backward()
    return {name: t.optimizer_step for name, t in module.tables.items()}


def unused_outputs() -> Any:
    """The loss of rank 0 knows "v" alone, and no loss knows "u" and "w": rows of "a" do not move."""
    module = module_of("collection", "adam")
    for step in (0, 1):
        out = answers(module, "collection", step, slice(0, SAMPLES))
        if step == 0:
            sum(v.sum() for v in out.values()).backward()
            before = rows_of(module)
        else:
            (out["v"] if dist.get_rank() == 0 else out["v"].square()).sum().backward()
    after = rows_of(module)
    old = np.isin(after["a"].keys, before["a"].keys)
    np.testing.assert_array_equal(after["a"].values[old], before["a"].values)
    assert not np.array_equal(after["b"].values, before["b"].values)


def failing(what: str) -> Any:
    """Rank 1 fails; afterwards all ranks train on."""
    rank = dist.get_rank()
    bad = rank == 1
    if what == "construction":
        return embstore.Embedding(3 if not bad else -3, sharded=True)
    if what == "options":
        return embstore.Embedding(3, sharded=True, max_capacity=1024 if bad else 2048)
    if what == "rows of others":
        own = embstore.Table(table("a", "sgd"))
        if bad:
            own.find_or_insert(IDS)
        return embstore.Embedding(table=own, sharded=True)
    module = module_of("bag sum", "sgd")
    other = module_of("bag collection", "sgd")
    if what == "dtype":
        return module(IDS.float() if bad else IDS, torch.tensor([0]))
    if what == "offsets":
        return module(IDS, torch.tensor([0, 5, 3] if bad else [0, 3, 5]))
    if what == "feature":
        return other({"nothing" if bad else "u": (IDS, torch.tensor([0]))})
    if what == "no feature":
        return other({} if bad else {"u": (IDS, torch.tensor([0]))})
    if what == "mode":
        return module.train(not bad)(IDS, torch.tensor([0]))
    if what == "closed":
        if bad:
            module.table.close()
        return module.eval()(IDS, torch.tensor([0]))
    if what == "refused":
        small = table("a", "sgd", check_mode="error", max_capacity=128, bucket_capacity=128)
        module = embstore.Embedding(table=embstore.Table(small), sharded=True)
        world = dist.get_world_size()
        return module(torch.arange(1, 1000 * world, world) if rank == 0 else IDS[:0])  # all owned by rank 1
    raise AssertionError(what)


def failing_then_training(what: str) -> tuple[str, str]:
    try:
        failing(what)
    except BaseException as error:
        told = type(error).__name__, str(error)
    train("bag sum", "sgd", 2)
    return told


def absent() -> tuple[str, str] | None:
    """Rank 1 does not take part."""
    module = module_of("embedding")
    module(IDS).sum().backward()
    if dist.get_rank() == 1:
        return None
    try:
        module(IDS)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def failing_update() -> tuple[str, str]:
    """The update of rank 1 fails; the others get to know in their next step."""
    module = module_of("embedding", "sgd")
    loss = module(IDS).sum()
    if dist.get_rank() == 1:

        def full(*, count: bool) -> Any:
            raise OSError(28, "No space left on device")

        module.table.step_options = full
    try:
        loss.backward()
        module(IDS)
    except OSError as error:
        return type(error).__name__, str(error)
    return "", ""


def twice(patient: bool) -> Any:
    module = module_of("embedding", "sgd", update_in_backward=not patient)
    loss = module(IDS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    module.step()
    return module.table.optimizer_step, rows_of(module)["a"]
