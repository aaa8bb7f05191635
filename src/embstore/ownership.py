"""Row-wise ownership: which rank keeps a key. One function for routing, loading and resharding.

keys      7  -1  12   3          owner(keys, world=2)
rank      1   1   0   1
"""

from __future__ import annotations

import enum

import numpy as np

from embstore import _core
from embstore.arrays import Array, address, as_keys


class Ownership(enum.IntEnum):
    """How keys are spread over ranks."""

    ROUNDROBIN = 0  # uint64(key) % world
    HASH_ROUNDROBIN = 1  # a mixed hash of the key % world: even for patterned ids
    XXH64 = 2  # xxh64 of the key with seed 1, % world: OneEmbedding's rule


def owner(keys: object, world: int, ownership: Ownership = Ownership.ROUNDROBIN) -> Array:
    """The rank of each key, int64, in the shape of the keys."""
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"world should be an integer of at least 1 but is: {world!r}")
    k = as_keys(keys)
    ranks = np.empty(k.n, np.int64)
    _core.owners(k.address, k.n, world, int(ownership), address(ranks))
    return k.like(ranks.reshape(k.shape))
