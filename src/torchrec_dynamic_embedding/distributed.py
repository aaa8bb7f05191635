"""What the ranks tell each other. Every rank maps the ids of all ranks, so all hold the same maps.

No exchange depends on what only one rank knows: each rank sends a header of one fixed size, and what follows
depends on the headers of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from embstore.process_groups import GlooGroup

Numbers = npt.NDArray[np.int64]


class Peers:
    """A process group of our own (gloo), so that its collectives never meet those of the model.

    To be made by all ranks together; without torch.distributed there is one rank.
    """

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if active else 1
        self.rank = dist.get_rank() if active else 0
        self._gloo = GlooGroup() if self.world > 1 else None

    def headers(self, mine: Sequence[int]) -> Numbers:
        """(world, n): the numbers of every rank."""
        own = torch.tensor(mine, dtype=torch.int64)
        if self._gloo is None:
            return own.numpy()[None]
        all_ranks = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(all_ranks, own, group=self._gloo.group)
        return torch.stack(all_ranks).numpy()

    def arrays(self, mine: Numbers, sizes: Sequence[int]) -> list[Numbers]:
        """The array of every rank; `sizes`, known to all, are their lengths."""
        if self._gloo is None:
            return [mine]
        padded = torch.zeros(max(sizes), dtype=torch.int64)
        padded[: len(mine)] = torch.from_numpy(mine)
        all_ranks = [torch.empty_like(padded) for _ in range(self.world)]
        if len(padded):
            dist.all_gather(all_ranks, padded, group=self._gloo.group)
        return [tensor.numpy()[:size] for tensor, size in zip(all_ranks, sizes)]

    def agree(self, error: BaseException | None) -> None:
        """Raises on all ranks when one has an error: there its own, elsewhere one that names the rank."""
        if self._gloo is None:
            if error is not None:
                raise error
            return
        failed = self.headers([error is not None])[:, 0]
        if not failed.any():
            return
        self.raise_failure(error)

    def raise_failure(self, error: BaseException | None) -> None:
        """The second half of `agree`, for callers whose header has said already that a rank failed."""
        if self._gloo is None:
            if error is not None:
                raise error
            return
        told: list[tuple[bool, str] | None] = [None] * self.world
        mine = (
            None
            if error is None
            else (isinstance(error, (ConnectionError, TimeoutError)), f"{type(error).__name__}: {error}")
        )
        dist.all_gather_object(told, mine, group=self._gloo.group)
        if error is not None:
            raise error
        rank, (is_connection, text) = next((r, t) for r, t in enumerate(told) if t is not None)
        raise (ConnectionError if is_connection else RuntimeError)(f"rank {rank} failed with {text}")
