"""What `embstore doctor` finds out about this machine and this installation.

embstore         0.1.0
Python           3.11.7
instruction set  avx2
extras           torch, redis, cli
missing extras   plot
lookup           21.4 M keys/s (65,536 of 200,000 rows, dim 32)
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import embstore

PACKAGES = ("numpy", "torch", "torchrec", "fbgemm-gpu-cpu", "tensorflow-cpu")
NOT_FOR_USERS = ("bench", "dev")
ROWS, BATCH, DIM = 200_000, 65_536, 32


def examine() -> dict[str, Any]:
    """Everything as plain values, ready for JSON. Imports none of the optional packages."""
    total, available = _memory()
    return {
        "embstore": embstore.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name.removesuffix("-cpu"): _version(name) for name in PACKAGES},
        "instruction_set": embstore.isa(),
        "threads": embstore.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total,
        "available_memory_bytes": available,
        "free_disk_bytes": shutil.disk_usage(".").free,
        "extras": _extras(),
        "lookup": _time_lookups(),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts for people: a name and a value on each line, at most 80 columns."""
    packages = {name: version or "not installed" for name, version in facts["packages"].items()}
    missing = [extra for extra, packages in facts["extras"].items() if packages]
    present = [extra for extra in facts["extras"] if extra not in missing]
    lookup = facts["lookup"]
    shown = {
        "embstore": facts["embstore"],
        "Python": f"{facts['python']} on {facts['platform']}",
        **packages,
        "instruction set": facts["instruction_set"],
        "threads": f"{facts['threads']} on {facts['cores']} cores",
        "memory": f"{_gib(facts['available_memory_bytes'])} available of {_gib(facts['memory_bytes'])}",
        "disk": f"{_gib(facts['free_disk_bytes'])} free in the current folder",
        "extras": ", ".join(present) or "none",
        "missing extras": ", ".join(missing) or "none",
        "lookup": f"{lookup['keys_per_second'] / 1e6:.1f} M keys/s "
        f"({lookup['batch']:,} of {lookup['rows']:,} rows, dim {lookup['dim']})",
    }
    return [
        line
        for name, value in shown.items()
        for line in textwrap.wrap(f"{name:<16} {value}", 80, subsequent_indent=" " * 17)
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _version(distribution: str) -> str | None:
    """Of a package, or of its build for GPUs; None where neither is installed."""
    for name in (distribution, distribution.removesuffix("-cpu")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _extras() -> dict[str, list[str]]:
    """The packages that each extra lacks, by the requirements that embstore was installed with."""
    lacks: dict[str, list[str]] = {}
    for requirement in metadata.requires("embstore") or []:
        found = re.match(r"""([\w.-]+).*\bextra\s*==\s*['"]([\w-]+)['"]""", requirement)
        if found is None or found[2] in NOT_FOR_USERS:
            continue
        package, extra = found.groups()
        lacks.setdefault(extra, [])
        if _version(package) is None:
            lacks[extra].append(package)
    return lacks


def _memory() -> tuple[int, int]:
    """Bytes in all and available, within the limit of the cgroup."""
    kib = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max": no limit
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, available
    return min(total, limit), max(0, min(available, limit - used))


def _time_lookups(repeats: int = 9) -> dict[str, int]:
    """The median speed of `Table.find` on a table that does not fit the caches."""
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, ROWS)
    table = embstore.Table("doctor", dim=DIM)
    table.find_or_insert(keys)
    seconds = []
    for _ in range(repeats):
        wanted = rng.choice(keys, BATCH)
        start = time.perf_counter()
        table.find(wanted)
        seconds.append(time.perf_counter() - start)
    speed = round(BATCH / statistics.median(seconds))
    return {"keys_per_second": speed, "batch": BATCH, "rows": ROWS, "dim": DIM}
