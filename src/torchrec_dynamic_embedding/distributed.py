"""What the ranks tell each other. Every rank maps the ids of all ranks, so all hold the same maps.

No exchange depends on what only one rank knows: each rank sends a header of one fixed size, and what follows
depends on the headers of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embstore.distributed.ranks import ranks_of

Numbers = npt.NDArray[np.int64]

_numbers = itertools.count()


class Peers:
    """The ranks over connections of their own, so that their collectives never meet those of the model.

    To be made by all ranks together; without torch.distributed there is one rank.
    """

    def __init__(self) -> None:
        self._ranks = ranks_of(None, "a wrapped loader", purpose=f"tde-{next(_numbers)}")
        self.rank, self.world = self._ranks.rank, self._ranks.world

    def headers(self, mine: Sequence[int]) -> Numbers:
        """(world, n): the numbers of every rank."""
        return np.stack(self._ranks.all_gather_equal(np.array(mine, np.int64)))

    def arrays(self, mine: Numbers, sizes: Sequence[int]) -> list[Numbers]:
        """The array of every rank; `sizes`, known to all, are their lengths."""
        padded = np.zeros(max(sizes), np.int64)
        padded[: len(mine)] = mine
        return [array[:size] for array, size in zip(self._ranks.all_gather_equal(padded), sizes)]

    def share(self, error: BaseException | None) -> None:
        """Raises on all ranks when one has an error: there its own, elsewhere one that names the rank."""
        self._ranks.share(error)
