"""A soak: training that evicts, increments, dumps, compactions and a serving reader together, for a while.

    python -m trust.soak                     20 minutes
    python -m trust.soak --minutes 0.2 --keys 20000

A trainer sees zipf ids and ids that never came before, in a table that is full. Every second it appends an
increment, every 10 s it compacts the log, every 15 s a dump replaces the one before it. Another process reads
and follows the log. The most memory of both and the most disk that a period saw, and the median time of a
step and of a lookup in it, may not grow from period to period. Times are CPU time, so that other programs
hardly disturb them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import embstore
from embstore.serving import Reader

ROOT = Path(__file__).parents[1]
DIM, BATCH, IDS = 16, 4096, 256
APPEND_SECONDS, COMPACT_SECONDS, DUMP_SECONDS = 1.0, 10.0, 15.0
SAMPLES = 60  # of a run
MOST_GROWTH = 0.05  # of memory, from the first quarter after the start to the last
MOST_SLOWER = 0.25


def resident_bytes() -> int:
    """Memory that is this process's own: pages of mapped files may go at any time."""
    kib = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
    ]
    return int(kib[0]) << 10


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a compaction removed it
            continue
    return total


def serve(log: Path, folder: Path, keys: int, seconds: float) -> None:
    """The reader: looks ids up all the time; a line of JSON for each sample, until stdin ends."""
    import threading

    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    rng = np.random.default_rng(5)
    with Reader(log, cache=folder / "cache") as reader:
        reader.start(0.05)
        print(json.dumps({"ready": True}), flush=True)
        while not ended.is_set():
            times, memory, end = [], 0, time.monotonic() + seconds
            while time.monotonic() < end and not ended.is_set():
                ids = rng.integers(0, 2 * keys, IDS)
                start = time.thread_time()
                reader.find("t", ids)
                times.append(time.thread_time() - start)
                memory = max(memory, resident_bytes())
                time.sleep(0.002)
            if reader.error is not None:
                raise reader.error
            sample = {
                "bytes": memory,
                "seconds": statistics.median(times),
                "age": reader.age_seconds,
            }
            print(json.dumps(sample), flush=True)


