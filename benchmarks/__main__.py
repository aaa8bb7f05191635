"""The command: runs the works that were asked for, prints the table, writes it as JSON."""

import argparse
import dataclasses
import fnmatch
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from . import PROGRAMS
from . import __doc__ as RULES
from .machine import BYTES, measure
from .other_load import OtherLoad
from .registry import QUICK, WORKS, Row, Run, Sizes

FULL_JSON = Path("build/bench.json")
PARTIAL_JSON = Path("build/bench-partial.json")  # so that a partial run does not replace a full one
MOST_OTHER_CORES = 0.1
LINE = "{:<58} {:<40} {:>7} {:>7} {:>6} {:>5}  {:<5} {:>8}  {}"
QUICK_BYTES = 32 << 20


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=RULES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the names of the works and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="a name or pattern; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--threads", default="1,2", metavar="1,2", help="numbers of threads to run with")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args(arguments)


def selected(patterns: list[str] | None) -> list[str]:
    if not patterns:
        return list(WORKS)
    for pattern in patterns:
        if not fnmatch.filter(WORKS, pattern):
            raise SystemExit(f"--only should name a work but is: {pattern} (see --list)")
    return [name for name in WORKS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def show(row: Row) -> None:
    wanted, goal = (("-" if mark is None else f"{mark:.3g}x") for mark in (row.wanted, row.goal))
    ratio = f"{row.ratio:.2f}x"
    share = "" if row.share is None else f"{row.share:.0%}"
    print(
        LINE.format(row.work, row.against, row.threads, ratio, wanted, goal, row.verdict, share, row.detail),
        flush=True,
    )


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


def main() -> int:
    options = parse()
    for program in PROGRAMS:
        importlib.import_module(f".{program}", __package__)
    names = selected(options.only)
    if options.list:
        print("\n".join(names))
        return 0
    threads = tuple(int(count) for count in options.threads.split(","))
    limits = measure(threads, QUICK_BYTES if options.quick else BYTES)
    run = Run(threads, QUICK if options.quick else Sizes(), limits)
    partial = bool(options.only) or options.quick or threads != (1, 2)
    path = options.out or (PARTIAL_JSON if partial else FULL_JSON)

    print(f"{os.cpu_count()} cores{', quick: figures mean nothing' if options.quick else ''}")
    for count, limit in limits.items():
        copied, lines = limit.copied_bytes_per_second / 1e9, limit.random_lines_per_second / 1e6
        print(f"memory with {count} thread(s): copies {copied:.1f} GB/s, reads {lines:.0f} M random lines/s")
    print(LINE.format("work", "against", "threads", "ratio", "wanted", "goal", "", "of limit", ""))
    rows: list[Row] = []
    failed: list[str] = []
    for name in names:
        others = OtherLoad()
        try:
            found = []
            for row in WORKS[name](run):
                show(row)
                found.append(row)
            rows += found
        except Exception:  # the other works should still run; the exit code tells
            failed.append(name)
            print(f"{name} failed, its rows do not count:", flush=True)
            traceback.print_exc()
        if others.cores() > MOST_OTHER_CORES:
            print(f"  {name}: others took {others.cores():.2f} cores meanwhile; run it again without them")
        gc.collect()
        write(path, rows)
    short = sum(row.verdict == "SHORT" for row in rows)
    print(f"{len(rows)} rows, {short} short of what is wanted, in {path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
