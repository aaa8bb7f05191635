"""The optimizer state of a variable. It stays with the variable; another wrapper continues it or raises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import embstore


def continues(name: str, now: embstore.Optimizer | None, wanted: embstore.Optimizer, states: int) -> bool:
    """Whether the state of variable `name`, which `now` made, is the one that `wanted` updates.

    The learning rate does not matter. False where the variable has no state; raises ValueError where it has
    the state of another optimizer.
    """
    if now is not None and type(wanted) is type(now) and replace(wanted, lr=now.lr) == now:
        return True
    if not states:
        return False
    raise ValueError(
        f"variable {name!r} holds the state of {now!r}, which {wanted!r} cannot continue: "
        "call reset_slots([variable]) of the new optimizer to start with fresh state"
    )


def fresh_state(optimizer: embstore.Optimizer, dim: int) -> np.ndarray:
    """The state of a new row, (state width)."""
    table = embstore.Table("fresh", dim=dim, optimizer=optimizer)
    table.insert_or_assign([0], np.zeros((1, dim), np.float32))
    return table.read([0]).states[0]
