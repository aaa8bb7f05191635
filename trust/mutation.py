"""Do the tests notice when the code is wrong? Changes it in small ways and runs them.

    python -m trust.mutation                             a sample of the changes
    python -m trust.mutation --count 50 --seed 1
    python -m trust.mutation --only core/src/key_index.cpp --count 1000
    python -m trust.mutation --show 7                    the tests that reach mutant 7 of the sample

Comparisons, constants, arithmetic and calls of the index, eviction and admission, gradient sums, stores,
formats and checkpoints are changed, one at a time. A mutant is killed when a test fails, crashes or hangs.
Mutants that change nothing that a caller can see are in trust/equivalent_mutants.txt with the reason, and do
not count. Results are kept in build/mutation, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trust.mutants import Mutant, cpp_mutants, python_mutants, with_cpp_mutants, with_python_mutants

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent  # cmake and ninja are packages of the environment
WORK = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"
WANTED = 0.95
CPP = {
    "index": ("key_index.cpp", "slot_map.cpp", "hash.cpp"),
    "eviction": ("table_insert.cpp", "table_admission.cpp", "admission.cpp", "frequency_sketch.cpp")
    + ("expiry.cpp", "budget.cpp", "score_clock.cpp", "importance.cpp"),
    "reduce": ("gradient.cpp", "grouping.cpp", "segment_sum.inc"),
    "store": ("store.cpp", "tiered_store.cpp", "ssd_store.cpp", "ssd_segments.cpp", "ssd_files.cpp")
    + ("ssd_index.cpp", "ssd_checkpoint.cpp", "lower_tier.cpp", "table_store.cpp"),
    "format": ("checksum.cpp", "snapshot.cpp", "change_snapshot.cpp"),
}
PYTHON = {"format": ("src/embstore/formats", "src/embstore/checkpoint")}
# What needs a server, object storage or torch.distributed has tests of its own kind.
NOT_HERE = ("remote.py", "torch_checkpoint.py", "host_cache.py", "advising.py")
PYTHON_TESTS = ["tests/checkpoint", "tests/serving/test_reader.py"]
CPP_TESTS = ["tests/native", "tests/stores", "tests/slot_map", "tests/checkpoint/test_dump_and_load.py"]
SLOW_CPP = {"stress_test", "parallel_test"}  # they look for races, in every build
HEADER = """#pragma once
extern "C" {
__attribute__((visibility("default"))) extern int embstore_mutant, embstore_mutants;
__attribute__((visibility("default"))) extern unsigned char embstore_reached[];
}
inline bool EMBSTORE_MUTANT(int number) {
  embstore_reached[number] = 1;
  return embstore_mutant == number;
}
"""
SOURCE = """#include "embstore/mutant.h"

