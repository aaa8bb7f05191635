"""Ownership: which rank keeps a key. One function for routing, loading and resharding.

keys      7  -1  12   3          owner(keys, world=2)
rank      1   1   0   1
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embstore import _core
from embstore.arrays import Array, address, as_keys


class Ownership(enum.IntEnum):
    """How keys are spread over ranks.

    ROUNDROBIN: uint64(key) % world. HASH_ROUNDROBIN: a mixed hash of the key % world, even for patterned ids.
    XXH64: xxh64 of the key with seed 1, % world, which is OneEmbedding's rule.

    Examples:
        >>> import embstore
        >>> embstore.owner([0, 2, 4], world=2, ownership=embstore.Ownership.ROUNDROBIN).tolist()
        [0, 0, 0]
    """

    ROUNDROBIN = 0  # uint64(key) % world
    HASH_ROUNDROBIN = 1  # a mixed hash of the key % world: even for patterned ids
    XXH64 = 2  # xxh64 of the key with seed 1, % world: OneEmbedding's rule


@dataclass(frozen=True)
class Blocks:
    """Keys from 0 to rows - 1 in blocks of ceil(rows / world), one for each rank; any other key as
    ROUNDROBIN."""

    rows: int
    name: ClassVar[str] = "CONTINUOUS"

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or not 0 < self.rows < 1 << 63:
            raise ValueError(f"rows should be an integer from 1 to 2^63 - 1 but is: {self.rows!r}")


@dataclass(frozen=True)
class OnRank:
    """All keys on one rank; where there are fewer ranks, on rank % world."""

    rank: int

    @property
    def name(self) -> str:
        return f"{_ON_RANK_NAME}{self.rank}"

    @staticmethod
    def named(name: str) -> OnRank | None:
        """The rule of this name, None where it is another."""
        number = name.removeprefix(_ON_RANK_NAME)
        return OnRank(int(number)) if number != name and number.isdecimal() else None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < 1 << 31:
            raise ValueError(f"rank should be an integer from 0 to 2^31 - 1 but is: {self.rank!r}")


AnyOwnership = Ownership | Blocks | OnRank
_CONTINUOUS, _ON_RANK = 3, 4
_ON_RANK_NAME = "ON_RANK_"


def engine_ownership(ownership: AnyOwnership) -> tuple[int, int]:
    """The engine's number of a rule, and its rows (or its rank)."""
    if isinstance(ownership, OnRank):
        return _ON_RANK, ownership.rank
    return (_CONTINUOUS, ownership.rows) if isinstance(ownership, Blocks) else (int(Ownership(ownership)), 0)


def owner(keys: object, world: int, ownership: AnyOwnership = Ownership.ROUNDROBIN) -> Array:
    """The rank that keeps each key.

    Args:
        keys: integers in an array, a tensor or a sequence.
        world: number of ranks, at least 1.
        ownership: the rule.

    Returns:
        int64 ranks in the shape and kind of the keys.

    Raises:
        TypeError: keys are no integers.
        ValueError: `world` is below 1.

    Examples:
        >>> import embstore
        >>> embstore.owner([7, -1, 12, 3], world=2).tolist()
        [1, 1, 0, 1]
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"world should be an integer of at least 1 but is: {world!r}")
    k = as_keys(keys)
    ranks = np.empty(k.n, np.int64)
    rule, rows = engine_ownership(ownership)
    _core.owners(k.address, k.n, world, rule, address(ranks), rows)
    return k.like(ranks.reshape(k.shape))
