"""Routing of a batch over ranks: which keys go where, and the sums of what comes back.

route = route_keys(keys, offsets, world=2)     # offsets divide the keys into cells
route.keys      what is sent: first all keys for rank 0, then those for rank 1
route.counts    (world, cells): how many keys of each cell go to each rank
route.index     (n): where each occurrence of the batch is in route.keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from embstore import _core
from embstore.ownership import AnyOwnership, Ownership, engine_ownership


@dataclass(frozen=True)
class Route:
    """What `route_keys` found; everything is on the CPU."""

    keys: torch.Tensor  # (m) int64
    counts: torch.Tensor  # (world, cells) int32
    index: torch.Tensor  # (n) int64


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise ValueError(f"{name} should be int64 on the CPU but is: {tensor.dtype} on {tensor.device}")
    return tensor.contiguous().view(-1)


def route_keys(
    keys: torch.Tensor,
    offsets: torch.Tensor,
    world: int,
    ownership: AnyOwnership = Ownership.ROUNDROBIN,
    *,
    unique: Sequence[bool] | None = None,
    rank_of_cell: Sequence[int] = (),
) -> Route:
    """Orders keys (n) by (owner, cell, position). In cells where `unique` says so a key is sent once. With
    `rank_of_cell` a cell goes to that rank as a whole, whatever the ownership."""
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"world should be an integer of at least 1 but is: {world!r}")
    k, o = _flat(keys, "keys"), _flat(offsets, "offsets")
    if o.numel() == 0:
        raise ValueError("offsets should have at least one element but has: 0")
    cells = o.numel() - 1
    if unique is not None and len(unique) != cells:
        raise ValueError(f"unique should have {cells} elements, one for each cell, but has: {len(unique)}")
    flags = None if unique is None or not any(unique) else torch.tensor(unique, dtype=torch.uint8)
    rule, rows = engine_ownership(ownership)
    arrays = _core.route_keys(
        k.data_ptr(),
        k.numel(),
        o.data_ptr(),
        cells,
        world,
        rule,
        0 if flags is None else flags.data_ptr(),
        rows,
        list(rank_of_cell),
    )
    return Route(*(torch.from_numpy(array) for array in arrays))


def sum_rows(vectors: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows, dim): for each row the sum, in order, of the vectors (n, dim) whose index names it."""
    i = _flat(index, "index")
    if vectors.dim() != 2 or vectors.shape[0] != i.numel():
        raise ValueError(f"vectors should have {i.numel()} rows but has the shape: {tuple(vectors.shape)}")
    v = vectors.detach().to(device="cpu", dtype=torch.float32).contiguous()
    out = torch.empty((rows, v.shape[1]), dtype=torch.float32)
    _core.sum_rows(v.data_ptr(), i.data_ptr(), i.numel(), v.shape[1], rows, out.data_ptr())
    return out


def regroup(parts: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Segments that lie by (sender, cell), as sizes[sender][cell] says, in the order (cell, sender)."""
    pieces = iter(torch.split(parts, [size for of_sender in sizes for size in of_sender]))
    by_sender = [[next(pieces) for _ in of_sender] for of_sender in sizes]
    return torch.cat([piece for cell in zip(*by_sender) for piece in cell])
