"""Agreement between ranks: everyone sees the same description, or everyone raises the same error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the group gave, in the order of the ranks."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def require_agreement(what: str, description: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raises ValueError on every rank when the descriptions differ, naming the first entry that does."""
    first, *others = gather(dict(description), group)
    for rank, other in enumerate(others, start=1):
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{what} should be the same on every rank but {name!r} differs: rank 0 has "
                    f"{first.get(name, 'nothing')} and rank {rank} has {other.get(name, 'nothing')}"
                )


def raise_together(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raises on every rank when one has an error: its own where there is one, else that of the first."""
    if group is not None:
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed.item():
            return
    texts = gather(None if error is None else (type(error), str(error)), group)
    if error is not None:
        raise error
    for rank, failure in enumerate(texts):
        if failure is not None:
            kind, text = failure
            raise kind(f"{text} (on rank {rank})")
