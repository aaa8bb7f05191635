"""The demo: a click model on two ranks, from the first id to a served vector.

    python -m examples.demo                         # the click stream of examples/click_stream.py
    python -m examples.demo --data ratings.csv      # MovieLens: user, item, rating, timestamp
    python -m examples.demo --data day_0            # Criteo: label, 13 numbers, 26 hex categories, tabs

1. Trains on two ranks with TorchRec, beside the hashing trick in the same memory and room for all ids.
2. Dumps, starts again from the dump in new processes, and publishes increments while it trains on.
3. Meanwhile another process serves from these increments; at the end its vectors equal the trained ones.

It prints a short table and writes report.html.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from examples.click_stream import auc
from examples.demo.miss_ratio import curve
from examples.demo.report import NAMES, Result, memory, page
from examples.demo.sources import open_source

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
MARK = ".embstore-demo"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="a file of MovieLens or Criteo; default: the click stream")
    parser.add_argument("--steps", type=int, default=500, help="batches, at most (default: %(default)s)")
    parser.add_argument("--capacity", type=int, help="rows of each table (default: a part of the ids)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="for the dump, log and report"
    )
    options = parser.parse_args()
    for name, low in (("steps", 50), ("capacity", 128 * options.ranks), ("ranks", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            parser.error(f"--{name} should be at least {low} but is: {value}")
    return options


def empty(folder: Path) -> None:
    """Removes what an earlier demo left; a folder of anybody else is refused."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise SystemExit(f"--folder should be new or of an earlier demo but is: {folder}")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def torchrun(options: argparse.Namespace, part: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={options.ranks}",
    ]
    command += ["-m", "examples.demo.train", "--part", part, "--folder", str(options.folder)]
    command += ["--steps", str(options.steps), "--seed", str(options.seed)]
    command += ["--data", options.data] if options.data else []
    command += ["--capacity", str(options.capacity)] if options.capacity else []
    if subprocess.run(command, cwd=ROOT, env=ENVIRONMENT).returncode:
        raise SystemExit(f"the {part} part of the training failed; see above")


def serve_and_restart(options: argparse.Namespace) -> dict:
    """Trains on from the dump while another process serves; returns what that process has compared."""
    command = [sys.executable, "-m", "examples.demo.serve", "--folder", str(options.folder)]
    server = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT)
    try:
        torchrun(options, "second")
        if server.wait(timeout=120):
            raise SystemExit("the serving process failed; see above")
    finally:
        server.kill()
        server.wait()
    return json.loads((options.folder / "proof.json").read_text())


def compare(folder: Path, facts: dict, metrics: list[dict]) -> dict[str, Result]:
    scores = np.load(folder / "scores.npz")
    half = len(scores["clicks"]) // 2
    last = [m for m in metrics if m["step"] <= facts["steps"]][-1]
    rows = {
        "dynamic": last["rows"],
        "hashing": facts["hashed_rows"] * len(facts["names"]),
        "all": last["rows_all"],
    }
    return {
        name: Result(auc(scores[name][half:], scores["clicks"][half:]), rows[name], facts["bytes"][name])
        for name in NAMES
    }


def main() -> None:
    options, start = parse(), time.monotonic()
    options.folder = options.folder.resolve()
    options.data = options.data and str(Path(options.data).resolve())
    source = open_source(options.data, options.steps, options.seed)
    empty(options.folder)
    torchrun(options, "first")
    proof = serve_and_restart(options)
    facts = json.loads((options.folder / "first.json").read_text())
    metrics = [json.loads(line) for line in (options.folder / "metrics.jsonl").read_text().splitlines()]
    results = compare(options.folder, facts, metrics)

    print(f"\n{proof['equal']:,} of {proof['trained']:,} served vectors equal the trained ones, bit for bit")
    print(f"\n{'':16}{'AUC':>8}{'rows':>12}{'memory':>14}")
    for name, result in results.items():
        print(f"{NAMES[name]:16}{result.auc:8.4f}{result.rows:12,}{memory(result.bytes):>14}")
    print(f"AUC of steps {facts['steps'] // 2 + 1} to {facts['steps']}, each predicted before it is learned")

    columns = [np.concatenate(parts) for parts in zip(*(source.next()[0] for _ in range(facts["steps"])))]
    last_use = np.load(options.folder / "last_use.npy")
    command = shlex.join(["python", "-m", "examples.demo", *sys.argv[1:]])
    report = options.folder / "report.html"
    text = page(facts, metrics, results, last_use, curve(columns), proof, command, time.monotonic() - start)
    report.write_text(text, encoding="utf-8")
    print(f"\nreport: {report}")
    if not proof["equal"] == proof["trained"] == proof["served"]:
        raise SystemExit("served vectors differ from trained ones")


if __name__ == "__main__":
    main()
