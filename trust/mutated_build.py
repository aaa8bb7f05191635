"""The engine and the packages with all mutants of a sample in them, in a folder of their own.

The environment variable EMBSTORE_MUTANT has the number of the one that is on; EMBSTORE_REACH names a file
that a C++ program fills with a byte for each mutant: whether it was asked about.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trust.mutants import Mutant, with_cpp_mutants, with_python_mutants

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent  # cmake and ninja are packages of the environment
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

# Asserts and the checks of the standard libraries are on: what the tests under sanitizers would notice.
CHECKED = {"-O3": ["-O1"], "-DNDEBUG": ["-D_GLIBCXX_ASSERTIONS", "-D_FORTIFY_SOURCE=2"]}
# An error is at a place of ours, or in a function of the compiler's headers that one of ours calls.
PLACE = r"([\w.]+\.(?:cpp|inc)):(\d+):\d+"
ERROR = re.compile(rf"{PLACE}: (?:fatal )?error")
CALLED = re.compile(rf"^In function .*\n\s+inlined from .* at \S*?{PLACE}", re.MULTILINE)


def copy_sources(work: Path, numbered: dict[int, Mutant]) -> None:
    """A copy of the repository's sources with all mutants in it."""
    work.mkdir(parents=True, exist_ok=True)
    for name in ("core", "bindings", "src", "tests", "CMakeLists.txt"):
        source, copy = ROOT / name, work / name
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
        put(work / file, changed.encode())
    count = max(numbered, default=0) + 1
    put(work / "core/include/embstore/mutant.h", HEADER.encode())
    put(work / "core/src/mutant.cpp", SOURCE.replace("COUNT", str(count)).encode())
    put(work / "src/embstore_mutant.py", PYTHON_MODULE.encode())
    put(work / "src/sitecustomize.py", SITE.encode())


