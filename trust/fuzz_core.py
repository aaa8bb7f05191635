"""Fuzzes the readers of the C++ engine: replies of Redis, index files of serving, folders of SSD stores.

    python -m trust.fuzz_core                    10 minutes for each reader
    python -m trust.fuzz_core --seconds 60

It needs clang with libFuzzer (Debian: clang, libclang-rt-14-dev), and does nothing without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trust.fuzz import MEMORY

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "fuzz-core"
READERS = ("redis", "index", "store")
FLAGS = ("-timeout=20", "-rss_limit_mb=2000", "-max_len=4096", "-print_final_stats=1", "-use_value_profile=1")


def build(log: Path) -> bool:
    """Compiles the engine and trust/fuzz_core.cpp with clang, libFuzzer, ASan and UBSan."""
    options = [
        "-DCMAKE_CXX_COMPILER=clang++",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g",
        "-DEMBSTORE_SANITIZE=address;undefined;fuzzer-no-link",
        "-DEMBSTORE_BUILD_FUZZER=ON",
    ]
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *options]
    BUILD.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        for command in (configure, ["cmake", "--build", str(BUILD), "--target", "fuzz_core"]):
            if subprocess.run(command, stdout=output, stderr=output).returncode:
                return False
    return True


def fuzz(reader: str, seconds: int) -> bool:
    """Runs one reader; says what happened in a line, and returns whether all was well."""
    corpus, log = BUILD / f"corpus-{reader}", BUILD / f"{reader}.log"
    corpus.mkdir(exist_ok=True)
    command = [str(BUILD / "fuzz_core"), str(corpus), f"-max_total_time={seconds}", *FLAGS]
    environment = {**os.environ, "EMBSTORE_FUZZ": reader, "ASAN_OPTIONS": "handle_sigbus=0"}
    memory = MEMORY if os.path.isdir(MEMORY) else None
    with log.open("w+", errors="replace") as output, tempfile.TemporaryDirectory(dir=memory) as files:
        environment["EMBSTORE_FUZZ_FOLDER"] = files
        command.append(f"-artifact_prefix={BUILD}/{reader}-")
        process = subprocess.run(command, env=environment, stdout=output, stderr=output)
        output.seek(0)
        counts = [line.split()[-1] for line in output if "number_of_executed_units" in line]
    end = "no finding" if process.returncode == 0 else f"FINDING: see {log}"
    print(f"{reader:<10}{int(counts[-1]) if counts else 0:,} inputs in {seconds} s, {end}", flush=True)
    return process.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="of each reader, by the clock")
    parser.add_argument("--reader", action="append", choices=READERS, help="may be repeated (default: all)")
    options = parser.parse_args(arguments)
    if shutil.which("clang++") is None:
        print(
            "clang++ is missing: the readers of the engine are not fuzzed (Debian: clang, libclang-rt-14-dev)"
        )
        return 0
    log = BUILD.with_suffix(".log")
    if not build(log):
        print(f"the build failed: see {log}", file=sys.stderr)
        return 2
    return 0 if all([fuzz(reader, options.seconds) for reader in options.reader or READERS]) else 1


if __name__ == "__main__":
    sys.exit(main())