#include <cstdio>
#include <cstdlib>
namespace {
int Chosen() {
  const char* text = std::getenv("EMBSTORE_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}
struct AtExit {
  ~AtExit() {
    const char* path = std::getenv("EMBSTORE_REACH");
    if (path == nullptr) return;
    std::FILE* file = std::fopen(path, "wb");
    std::fwrite(embstore_reached, 1, static_cast<size_t>(embstore_mutants), file);
    std::fclose(file);
  }
} at_exit;
}  // namespace
extern "C" {
int embstore_mutant = Chosen();
int embstore_mutants = COUNT;
unsigned char embstore_reached[COUNT] = {};
}
"""
PYTHON_MODULE = """import os

CHOSEN = int(os.environ.get("EMBSTORE_MUTANT", "0"))
REACHED = set()


def EMBSTORE_MUTANT(number):
    REACHED.add(number)
    return CHOSEN == number
"""
# The tests, and the processes that they start, import the copy instead of what is installed.
SITE = """import sys

sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""

ERROR = re.compile(r"([\w.]+\.(?:cpp|inc)):(\d+):\d+: (?:fatal )?error")


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
    """Mutants by number, from 1. The same source, seed and count give the same."""
    known = equivalents()
    chosen = [f for f in files() if not only or f.startswith(tuple(only))]
    every = [m for file in chosen for m in mutants_of(file) if not is_equivalent(m, known)]
    rng = random.Random(seed)
    picked = rng.sample(every, min(count, len(every)))
    order = {mutant: at for at, mutant in enumerate(every)}
    return dict(enumerate(sorted(picked, key=order.__getitem__), 1))


# ---- the build


def copy_sources(numbered: dict[int, Mutant]) -> None:
    """A copy of the repository's sources with all mutants in it."""
    WORK.mkdir(parents=True, exist_ok=True)
    for name in ("core", "bindings", "src", "tests", "CMakeLists.txt"):
        source, copy = ROOT / name, WORK / name
        if source.is_dir():
            # Files that did not change keep their times, and are not compiled again.
            for path in source.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    put(copy / path.relative_to(source), path.read_bytes())
        else:
            put(copy, source.read_bytes())
    by_file: dict[str, dict[int, Mutant]] = {}
    for number, mutant in numbered.items():
        by_file.setdefault(mutant.file, {})[number] = mutant
    for file, own in by_file.items():
        text = (ROOT / file).read_text()
        if file.endswith(".py"):
            changed = with_python_mutants(file, text, {m: n for n, m in own.items()})
        else:
            changed = with_cpp_mutants(text, own)
        put(WORK / file, changed.encode())
    count = max(numbered, default=0) + 1
    put(WORK / "core/include/embstore/mutant.h", HEADER.encode())
    put(WORK / "core/src/mutant.cpp", SOURCE.replace("COUNT", str(count)).encode())
    put(WORK / "src/embstore_mutant.py", PYTHON_MODULE.encode())
    put(WORK / "src/sitecustomize.py", SITE.encode())


def put(path: Path, data: bytes) -> None:
    """Writes what is not there yet."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def build(numbered: dict[int, Mutant]) -> dict[int, Mutant]:
    """Compiles the copy; returns the mutants without those that are no C++."""
    known = WORK / "no_cpp.json"
    no_cpp = set(json.loads(known.read_text())) if known.exists() else set()
    left = {number: mutant for number, mutant in numbered.items() if repr(mutant) not in no_cpp}
    has_cpp = any(not m.file.endswith(".py") for m in numbered.values())
    while True:
        copy_sources(left)
        if not has_cpp:
            [engine] = (ROOT / ".venv").glob("lib/python3*/site-packages/embstore/_core*.so")
            put(WORK / "src/embstore" / engine.name, engine.read_bytes())
            return left
        changed = {m.file for m in left.values()}
        errors = syntax_errors(changed) or compiled(changed)
        if not errors:
            [engine] = (WORK / "cpp").glob("_core*.so")
            put(WORK / "src/embstore" / engine.name, engine.read_bytes())
            return left
        wrong = {
            number
            for number, mutant in left.items()
            for file, line in errors
            if mutant.file.endswith(file) and _covers(mutant, line)
        }
        if not wrong:
            raise RuntimeError(f"the copy in {WORK} does not compile: {sorted(errors)[:5]}")
        no_cpp |= {repr(left[number]) for number in wrong}
        known.write_text(json.dumps(sorted(no_cpp)))
        left = {number: mutant for number, mutant in left.items() if number not in wrong}


def _covers(mutant: Mutant, line: int) -> bool:
    text = (ROOT / mutant.file).read_text()
    first = text.count("\n", 0, mutant.start) + 1
    return first <= line <= text.count("\n", 0, mutant.end) + 1


def syntax_errors(changed: set[str]) -> set[tuple[str, int]]:
    """File names and lines: cheaper to find than by compiling everything."""
    found: set[tuple[str, int]] = set()
    for file in sorted(f for f in changed if not f.endswith(".py")):
        source = "core/src/kernels_isa.cpp" if file.endswith(".inc") else file
        command = ["c++", "-std=c++20", "-fsyntax-only", "-DEMBSTORE_ISA=plain", "-fmax-errors=0"]
        command += [f"-I{WORK}/core/include", str(WORK / source)]
        done = subprocess.run(command, capture_output=True, text=True)
        found |= {(name, int(line)) for name, line in ERROR.findall(done.stderr)}
    return found


def compiled(changed: set[str]) -> set[tuple[str, int]]:
    """Compiles the files with mutants, and links them with everything else as it is in build/cpp. Returns
    file names and lines of errors."""
    base, made = ROOT / "build" / "cpp", WORK / "cpp"
    made.mkdir(exist_ok=True)
    subprocess.run([str(BIN / "cmake"), "--build", str(base)], check=True, stdout=subprocess.DEVNULL)
    native = {file for file in changed if not file.endswith(".py")}
    sources = {"core/src/kernels_isa.cpp" if file.endswith(".inc") else file for file in native}
    objects, errors = [], set()
    commands = [(c["file"], c["command"]) for c in json.loads((base / "compile_commands.json").read_text())]
    own = next(command for file, command in commands if file.endswith("/key_index.cpp"))
    commands.append((str(ROOT / "core/src/mutant.cpp"), own.replace("key_index.cpp", "mutant.cpp")))
    for file, command in commands:
        name = os.path.relpath(file, ROOT)
        if name not in (*sources, "core/src/mutant.cpp"):
            continue
        words = [word.replace(str(ROOT / "core"), str(WORK / "core")) for word in shlex.split(command)]
        place = made / words[words.index("-o") + 1].replace("/", "-")
        words[words.index("-o") + 1] = str(place)
        words = ["-O1" if word == "-O3" else word for word in words]
        digest = hashlib.sha1(repr(words).encode() + (WORK / name).read_bytes()).hexdigest()
        if name.endswith("isa.cpp"):
            digest += hashlib.sha1(b"".join((WORK / f).read_bytes() for f in sorted(changed))).hexdigest()
        objects.append(str(place))
        mark = place.with_suffix(".sha1")
        if place.exists() and mark.exists() and mark.read_text() == digest:
            continue
        done = subprocess.run(words, cwd=base, capture_output=True, text=True)
        if done.returncode == 0:
            mark.write_text(digest)
        errors |= {(where, int(line)) for where, line in ERROR.findall(done.stderr)}
        if done.returncode and not ERROR.search(done.stderr):
            raise RuntimeError(f"{name} does not compile:\n{done.stderr[-4000:]}")
    if not errors:
        targets = [path.stem for path in sorted((ROOT / "core" / "tests").glob("*_test.cpp"))]
        for target in [*targets, "_core"]:
            linked(target, objects)
    return errors


def linked(target: str, objects: list[str]) -> None:
    """The objects come before the engine's archive, whose members of the same functions are not used then."""
    base = ROOT / "build" / "cpp"
    command = [str(BIN / "ninja"), "-t", "commands", target]
    listed = subprocess.run(command, cwd=base, capture_output=True, text=True).stdout
    words = shlex.split(listed.splitlines()[-1])[2:-2]
    at = words.index("-o") + 1
    words[at] = str(WORK / "cpp" / words[at])
    at = words.index("libembstore_core.a")
    subprocess.run([*words[:at], *objects, *words[at:]], cwd=base, check=True)


# ---- the tests


def _key(numbered: dict[int, Mutant], chosen: list[str]) -> str:
    """Of the mutants and of all tests."""
    digest = hashlib.sha1(repr((numbered, chosen)).encode())
    for folder in ("tests", "core/tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def tests_for(numbered: dict[int, Mutant], chosen: list[str]) -> list[str]:
    """The Python tests that may notice them, unless others are chosen."""
    if chosen:
        return chosen
    of_python = [mutant.file.endswith(".py") for mutant in numbered.values()]
    return (PYTHON_TESTS if any(of_python) else []) + (CPP_TESTS if not all(of_python) else [])


class Tests:
    """Knows which tests reach a mutant, and runs them."""

    def __init__(self, numbered: dict[int, Mutant], chosen: list[str]) -> None:
        self._chosen = tests_for(numbered, chosen)
        self._programs: dict[str, tuple[float, set[int]]] = {}
        self._cases: dict[str, tuple[float, set[int]]] = {}
        self._at_import: set[int] = set()
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{WORK / 'src'}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._environment.pop("EMBSTORE_MUTANT", None)
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        with (WORK / "pytest.log").open("wb") as log:
            self._runner = subprocess.Popen(
                [sys.executable, "-m", "trust.mutation_runner", str(theirs), *self._chosen],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[theirs],
            )
        os.close(theirs)
        # Finding out takes minutes; a run that was stopped has it already.
        file, key = WORK / "reaching.json", _key(numbered, self._chosen)
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get("key") == key:
            self._programs, self._cases = (
                {name: (seconds, set(reached)) for name, (seconds, reached) in known[kind].items()}
                for kind in ("programs", "cases")
            )
            self._at_import = set(known["import"])
            return
        if any(not m.file.endswith(".py") for m in numbered.values()):
            self._reach_of_programs()
        self._reach_of_cases()
        found = {"key": key, "programs": self._programs, "cases": self._cases, "import": self._at_import}
        file.write_text(json.dumps(found, default=sorted))

    def close(self) -> None:
        assert self._runner.stdin
        self._runner.stdin.close()
        self._runner.wait(30)

    def _ask(self, **order: Any) -> str:
        assert self._runner.stdin
        self._runner.stdin.write(json.dumps(order) + "\n")
        self._runner.stdin.flush()
        return str(json.loads(self._answers.readline())["end"])

    def _reach_of_programs(self) -> None:
        for program in sorted((WORK / "cpp").glob("*_test")):
            if program.name in SLOW_CPP:
                continue
            out = WORK / "reach.bin"
            start = time.perf_counter()
            self._program(program.name, 0, 600, {"EMBSTORE_REACH": str(out)})
            seconds = time.perf_counter() - start
            self._programs[program.name] = (seconds, {i for i, cell in enumerate(out.read_bytes()) if cell})

    def _reach_of_cases(self) -> None:
        out = WORK / "reach.json"
        out.unlink(missing_ok=True)
        self._ask(reach=str(out))
        every = json.loads(out.read_text())
        self._at_import = set(every.pop("import")["reached"])
        for name, found in every.items():
            self._cases[name] = (found["seconds"], set(found["reached"]))

    def _program(self, name: str, mutant: int, seconds: float, more: dict[str, str] | None = None) -> str:
        environment = {**os.environ, "EMBSTORE_MUTANT": str(mutant), **(more or {})}
        try:
            done = subprocess.run(
                [str(WORK / "cpp" / name)],
                env=environment,
                cwd=WORK / "cpp",
                timeout=seconds,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return "hung"
        return "passed" if done.returncode == 0 else "failed" if done.returncode > 0 else "died"

    def reaching(self, number: int) -> tuple[list[str], list[str]]:
        """C++ programs and Python tests that reach a mutant, the quickest first."""
        programs = [name for name, (_, reached) in self._programs.items() if number in reached]
        cases = [name for name, (_, reached) in self._cases.items() if number in reached]
        programs.sort(key=lambda name: self._programs[name][0])
        cases.sort(key=lambda name: self._cases[name][0])
        return programs, cases

    def run(self, number: int) -> str:
        """What noticed the mutant, or "survived"."""
        programs, cases = self.reaching(number)
        for name in programs:
            usual = self._programs[name][0]
            if (end := self._program(name, number, 10 + 5 * usual)) != "passed":
                return f"{name} {end}"
        if number in self._at_import:
            return self._run_alone(number)
        left = list(cases)
        while left:
            # A few quick tests first: most mutants fail one of them.
            now, left = left[:25], left[25:]
            usual = sum(self._cases[name][0] for name in now)
            if (end := self._ask(mutant=number, tests=now, seconds=15 + 5 * usual)) != "passed":
                return f"Python tests {end}"
        return "survived" if programs or cases else "not reached"

    def _run_alone(self, number: int) -> str:
        """For a mutant that importing asks about: a new process, and all of the tests."""
        command = [sys.executable, "-m", "pytest", "-xq", "-o", f"cache_dir={WORK}/pytest"]
        command += ["-m", "not slow and not multirank", *self._chosen]
        environment = {**self._environment, "EMBSTORE_MUTANT": str(number)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=600)
        except subprocess.TimeoutExpired:
            return "Python tests hung"
        return "survived" if done.returncode == 0 else "Python tests failed"


def main(arguments: list[str] | None = None) -> int:
    global WORK
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
    options = parser.parse_args(arguments)
    WORK = options.folder.resolve()
    for name in options.only:
        if not any(file.startswith(name) for file in files()):
            parser.error(f"--only should name one of {', '.join(files())} but is: {name}")
    numbered = build(sampled(options.only, options.count, options.seed))
    results_file = WORK / "results.json"
    results = {} if options.fresh or not results_file.exists() else json.loads(results_file.read_text())
    tests = Tests(numbered, options.tests)
    survivors, killed = [], 0
    try:
        if options.show:
            for number in options.show:
                print(
                    numbered[number].name,
                    *(name for kind in tests.reaching(number) for name in kind),
                    sep="\n  ",
                )
            return 0
        for number, mutant in numbered.items():
            key = hashlib.sha1(f"{mutant} {(ROOT / mutant.file).read_text()}".encode()).hexdigest()
            if results.get(key, "survived") in ("survived", "not reached"):
                results[key] = tests.run(number)
                results_file.write_text(json.dumps(results, indent=0))
            if results[key] in ("survived", "not reached"):
                survivors.append(mutant)
                print(f"{results[key]}: {mutant.name}\n    {mutant.code}", flush=True)
            else:
                killed += 1
    finally:
        tests.close()
    share = killed / max(1, len(numbered))
    print(f"{killed} of {len(numbered)} mutants killed ({100 * share:.1f} %), {len(survivors)} survived")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