def put(path: Path, data: bytes) -> None:
    """Writes what is not there yet."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def build(work: Path, numbered: dict[int, Mutant]) -> dict[int, Mutant]:
    """Compiles the copy; returns the mutants without those that are no C++."""
    known = work / "no_cpp.json"
    no_cpp = set(json.loads(known.read_text())) if known.exists() else set()
    left = {number: mutant for number, mutant in numbered.items() if repr(mutant) not in no_cpp}
    has_cpp = any(not m.file.endswith(".py") for m in numbered.values())
    while True:
        copy_sources(work, left)
        if not has_cpp:
            [engine] = (ROOT / ".venv").glob("lib/python3*/site-packages/embstore/_core*.so")
            put(work / "src/embstore" / engine.name, engine.read_bytes())
            return left
        changed = {m.file for m in left.values() if not m.file.endswith(".py")}
        state, built = state_of(work), work / "cpp" / "built.sha1"
        same = built.exists() and built.read_text() == state
        errors = set() if same else syntax_errors(work, changed) or compiled(work, changed)
        if not errors:
            built.write_text(state)
            [engine] = (work / "cpp").glob("_core*.so")
            put(work / "src/embstore" / engine.name, engine.read_bytes())
            return left
        wrong = {
            number
            for number, mutant in left.items()
            for file, line in errors
            if mutant.file.endswith(file) and _covers(mutant, line)
        }
        if not wrong:
            raise RuntimeError(f"the copy in {work} does not compile: {sorted(errors)[:5]}")
        no_cpp |= {repr(left[number]) for number in wrong}
        known.write_text(json.dumps(sorted(no_cpp)))
        left = {number: mutant for number, mutant in left.items() if number not in wrong}


def _covers(mutant: Mutant, line: int) -> bool:
    text = (ROOT / mutant.file).read_text()
    first = text.count("\n", 0, mutant.start) + 1
    return first <= line <= text.count("\n", 0, mutant.end) + 1


def state_of(work: Path) -> str:
    """Changes with everything that is compiled, the tests too."""
    digest = hashlib.sha1(repr(CHECKED).encode())
    for folder in ("core", "bindings", "tests/stores"):
        for path in sorted((work / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".inc"):
                digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def syntax_errors(work: Path, changed: set[str]) -> set[tuple[str, int]]:
    """File names and lines: cheaper to find than by compiling everything. Files that were clean stay so."""
    clean = work / "cpp" / "clean.json"
    known = set(json.loads(clean.read_text())) if clean.exists() else set()
    headers = b"".join(path.read_bytes() for path in sorted((work / "core").rglob("*.h")))

    def digest(file: str) -> str:
        return hashlib.sha1((work / file).read_bytes() + headers).hexdigest()

    def of(file: str) -> list[tuple[str, str]]:
        if digest(file) in known:
            return []
        source = "core/src/kernels_isa.cpp" if file.endswith(".inc") else file
        command = ["c++", "-std=c++20", "-fsyntax-only", "-DEMBSTORE_ISA=plain", "-fmax-errors=0"]
        command += [f"-I{work}/core/include", str(work / source)]
        return ERROR.findall(subprocess.run(command, capture_output=True, text=True).stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(sorted(changed), pool.map(of, sorted(changed))))
    known |= {digest(file) for file, errors in found.items() if not errors}
    clean.parent.mkdir(exist_ok=True)
    clean.write_text(json.dumps(sorted(known)))
    return {(name, int(line)) for errors in found.values() for name, line in errors}


def compiled(work: Path, changed: set[str]) -> set[tuple[str, int]]:
    """Compiles the files with mutants, and links them with everything else as it is in build/cpp. Returns
    file names and lines of errors."""
    base, made = ROOT / "build" / "cpp", work / "cpp"
    made.mkdir(exist_ok=True)
    subprocess.run([str(BIN / "cmake"), "--build", str(base)], check=True, stdout=subprocess.DEVNULL)
    sources = {"core/src/kernels_isa.cpp" if file.endswith(".inc") else file for file in changed}
    headers = b"".join(path.read_bytes() for path in sorted((work / "core").rglob("*.h")))
    commands = [(c["file"], c["command"]) for c in json.loads((base / "compile_commands.json").read_text())]
    own = next(command for file, command in commands if file.endswith("/key_index.cpp"))
    commands.append((str(ROOT / "core/src/mutant.cpp"), own.replace("key_index.cpp", "mutant.cpp")))

    def compile_one(name: str, command: str) -> tuple[str, set[tuple[str, int]]]:
        words = [word.replace(str(ROOT / "core"), str(work / "core")) for word in shlex.split(command)]
        place = made / words[words.index("-o") + 1].replace("/", "-")
        words[words.index("-o") + 1] = str(place)
        words = [checked for word in words for checked in CHECKED.get(word, [word])]
        digest = hashlib.sha1(repr(words).encode() + (work / name).read_bytes() + headers).hexdigest()
        if name.endswith("isa.cpp"):
            included = sorted((work / "core/src").glob("*.inc"))
            digest += hashlib.sha1(b"".join(path.read_bytes() for path in included)).hexdigest()
        mark = place.with_suffix(".sha1")
        if place.exists() and mark.exists() and mark.read_text() == digest:
            return str(place), set()
        done = subprocess.run(words, cwd=base, capture_output=True, text=True)
        if done.returncode == 0:
            mark.write_text(digest)
            return str(place), set()
        errors = ERROR.findall(done.stderr) or CALLED.findall(done.stderr)
        if not errors:
            raise RuntimeError(f"{name} does not compile:\n{done.stderr[-4000:]}")
        return str(place), {(where, int(line)) for where, line in errors}

    wanted = [(os.path.relpath(file, ROOT), command) for file, command in commands]
    wanted = [(name, command) for name, command in wanted if name in (*sources, "core/src/mutant.cpp")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda item: compile_one(*item), wanted))
        errors = {error for _, found in done for error in found}
        if not errors:
            objects = [place for place, _ in done]
            targets = [path.stem for path in sorted((ROOT / "core" / "tests").glob("*_test.cpp"))]
            list(pool.map(lambda target: linked(work, target, objects), [*targets, "_core"]))
    return errors


def linked(work: Path, target: str, objects: list[str]) -> None:
    """The objects come before the engine's archive, whose members of the same functions are not used then."""
    base = ROOT / "build" / "cpp"
    command = [str(BIN / "ninja"), "-t", "commands", target]
    listed = subprocess.run(command, cwd=base, capture_output=True, text=True).stdout
    words = shlex.split(listed.splitlines()[-1])[2:-2]
    at = words.index("-o") + 1
    words[at] = str(work / "cpp" / words[at])
    at = words.index("libembstore_core.a")
    subprocess.run([*words[:at], *objects, *words[at:]], cwd=base, check=True)
