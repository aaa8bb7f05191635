"""Do the tests notice when the code is wrong? Changes it in small ways and runs them.

    python -m trust.mutation                             a sample of the changes
    python -m trust.mutation --count 50 --seed 1
    python -m trust.mutation --only core/src/key_index.cpp --count 1000
    python -m trust.mutation --show 7                    the tests that reach mutant 7 of the sample

Comparisons, constants, arithmetic and calls of the index, eviction and admission, gradient sums, stores,
formats and checkpoints are changed, one at a time. A mutant is killed when a test fails, crashes or hangs.
Mutants that change nothing that a caller can see are in trust/equivalent_mutants.txt with the reason, and do
not count. What noticed a mutant is kept in build/mutation: a run that was stopped goes on where it was, and
the next one only asks again where code or tests have changed. trust/noticed_mutants.json has the test that
noticed each, which a run in a fresh clone tries first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trust.mutants import Mutant, cpp_mutants, python_mutants
from trust.mutated_build import build
from trust.mutation_tests import NOT_REACHED, SURVIVED, Tests

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"
NOTICED = Path(__file__).parent / "noticed_mutants.json"  # the test that noticed each, tried first again
WANTED = 0.95
COSTS = (0.2, 0.6, 2.0, 10.0, math.inf)  # all mutants meet the cheapest tests first, then the next ones
CPP = {
    "index": (
        "key_index.cpp",
        "away_keys.cpp",
        "index_growth.cpp",
        "overflow_area.cpp",
        "probe.inc",
        "slot_map.cpp",
        "hash.cpp",
    ),
    "eviction": ("table_insert.cpp", "table_victims.cpp", "victim_queues.cpp", "victims.inc")
    + (
        "pinned_rows.cpp",
        "row_heap.cpp",
        "table_admission.cpp",
        "admission.cpp",
        "frequency_sketch.cpp",
        "expiry.cpp",
    )
    + ("budget.cpp", "score_clock.cpp", "importance.cpp"),
    "reduce": ("gradient.cpp", "grouping.cpp", "segment_sum.inc"),
    "store": ("store.cpp", "tiered_store.cpp", "ssd_store.cpp", "ssd_segments.cpp", "ssd_files.cpp")
    + ("ssd_compaction.cpp", "ssd_index.cpp", "ssd_checkpoint.cpp", "lower_tier.cpp", "table_store.cpp"),
    "format": ("checksum.cpp", "snapshot.cpp", "snapshot_below.cpp", "change_snapshot.cpp"),
}
PYTHON = {"format": ("src/embstore/formats", "src/embstore/checkpoint")}
# What needs a server, object storage or torch.distributed has tests of its own kind.
NOT_HERE = ("remote.py", "torch_checkpoint.py", "host_cache.py", "advising.py")
PYTHON_TESTS = ["tests/checkpoint", "tests/serving/test_reader.py", "tests/native/test_budgets.py"]
PYTHON_TESTS += ["tests/trust/test_forged_files.py"]
PYTHON_TESTS += [f"tests/faces/dynamicemb/test_{name}.py" for name in ("layout_v2", "tables_v2")]
CPP_TESTS = ["tests/native", "tests/stores", "tests/slot_map", "tests/checkpoint/test_dump_and_load.py"]


def files() -> list[str]:
    """The sources that are changed, relative to the repository."""
    found = [f"core/src/{name}" for names in CPP.values() for name in names]
    for folders in PYTHON.values():
        for folder in folders:
            found += sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob("*.py"))
    return [file for file in found if not file.endswith(("__init__.py", *NOT_HERE))]


def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_text()
    return python_mutants(file, text) if file.endswith(".py") else list(cpp_mutants(file, text))


def equivalents() -> list[tuple[str, str, str]]:
    """(file, change or "*", line of code) of the mutants that no caller can notice."""
    found = []
    for line in EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []:
        if line.startswith("core/") or line.startswith("src/"):
            file, change, code = (part.strip() for part in line.split(" | ", 2))
            found.append((file, change, code))
    return found


def is_equivalent(mutant: Mutant, known: list[tuple[str, str, str]]) -> bool:
    return any(
        mutant.file == file and change in ("*", mutant.change) and mutant.code == code
        for file, change, code in known
    )


def sampled(only: list[str], count: int, seed: int) -> dict[int, Mutant]:
    """Mutants by number, from 1: those whose names have the smallest hashes, so that a change of some lines
    changes only their part of the sample."""
    chosen = [f for f in files() if not only or f.startswith(tuple(only))]
    every = dict(enumerate((m for file in chosen for m in mutants_of(file)), 1))
    names = identities(every)
    order = sorted(every, key=lambda number: hashlib.sha1(f"{seed} {names[number]}".encode()).digest())
    return dict(enumerate((every[number] for number in sorted(order[:count])), 1))


def identities(numbered: dict[int, Mutant]) -> dict[int, str]:
    """Names that stay when other lines of the file change."""
    seen: Counter[str] = Counter()
    names = {}
    for number, mutant in numbered.items():
        name = f"{mutant.file} | {mutant.change} | {mutant.code}"
        names[number] = f"{name} | {seen[name]}"
        seen[name] += 1
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", default=[], help="a source file or folder; may be repeated"
    )
    parser.add_argument(
        "--tests", action="append", default=[], help="Python tests to run instead of the usual"
    )
    parser.add_argument("--show", type=int, action="append", help="tests that reach this mutant")
    parser.add_argument("--folder", type=Path, default=WORK, help="for the copy and the results")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args(arguments)
    for name in options.only:
        if not any(file.startswith(name) for file in files()):
            parser.error(f"--only should name one of {', '.join(files())} but is: {name}")
    work = options.folder.resolve()
    sample = build(work, sampled(options.only, options.count, options.seed))
    known = equivalents()
    numbered = {number: mutant for number, mutant in sample.items() if not is_equivalent(mutant, known)}
    names = identities(sample)
    chosen = options.tests or usual_tests(sample)
    with Tests(work, sample, chosen, options.jobs) as tests:
        if options.show:
            for number in options.show:
                print(numbered[number].name, *tests.reaching(number), sep="\n  ")
            return 0
        ends = examine(work, tests, numbered, names, options.jobs, options.fresh)
    survivors = [number for number in numbered if ends[number] in (SURVIVED, NOT_REACHED)]
    for number in survivors:
        print(f"{number} {ends[number]}: {numbered[number].name}\n    {numbered[number].code}")
    killed = len(numbered) - len(survivors)
    for kind, of_python in (("C++", False), ("Python", True)):
        own = [number for number, mutant in numbered.items() if mutant.file.endswith(".py") == of_python]
        left = sum(number in survivors for number in own)
        print(f"{kind}: {len(own) - left} of {len(own)} mutants killed")
    share = killed / max(1, len(numbered))
    print(f"{len(sample) - len(numbered)} more are equivalent")
    print(f"{killed} of {len(numbered)} mutants killed ({100 * share:.1f} %), {len(survivors)} survived")
    return 0 if share >= WANTED else 1


def usual_tests(numbered: dict[int, Mutant]) -> list[str]:
    of_python = [mutant.file.endswith(".py") for mutant in numbered.values()]
    return (PYTHON_TESTS if any(of_python) else []) + (CPP_TESTS if not all(of_python) else [])


def examine(
    work: Path, tests: Tests, numbered: dict[int, Mutant], names: dict[int, str], jobs: int, fresh: bool
) -> dict[int, str]:
    """What noticed each mutant. Where the code is the same, only tests that have changed since the last time
    are run again; otherwise what noticed it then comes first."""
    file = work / "noticed.json"
    known = {} if fresh or not file.exists() else json.loads(file.read_text())
    likely = {} if fresh or not NOTICED.exists() else json.loads(NOTICED.read_text())
    codes = {  # before they are run: a file may change meanwhile
        file: hashlib.sha1((ROOT / file).read_bytes()).hexdigest()
        for file in {mutant.file for mutant in numbered.values()}
    }
    ends: dict[int, str] = {}
    lock = threading.Lock()

    def one(number: int, cost: float) -> None:
        name, mutant = names[number], numbered[number]
        before = known.get(name, {})
        code = codes[mutant.file]
        end, test = before.get("end"), before.get("test") or likely.get(name)
        same = before.get("code") == code
        was_noticed = same and end not in (SURVIVED, NOT_REACHED)
        if not was_noticed or before["states"].get(test) != tests.state(test):
            end, test = tests.run(number, test, before["states"] if same else {}, cost)
        states = {t: tests.state(t) for t in ([test] if test else tests.reaching(number, cost))}
        with lock:
            ends[number] = end
            known[name] = {"end": end, "test": test, "code": code, "states": states}
            file.write_text(json.dumps(known, indent=0))

    with ThreadPoolExecutor(jobs) as pool:
        for cost in COSTS:
            left = [n for n in numbered if ends.get(n) in (None, SURVIVED, NOT_REACHED)]
            list(pool.map(one, left, [cost] * len(left)))
            killed = sum(end not in (SURVIVED, NOT_REACHED) for end in ends.values())
            told = f"  {killed} of {len(numbered)} by tests that cost up to {cost} s"
            print(told, file=sys.stderr, flush=True)
    found = likely | {name: known[name]["test"] for name in map(names.get, numbered)}
    noticed = {name: test for name, test in found.items() if test}
    NOTICED.write_text(json.dumps(noticed, indent=0, sort_keys=True) + "\n")
    return ends


if __name__ == "__main__":
    sys.exit(main())
