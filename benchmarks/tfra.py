"""sparse_operation_kit against TFRA 0.8.1 (tensorflow-recommenders-addons) on TensorFlow.

tfra-lookup   rows of resident ids, duplicates included, in a tf.function; dim 32
tfra-adam     lookup, a loss, its gradient and Adam on the touched rows, in a tf.function; and the resident
              memory of the process, TensorFlow itself included

TFRA needs an older TensorFlow (2.16.2), so each side is a process with an environment of its own, and the
steps are interleaved: one side waits while the other runs. Where memory is too short for both, one side is
measured after the other. TFRA's environment takes 2.3 GB under build/tfra;
it is made by `python -m benchmarks.tfra --make-environment`, and without it these benchmarks are skipped.
With 10M ids TFRA takes 14 GB for Adam.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .ids import scatter, zipf_batches
from .registry import Row, Run, register

DIM = 32
ENVIRONMENT = Path("build/tfra")
PACKAGES = ("tensorflow==2.16.2", "tf_keras==2.16.0", "tensorflow-recommenders-addons==0.8.1")
AGAINST = "TFRA 0.8.1, TensorFlow 2.16.2"
LOOKUP_MARKS, ADAM_MARKS, MEMORY_MARKS = (4.0, 5.0), (7.0, 10.0), (1 / 0.32, 1 / 0.30)
SETTLE_SECONDS = 0.01
BOTH_BYTES_A_KEY = {"lookup": 1000, "adam": 2800}  # of both sides together, at their peaks


def make_environment() -> None:
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    subprocess.run([str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", *PACKAGES], check=True)


class Side:
    """A child that answers questions, one at a time."""

    def __init__(self, which: str, folder: Path, work: str, threads: int) -> None:
        python = sys.executable if which == "ours" else str(ENVIRONMENT / "bin/python")
        program = str(Path(__file__).with_name("tfra_child.py"))
        self._process = subprocess.Popen(
            [python, program, which, str(folder), work, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{which}.log").open("w"),
            text=True,
        )
        self._log = folder / f"{which}.log"
        self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side of the comparison failed:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(run: Run, work: str, threads: int) -> tuple[float, float, int, int]:
    """Median seconds of ours and theirs, then resident bytes of ours and theirs."""
    sizes = run.sizes
    with tempfile.TemporaryDirectory(prefix="tfra-", dir=ENVIRONMENT) as name:
        folder = Path(name)
        np.save(folder / "keys.npy", scatter(np.arange(sizes.limit_keys)).numpy())
        batches = zipf_batches(sizes.limit_keys, sizes.batch, sizes.batches).keys
        np.save(folder / "batches.npy", np.stack([batch.numpy() for batch in batches]))
        gradient = np.random.default_rng(0).normal(size=(sizes.batch, DIM)).astype(np.float32)
        np.save(folder / "gradient.npy", gradient)
        both = ["ours", "theirs"]
        groups = [both] if fits(sizes.limit_keys, work) else [[which] for which in both]
        answers = [answer for group in groups for answer in measure(run, folder, work, threads, group)]
    (ours, our_rows, our_bytes), (theirs, their_rows, their_bytes) = answers
    if not np.allclose(our_rows, their_rows, rtol=1e-3, atol=1e-4):
        raise RuntimeError("both sides should hold the same rows but do not")
    return ours, theirs, our_bytes, their_bytes


def measure(
    run: Run, folder: Path, work: str, threads: int, group: list[str]
) -> list[tuple[float, np.ndarray, int]]:
    """Median seconds, rows and resident bytes of each side of the group, whose steps are interleaved."""
    sizes, sides = run.sizes, []
    try:
        for which in group:
            sides.append(Side(which, folder, work, threads))
        seconds: list[list[float]] = [[] for _ in sides]
        # Every batch once before it counts: TFRA makes the states of a key at its first step.
        warmup = sizes.warmup_rounds * sizes.batches
        for number in range(warmup + sizes.slow_rounds * sizes.batches):
            for times, side in zip(seconds, sides, strict=True):
                time.sleep(SETTLE_SECONDS)
                times.append(side.ask(number))
        return [
            (statistics.median(times[warmup:]), np.array(side.ask("rows")), side.ask("memory"))
            for times, side in zip(seconds, sides, strict=True)
        ]
    finally:
        for side in sides:
            side.stop()


def fits(keys: int, work: str) -> bool:
    """Whether both sides fit into memory together; if not, one runs after the other."""
    bytes_a_key = BOTH_BYTES_A_KEY[work]
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib * 1024 > bytes_a_key * keys


def ready() -> bool:
    if (ENVIRONMENT / "bin/python").exists():
        return True
    print("  TFRA is not installed: python -m benchmarks.tfra --make-environment", flush=True)
    return False


def rate(ids: int, ours: float, theirs: float) -> str:
    return f"ours {ids / ours / 1e6:.2f}, theirs {ids / theirs / 1e6:.2f} M ids/s"


@register("tfra-lookup")
def lookup(run: Run) -> Iterator[Row]:
    if not ready():
        return
    for threads in run.threads:
        ours, theirs, *_ = compare(run, "lookup", threads)
        work = f"TensorFlow lookup, {run.sizes.limit_keys:,} ids, dim {DIM}"
        detail = rate(run.sizes.batch, ours, theirs)
        yield Row(work, AGAINST, threads, theirs / ours, *LOOKUP_MARKS, detail)


@register("tfra-adam")
def adam(run: Run) -> Iterator[Row]:
    if not ready():
        return
    for threads in run.threads:
        ours, theirs, our_bytes, their_bytes = compare(run, "adam", threads)
        work = f"TensorFlow Adam step, {run.sizes.limit_keys:,} ids, dim {DIM}"
        yield Row(work, AGAINST, threads, theirs / ours, *ADAM_MARKS, rate(run.sizes.batch, ours, theirs))
        detail = f"ours {our_bytes / 2**30:.2f}, theirs {their_bytes / 2**30:.2f} GiB"
        yield Row(f"{work}: memory", AGAINST, threads, their_bytes / our_bytes, *MEMORY_MARKS, detail)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make-environment", action="store_true", help="install TFRA under build/tfra")
    if parser.parse_args().make_environment:
        make_environment()
    else:
        parser.print_help()
