"""Knows which tests reach a mutant, and runs them: what noticed it the last time first, then the quickest.

A test that takes several times its usual CPU time, or whose threads all wait, hangs, and so has noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trust.mutants import Mutant
from trust.mutation_runner import MOST_BYTES, Watch

ROOT = Path(__file__).parents[1]
SLOW_CPP = {"stress_test", "parallel_test"}  # they look for races, in every build
WIDE_CPP = {"row_heap_test"}  # reserves more addresses than MOST_BYTES
SENTENCE = re.compile(r"^TEST\((.*?)\) \{", re.MULTILINE | re.DOTALL)
SURVIVED, NOT_REACHED = "survived", "not reached"
AT_ONCE = 8  # Python tests in one fork
CASES_SECONDS = 15  # CPU time of the Python tests that a mutant has to survive


class Runner:
    """A process that has imported and collected the Python tests, and forks for every order."""

    def __init__(self, work: Path, chosen: list[str], log: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{work / 'src'}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("EMBSTORE_MUTANT", None)
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        with (work / log).open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trust.mutation_runner", str(theirs), str(work), *chosen],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                pass_fds=[theirs],
            )
        os.close(theirs)

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._answers.readline()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


class Tests:
    """Python tests have their node id, and so have those of C++: core/tests/store_test.cpp::A sentence."""

    def __init__(self, work: Path, numbered: dict[int, Mutant], chosen: list[str], jobs: int) -> None:
        self._work, self._numbered = work, numbered
        self._states = {  # before they are run: a file may change meanwhile
            path.relative_to(ROOT).as_posix(): hashlib.sha1(path.read_bytes()).hexdigest()
            for folder in ("tests", "core/tests")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".cpp")
        }
        self._sentences: dict[str, tuple[float, set[int]]] = {}  # tests of C++
        self._cases: dict[str, tuple[float, set[int]]] = {}
        self._at_import: set[int] = set()
        self._runners: queue.Queue[Runner] = queue.Queue()
        self._every = [Runner(work, chosen, f"pytest-{number}.log") for number in range(jobs)]
        for runner in self._every:
            self._runners.put(runner)
        # Finding out takes minutes, so what is known stays as long as the mutants and the test do.
        file, key = work / "reaching.json", hashlib.sha1(repr((numbered, chosen)).encode()).hexdigest()
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get("key") != key:
            known = {"sentences": {}, "cases": {}, "import": []}
        self._at_import = set(known["import"])
        for kind, own in (("sentences", self._sentences), ("cases", self._cases)):
            for name, (seconds, reached, state) in known[kind].items():
                if state == self.state(name):
                    own[name] = (seconds, set(reached))
        beside = threading.Thread(target=self._reach_of_cases)
        beside.start()
        if any(not m.file.endswith(".py") for m in numbered.values()):
            self._reach_of_sentences()
        beside.join()
        found = {"key": key, "import": self._at_import}
        for kind, own in (("sentences", self._sentences), ("cases", self._cases)):
            found[kind] = {name: (*values, self.state(name)) for name, values in own.items()}
        file.write_text(json.dumps(found, default=sorted))

    def __enter__(self) -> Tests:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self._every:
            runner.close()

    def _reach_of_sentences(self) -> None:
        for program in sorted((self._work / "cpp").glob("*_test")):
            file = f"core/tests/{program.name}.cpp"
            if program.name in SLOW_CPP or not (ROOT / file).exists():
                continue
            for sentence in SENTENCE.findall((ROOT / file).read_text()):
                test = f"{file}::{' '.join(sentence.split())}"
                if test in self._sentences:
                    continue
                out = self._work / "reach.bin"
                out.unlink(missing_ok=True)
                end, seconds = self._run_sentence(test, 0, 600, {"EMBSTORE_REACH": str(out)})
                if end != "passed":
                    raise RuntimeError(f"{test} fails without a mutant: {end}")
                self._sentences[test] = (seconds, {i for i, cell in enumerate(out.read_bytes()) if cell})

    def _reach_of_cases(self) -> None:
        out = self._work / "reach.json"
        out.unlink(missing_ok=True)
        known = {name.split("::")[0] for name in self._cases}
        self._every[0].ask(reach=str(out), but=sorted(known))
        every = json.loads(out.read_text())
        self._at_import = set(every.pop("import")["reached"])
        for name, found in every.items():
            self._cases[name] = (found["seconds"], set(found["reached"]))

    def _run_sentence(
        self, test: str, mutant: int, cpu_seconds: float, more: dict[str, str] | None = None
    ) -> tuple[str, float]:
        """How one test of a C++ program ends, and its CPU time."""
        file, _, sentence = test.partition("::")
        name = Path(file).stem

        def limited() -> None:
            limit = math.ceil(cpu_seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            if name not in WIDE_CPP:
                resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

        process = subprocess.Popen(
            [str(self._work / "cpp" / name), sentence],
            env={**os.environ, "EMBSTORE_MUTANT": str(mutant), **(more or {})},
            cwd=self._work / "cpp",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=limited,
            start_new_session=True,
        )
        watch = Watch(process.pid)
        while not (done := os.wait4(process.pid, os.WNOHANG))[0] and not watch.hangs():
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, status, used = done if done[0] else os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        end = "passed" if code == 0 else "failed" if code > 0 else "died or hung"
        return end, used.ru_utime + used.ru_stime

    def reaching(self, number: int, most: float = math.inf) -> list[str]:
        """Tests of C++, then of Python that reach a mutant and cost less than `most`, the cheapest first.
        A mutant that importing asks about is reached by all that reach another one of its module."""
        file = self._numbered[number].file
        same = {n for n, m in self._numbered.items() if m.file == file}
        wanted = same if number in self._at_import else {number}

        def cost(name: str, seconds: float) -> float:
            """CPU time; less for the tests of the file, which are the most likely to notice."""
            own = Path(name.split("::")[0]).stem.removeprefix("test_").split("_")[0]
            return seconds / 10 if own == Path(file).stem.split("_")[0] else seconds

        def ordered(known: dict[str, tuple[float, set[int]]]) -> list[str]:
            costs = {
                name: (cost(name, seconds) * len(reached), name)
                for name, (seconds, reached) in known.items()
                if cost(name, seconds) < most and wanted & reached
            }
            return sorted(costs, key=costs.__getitem__)

        # A fork of Python costs more than most tests of C++: those come last where there are both.
        cases = [] if most < math.inf and not file.endswith(".py") else ordered(self._cases)
        times = itertools.accumulate(self._cases[name][0] for name in cases)
        return ordered(self._sentences) + [name for name, time in zip(cases, times) if time < CASES_SECONDS]

    def state(self, test: str) -> str:
        """Changes with the file of a test."""
        return self._states.get(test.split("::")[0], "")

    def run(
        self, number: int, likely: str | None, passed: dict[str, str], most: float
    ) -> tuple[str, str | None]:
        """How tests that cost less than `most` noticed the mutant, and which; nothing, where it survived.
        `likely` is tried first, and what has `passed` is skipped if it is the same."""
        tests = [test for test in self.reaching(number, most) if passed.get(test) != self.state(test)]
        if likely in self.reaching(number) and passed.get(likely) != self.state(likely):
            tests = [likely, *(test for test in tests if test != likely)]
        runner = self._runners.get()
        try:
            while tests:
                if tests[0] in self._sentences:
                    name, *tests = tests
                    end, _ = self._run_sentence(name, number, 2 + 4 * self._sentences[name][0])
                    if end != "passed":
                        return end, name
                    continue
                now = (
                    1
                    if tests[0] == likely
                    else next(
                        (at for at, name in enumerate(tests[:AT_ONCE]) if name in self._sentences), AT_ONCE
                    )
                )
                cases, tests = tests[:now], tests[now:]
                usual = sum(self._cases[name][0] for name in cases)
                answer = runner.ask(
                    mutant=number, tests=cases, seconds=2 + 4 * usual, fresh=number in self._at_import
                )
                if answer["end"] != "passed":
                    return answer["end"], answer["test"]
        finally:
            self._runners.put(runner)
        return (SURVIVED if self.reaching(number) else NOT_REACHED), None
