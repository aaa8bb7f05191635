"""The serving process of the demo: follows the log, and compares what it serves with what was trained.

trainers   log/increment-000000000003/   trained-0.npz  trained-1.npz
here       Reader(log)  ──────────────►  the same keys, the same bits
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from embstore.serving import Reader

TIMEOUT_SECONDS = 120


def compare(reader: Reader, folder: Path, names: list[str]) -> dict[str, int]:
    """How many vectors of the trainers are served with the same bits, and how many rows there are."""
    trained = [np.load(file) for file in sorted(folder.glob("trained-*.npz"))]
    equal = total = served = 0
    for name in names:
        keys = np.concatenate([part[f"{name}.keys"] for part in trained])
        values = np.concatenate([part[f"{name}.values"] for part in trained])
        vectors, found = reader.find(name, keys)
        same = (vectors.view(np.uint32) == values.view(np.uint32)).all(1) & found
        equal, total, served = equal + int(same.sum()), total + len(keys), served + reader.state.rows(name)
    return {"equal": equal, "trained": total, "served": served}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder
    log, last = folder / "log", folder / "last.json"
    deadline = time.monotonic() + TIMEOUT_SECONDS

    def wait() -> None:
        if time.monotonic() > deadline:
            raise SystemExit(f"serving: nothing new in {log} for {TIMEOUT_SECONDS} s")
        time.sleep(0.02)

    while not list(log.glob("base-*")):
        wait()
    with Reader(log, cache=folder / "cache") as reader:
        reader.start(interval_seconds=0.05)
        shown = -1
        while not (last.exists() and reader.state.number == json.loads(last.read_text())["number"]):
            number = reader.state.number
            if number != shown:
                print(f"{'':8}serving process: state {number}, {reader.age_seconds:.2f} s old", flush=True)
                shown, deadline = number, time.monotonic() + TIMEOUT_SECONDS
            wait()
        proof = compare(reader, folder, json.loads(last.read_text())["names"])
        (folder / "proof.json").write_text(json.dumps(proof | {"state": reader.state.number}))


if __name__ == "__main__":
    main()
