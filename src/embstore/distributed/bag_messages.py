"""Bags on their way to the owners of their keys: lengths, keys and weights in one message for each rank.

packed = pack_bags(keys, offsets, weights, features=2, world=3, rank=1)
packed.messages     bytes: what rank 0 gets, then rank 2, at last what stays here
packed.keys         keys in the message for each rank
packed.bytes        bytes of the message for each rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from embstore import _core
from embstore.arrays import empty_tensor
from embstore.ownership import AnyOwnership, Ownership, engine_ownership


@dataclass(frozen=True)
class PackedBags:
    """What `pack_bags` made."""

    messages: torch.Tensor  # uint8: those for other ranks, by rank, then the own one
    keys: list[int]
    bytes: list[int]

    def split(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What other ranks get, and what stays on this one."""
        cut = self.messages.numel() - self.bytes[rank]
        return self.messages[:cut], self.messages[cut:]


def pack_bags(
    keys: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    features: int,
    world: int,
    rank: int,
    ownership: AnyOwnership = Ownership.ROUNDROBIN,
    rank_of_feature: Sequence[int] = (),
) -> PackedBags:
    """The bags of keys (n) that begin at offsets (features x samples + 1), with float32 weights (n) or None.

    A rank gets all bags with the keys that it owns. With `rank_of_feature` it gets its features as a whole,
    and hears nothing of others. Everything is contiguous on the CPU.
    """
    rule, rows = engine_ownership(ownership)
    messages, of_keys, of_bytes = _core.pack_bags(
        keys.data_ptr(),
        keys.numel(),
        offsets.data_ptr(),
        offsets.numel() - 1,
        0 if weights is None else weights.data_ptr(),
        features,
        world,
        rank,
        rule,
        rows,
        list(rank_of_feature),
    )
    return PackedBags(torch.from_numpy(messages), of_keys, of_bytes)


def message_bytes(keys: int, features: int, samples: int, *, weighted: bool) -> int:
    """The length of a message."""
    return _core.bag_message_bytes(keys, features, samples, weighted)


def unpack_bags(
    messages: Sequence[torch.Tensor],
    keys: Sequence[int],
    samples: Sequence[int],
    features: int,
    *,
    weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys (n), offsets (features x all samples + 1) and weights (n) of the messages of all ranks, in the
    order feature, rank, sample. `keys` and `samples` are those of each message."""
    n = sum(keys)
    out = empty_tensor((n,), torch.int64)
    offsets = empty_tensor((features * sum(samples) + 1,), torch.int64)
    weights = empty_tensor((n,), torch.float32) if weighted else None
    _core.unpack_bags(
        [(message.data_ptr(), message.numel()) for message in messages],
        list(keys),
        list(samples),
        features,
        offsets.data_ptr(),
        out.data_ptr(),
        0 if weights is None else weights.data_ptr(),
    )
    return out, offsets, weights
