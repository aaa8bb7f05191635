"""What this machine's memory can do, measured before the works, and how much of it a work uses.

    limits = measure((1, 2))
    limits[1].seconds(lines=40_000, copied_bytes=8 << 20)     the least time for so much traffic

`lines` are cache lines at addresses that nobody can predict (groups of the index, lines of rows), once for
each distinct id of a batch; `copied_bytes` are read and written in order (outputs, gradients). The two times
are added. A share above 1 means that part of the traffic stayed in caches.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BYTES = 512 << 20  # larger than caches
LINE_BYTES = 64
SOURCE = Path(__file__).with_name("machine.cpp")


@dataclass(frozen=True)
class Limits:
    """Of so many threads together."""

    copied_bytes_per_second: float
    random_lines_per_second: float

    def seconds(self, lines: float = 0, copied_bytes: float = 0) -> float:
        return lines / self.random_lines_per_second + copied_bytes / self.copied_bytes_per_second


def row_lines(row_bytes: int) -> int:
    return -(-row_bytes // LINE_BYTES)


def measure(threads: Sequence[int], size: int = BYTES) -> dict[int, Limits]:
    """Compiles and runs the loops of machine.cpp. Raises RuntimeError where the compiler fails."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "machine.so"
        compiler = os.environ.get("CXX", "c++")
        command = [
            compiler,
            "-O3",
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-pthread",
            str(SOURCE),
            "-o",
            str(library),
        ]
        compiled = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if compiled.returncode:
            raise RuntimeError(f"{compiler} cannot compile {SOURCE}:\n{compiled.stderr}")
        loops = ctypes.CDLL(str(library))
    for loop in (loops.copied_bytes, loops.random_lines):
        loop.restype = ctypes.c_double
        loop.argtypes = [ctypes.c_int, ctypes.c_int64]
    limits = {n: Limits(loops.copied_bytes(n, size), loops.random_lines(n, size)) for n in threads}
    if not all(limit.copied_bytes_per_second and limit.random_lines_per_second for limit in limits.values()):
        raise RuntimeError(f"there should be {2 * size:,} bytes of memory for the limits of this machine")
    return limits