class Trainer:
    """One table, its log and its dumps."""

    def __init__(self, folder: Path, keys: int) -> None:
        self.folder, self._keys = folder, keys
        rule = embstore.Adagrad(lr=0.05)
        self.table = embstore.Table("t", dim=DIM, optimizer=rule, max_capacity=keys, score_strategy="step")
        self.table.find_or_insert(np.arange(keys))
        self._tables = {"model": {"t": self.table}}
        self.log = embstore.IncrementLog.create(folder / "log", self._tables)
        self._rng, self._next = np.random.default_rng(3), 10 * keys
        self._due = dict.fromkeys(("append", "compact", "dump"), time.monotonic())
        self.counts = {"steps": 0, "append": 0, "compact": 0, "dump": 0}
        self._gradients = np.full((BATCH, DIM), 1e-3, np.float32)

    def step(self) -> float:
        """CPU seconds of a batch, an eighth of whose ids are new."""
        ids = self._rng.zipf(1.2, BATCH) % (2 * self._keys)
        ids[: BATCH // 8] = np.arange(self._next, self._next + BATCH // 8)
        self._next += BATCH // 8
        start = time.thread_time()
        self.table.find_or_insert(ids)
        self.table.apply_gradients(ids, self._gradients)
        seconds = time.thread_time() - start
        self.counts["steps"] += 1
        return seconds

    def chores(self) -> bool:
        """Does what is due; returns whether anything was."""
        done = False
        for name, every in (("append", APPEND_SECONDS), ("compact", COMPACT_SECONDS), ("dump", DUMP_SECONDS)):
            if time.monotonic() >= self._due[name]:
                getattr(self, name)()
                self.counts[name] += 1
                self._due[name] = time.monotonic() + every
                done = True
        return done

    def append(self) -> None:
        self.log.append(self._tables)

    def compact(self) -> None:
        self.log.compact()

    def dump(self) -> None:
        embstore.dump(self.folder / "dump", self._tables, optim=True, overwrite=True)

    def check_end(self) -> None:
        """The log, the dump and a reader have the rows of the table."""
        self.append()
        self.dump()
        keys = np.sort(self.table.rows().keys)
        expected = self.table.find(keys)[0]
        with Reader(self.folder / "log", cache=self.folder / "cache") as reader:
            served, found = reader.find("t", keys)
            if not found.all() or reader.state.rows("t") != len(keys):
                raise RuntimeError("the reader should have the keys of the table but has others")
            np.testing.assert_array_equal(served, expected)
        again = embstore.Table(self.table.options)
        embstore.load(self.folder / "dump", {"model": {"t": again}}, optim=True)
        np.testing.assert_array_equal(again.find(keys)[0], expected)
        again.close()


def quarters(series: list[float]) -> list[float]:
    """Their medians."""
    return [float(np.median(part)) for part in np.array_split(np.asarray(series), 4) if len(part)]


def grown(series: list[float]) -> float:
    """By how much the last quarter is above the second one, by medians; the first is the start."""
    medians = quarters(series)
    return medians[-1] / max(medians[:2][-1], 1e-12) - 1


def soak(minutes: float, keys: int, folder: Path, pace: float) -> dict[str, list[float]]:
    trainer = Trainer(folder, keys)
    every = max(0.25, minutes * 60 / SAMPLES)
    command = [sys.executable, "-m", "trust.soak", "--serve", str(folder), "--keys", str(keys)]
    reader = subprocess.Popen(
        [*command, "--every", str(every)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBSTORE_NUM_THREADS": "1"},
    )
    series: dict[str, list[float]] = {"trainer MB": [], "disk MB": [], "step ms": []}
    try:
        assert reader.stdout and reader.stdin and json.loads(reader.stdout.readline())["ready"]
        print(f"{'minute':>8}" + "".join(f"{name:>14}" for name in series), flush=True)
        begin = due = time.monotonic()
        while (now := time.monotonic()) < begin + 60 * minutes:
            # Both swing with dumps and compactions: a value at a moment would depend on which came last.
            steps, memory, disk = [], 0, 0
            while time.monotonic() < now + every:
                steps.append(trainer.step())
                if trainer.chores() or not disk:
                    disk = max(disk, disk_bytes(folder))
                memory = max(memory, resident_bytes())
                due += pace  # as much work a second on a busy machine, so that files are as large
                time.sleep(max(0.0, due - time.monotonic()))
            if reader.poll() is not None:
                raise RuntimeError(f"the reader ended with code {reader.returncode}")
            series["trainer MB"].append(memory / 1e6)
            series["disk MB"].append(disk / 1e6)
            series["step ms"].append(1e3 * statistics.median(steps))
            line = "".join(f"{values[-1]:>14.2f}" for values in series.values())
            print(f"{(time.monotonic() - begin) / 60:>8.2f}{line}", flush=True)
        reader.stdin.close()
        said = [json.loads(line) for line in reader.stdout]
        if reader.wait(60):
            raise RuntimeError(f"the reader failed with code {reader.returncode}")
    finally:
        reader.kill()
        reader.wait()
    series |= {
        "reader MB": [sample["bytes"] / 1e6 for sample in said],
        "lookup us": [1e6 * sample["seconds"] for sample in said],
        "age s": [sample["age"] for sample in said],
    }
    trainer.check_end()
    stats = trainer.table.stats()
    done = ", ".join(f"{count:,} {name}" for name, count in trainer.counts.items())
    print(f"{done}; {stats.evictions:,} evictions, {stats.inserts:,} inserts")
    if not stats.evictions or not all(trainer.counts.values()):
        raise RuntimeError("a soak should evict, append, compact and dump but did not: it was too short")
    trainer.table.close()
    return series


def judge(series: dict[str, list[float]], judged: bool) -> int:
    failed = 0
    for name, values in series.items():
        growth = grown(values)
        most = MOST_GROWTH if name.endswith("MB") else MOST_SLOWER
        # What stays below a few megabytes, microseconds or increments is noise.
        bad = (
            judged and growth > most and values[-1] - values[len(values) // 4] > {"disk MB": 50}.get(name, 2)
        )
        failed += bad
        medians = "".join(f"{median:>9.2f}" for median in quarters(values))
        print(f"{name:<12}quarters {medians}, grows by {100 * growth:>+6.1f} %{'  GROWS' if bad else ''}")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--keys", type=int, default=500_000, help="rows of the table")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds from step to step")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    embstore.set_num_threads(1)
    if options.serve:
        serve(options.serve / "log", options.serve, options.keys, options.every)
        return 0
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=ROOT / "build"))
    try:
        # In less than a minute a process has not yet seen all that it will need.
        failed = judge(soak(options.minutes, options.keys, folder, options.pace), judged=options.minutes >= 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("flat" if not failed else f"{failed} grow")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
