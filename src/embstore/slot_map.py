"""A window of dense slots on an unbounded set of keys: for tables that other code addresses by number.

    keys    40  -7  40  99        slots    0   1   0   2         a SlotMap(3) that was empty

A batch goes through `find`, and where keys are missing through `admit`. When fewer slots are free than
keys are missing, `victims` names keys that may go, their rows are moved away, and `drop` frees their slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_keys

Pairs = npt.NDArray[np.int64]  # (n, 2): key, slot


class SlotMap:
    """Slots 0 .. `slots` - 1 for any int64 keys, the lowest free one first.

    Not thread-safe. Maps that see the same calls are the same, on any machine.

    Args:
        slots: how many there are.
        min_used_freq_power: smoothing of the use counts that choose victims.

    Raises:
        ValueError: a number is out of range, or `time` goes backward (in `find`).
        RuntimeError: `admit` without a batch of `find`.

    Examples:
        >>> import embstore
        >>> window = embstore.SlotMap(3)
        >>> batch = window.find([40, -7, 40, 99], time=0)
        >>> window.admit().tolist()
        [[40, 0], [-7, 1], [99, 2]]
        >>> batch.tolist()
        [0, 1, 0, 2]
    """

    def __init__(self, slots: int, min_used_freq_power: int = 5) -> None:
        self._map = _core.SlotMap(slots, min_used_freq_power)
        self._batch: tuple[object, Pairs] | None = None  # the engine completes it in `admit`
        self._missing = 0

    @property
    def slots(self) -> int:
        return self._map.slots

    @property
    def free_slots(self) -> int:
        return self._map.free_slots

    @property
    def last_time(self) -> int:
        """The time of the last `find`."""
        return self._map.last_time

    @property
    def bytes(self) -> int:
        return self._map.bytes

    def __len__(self) -> int:
        return self._map.size

    @property
    def missing(self) -> int:
        """How many different keys of the last `find` have no slot."""
        return self._missing

    def find(self, keys: object, time: int) -> npt.NDArray[np.int64]:
        """The slots of the keys, -1 for those that are missing until `admit` has given them one.

        `time` is the number of the batch and must not go backward.
        """
        wanted = as_keys(keys)
        out: Pairs = _core.empty_bytes(8 * wanted.n).view(np.int64)  # of pages that are there already
        self._missing = self._map.find(wanted.address, wanted.n, time, address(out))
        self._batch = (wanted, out)
        return out

    def victims(self, count: int, pinned_from: int) -> Pairs:
        """At least `count` pairs that were last used before `pinned_from`, fewer if there are no more."""
        return self._map.victims(count, pinned_from)

    def drop(self) -> None:
        """Frees the slots of the last `victims`."""
        self._map.drop()

    def admit(self) -> Pairs:
        """Gives slots to missing keys, as far as there are free ones, and returns the new pairs."""
        if self._batch is None:
            raise RuntimeError("admit completes a batch of find, but there was none")
        pairs: Pairs = self._map.admit()
        self._missing -= len(pairs)
        return pairs

    def forget(self, keys: object) -> None:
        """Frees the slots of these keys."""
        wanted = as_keys(keys)
        self._map.forget(wanted.address, wanted.n)

    def worst(self, count: int) -> Pairs:
        """Up to `count` pairs, pinned or not, those that should go first in front."""
        return self._map.worst(count)

    def used_since(self, time: int) -> Pairs:
        """The pairs whose last use was at `time` or later."""
        return self._map.used_since(time)
