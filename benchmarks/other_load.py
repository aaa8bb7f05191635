"""How much of the machine was taken by others: a busy core makes figures of 2 threads worthless.

A peer that waits for all its threads at a barrier is slowed down far more than one core in two would suggest.
"""

import os
import time
from pathlib import Path


class OtherLoad:
    """Cores in use, since it was made, by anything but this process and its finished children."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first = self._others_seconds()

    def cores(self) -> float:
        return max(0.0, self._others_seconds() - self._first) / max(time.monotonic() - self._start, 1e-9)

    @staticmethod
    def _others_seconds() -> float:
        own = os.times()
        # cpu user nice system idle iowait irq softirq steal; all but idle and iowait could not be had
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]
        own_seconds = own.user + own.system + own.children_user + own.children_system
        return busy / os.sysconf("SC_CLK_TCK") - own_seconds
