"""Fuzzing, guided by coverage (atheris): bytes of all kinds for everything that reads bytes.

    python -m trust.fuzz                                until every target has had an hour
    python -m trust.fuzz --target dump-v2 --seconds 60
    python -m trust.fuzz --replay                       the kept inputs once, and a few mutations of them
    python -m trust.fuzz --told                         what has run so far, for docs/reliability.md

Targets take turns, those that have run least first; programs with different targets may run side by side.
trust/corpus/ran.json has the CPU seconds, inputs and findings of each in all, so a run that was stopped goes
on where it was. Inputs that reached new code are kept: all in build/fuzz, the smallest in
trust/corpus/TARGET.zip. A finding ends the turn, and its input is written to build/fuzz/TARGET-*.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
RAN = CORPUS / "ran.json"
TOLD, TOLD_IN = "| target |", ROOT / "docs" / "reliability.md"
FINDINGS = ROOT / "build" / "fuzz"
MOST_BYTES = 4096  # of an input
MOST_KEPT = 300  # inputs of a target
MOST_KEPT_BYTES = 100_000
TURN_SECONDS = 200
INPUT_SECONDS = 20  # of CPU time
STUCK_SECONDS = 300  # by the clock, which goes on while others have the CPU
MEMORY_MB = 3000
MEMORY = "/dev/shm"  # an input is a folder of files that are synced


def kept(name: str) -> list[bytes]:
    """The corpus of a target."""
    file = CORPUS / f"{name}.zip"
    if not file.exists():
        return []
    with zipfile.ZipFile(file) as archive:
        return [archive.read(entry) for entry in sorted(archive.namelist())]


def keep(name: str, inputs: list[bytes]) -> None:
    """Replaces the corpus of a target; the same inputs give the same bytes."""
    buffer, left = io.BytesIO(), MOST_KEPT_BYTES
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for data in sorted(set(inputs), key=lambda d: (len(d), d))[:MOST_KEPT]:
            left -= len(data)
            if left < 0:
                break
            archive.writestr(zipfile.ZipInfo(hashlib.sha1(data).hexdigest()), data)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.zip").write_bytes(buffer.getvalue())


def ran() -> dict[str, dict[str, Any]]:
    """CPU seconds, inputs and findings of each target in all."""
    return json.loads(RAN.read_text()) if RAN.exists() else {}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps other programs that fuzz from changing what has run."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    with (FINDINGS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def count(name: str, seconds: float, inputs: int, finding: str | None, branches: list[int]) -> None:
    """Adds a turn of a target, which reached so many branches with the kept inputs and at its end."""
    with alone():
        every = ran()
        own = every.setdefault(name, {"seconds": 0, "inputs": 0, "findings": []})
        own["branches"] = branches
        own["seconds"] += round(seconds)
        own["inputs"] += inputs
        own["findings"] += [finding] if finding else []
        new = RAN.with_suffix(".new")
        new.write_text(json.dumps(dict(sorted(every.items())), indent=1) + "\n")
        new.replace(RAN)  # a run that is killed leaves the old one whole


def told() -> str:
    """A table of what has run."""
    columns = "CPU seconds | inputs | branches | new in the last turn | findings |"
    lines = [f"{TOLD} {columns}", "|---|---|---|---|---|---|"]
    for name, own in ran().items():
        findings = ", ".join(own["findings"]) or "none"
        before, after = own["branches"]
        counts = " | ".join(f"{n:,}" for n in (own["seconds"], own["inputs"], after, after - before))
        lines.append(f"| {name} | {counts} | {findings} |")
    return "\n".join(lines)


def write_told() -> None:
    """Puts the table in the place of the one in the documentation."""
    text = TOLD_IN.read_text()
    begin = text.index(TOLD)
    TOLD_IN.write_text(text[:begin] + told() + text[text.index("\n\n", begin) :])


def fuzz_here(name: str, corpus: Path, seconds: int) -> None:
    """Fuzzes in this process, which libFuzzer ends."""
    import atheris

    # Atheris cannot instrument what the loader of an editable install loads, and only warns of it.
    sys.path.insert(0, str(ROOT / "src"))
    sys.meta_path.insert(0, PathFinder)
    with atheris.instrument_imports(include=["embstore"]):
        from trust.fuzz_folders import mutated_edits
        from trust.fuzz_targets import TARGETS

        target = TARGETS[name]
        for data in target.seeds():
            target.try_input(data)  # some modules are imported when they are first needed
            (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    for data in kept(name):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    flags = [f"-max_total_time={seconds}", f"-timeout={STUCK_SECONDS}", f"-rss_limit_mb={MEMORY_MB}"]
    flags += [f"-max_len={MOST_BYTES}", f"-artifact_prefix={FINDINGS}/{name}-", "-print_final_stats=1"]

    def too_slow(*_: object) -> None:
        raise AssertionError(f"an input of {name} takes more than {INPUT_SECONDS} s")

    def try_input(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
        target.try_input(data)

    signal.signal(signal.SIGPROF, too_slow)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return mutated_edits(data, most, seed, atheris.Mutate)

    mutators = {"custom_mutator": mutate} if target.of_edits else {}
    atheris.Setup([sys.argv[0], str(corpus), *flags], try_input, **mutators)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> str:
    """A turn of one target in a process of its own; returns what happened, in a line."""
    folder = FINDINGS / "corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    known = {path.name for path in FINDINGS.glob(f"{name}-*")}
    command = [sys.executable, "-m", "trust.fuzz", "--child", str(folder), "--target", name]
    command += ["--seconds", str(seconds)]
    environment = {**os.environ, "TMPDIR": MEMORY} if os.path.isdir(MEMORY) else None
    with (FINDINGS / f"{name}.log").open("w+", errors="replace") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    counts = [line.split()[-1] for line in text.splitlines() if "number_of_executed_units" in line]
    inputs = int(counts[-1]) if counts else 0
    branches = [int(found) for found in re.findall(r" cov: (\d+)", text[text.find("INITED") :])]
    if inputs and not branches:
        raise RuntimeError(f"nothing guides the inputs of {name}, since no branch is seen: {log.name}")
    keep(name, [path.read_bytes() for path in folder.iterdir()])
    finding = None
    if process.returncode:
        new = sorted({path.name for path in FINDINGS.glob(f"{name}-*")} - known)
        finding = " ".join(new) or f"exit code {process.returncode}"
    cpu_seconds = used.ru_utime + used.ru_stime
    count(name, cpu_seconds, inputs, finding, [branches[0], branches[-1]] if branches else [0, 0])
    end = f"FINDING {finding}: see {FINDINGS / name}.log" if finding else "no finding"
    return f"{name:<24}{inputs:,} inputs in {cpu_seconds:.0f} s of CPU time, {end}"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few random edits."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        edit = rng.randrange(4)
        if edit == 0:
            changed[at] = rng.randrange(256)
        elif edit == 1:
            changed[at:at] = rng.randbytes(rng.randint(1, 9))
        elif edit == 2 and len(changed) > 8:
            del changed[at : at + rng.randint(1, 8)]
        else:
            changed[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"99999999", b"\x7f" + b"\xff" * 7])
    return bytes(changed)


def replay(name: str, mutations: int, most_kept: int = MOST_KEPT) -> int:
    """The seeds and inputs of the corpus, and mutations of each; returns how many inputs were tried."""
    from trust.fuzz_targets import TARGETS

    def too_slow(*_: object) -> None:
        raise AssertionError(f"an input of {name} takes more than {INPUT_SECONDS} s")

    target, rng = TARGETS[name], random.Random(name)
    corpus = kept(name)
    inputs = [*target.seeds(), *rng.sample(corpus, min(most_kept, len(corpus)))]
    inputs += [mutated(rng.choice(inputs), rng) for _ in range(mutations)]
    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        for data in inputs:
            signal.alarm(INPUT_SECONDS)
            try:
                target.try_input(data)
            except BaseException as error:
                FINDINGS.mkdir(parents=True, exist_ok=True)
                file = FINDINGS / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
                file.write_bytes(data)
                error.add_note(f"the input is in {file}")
                raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return len(inputs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", action="append", help="its name; may be repeated (default: all)")
    parser.add_argument("--seconds", type=int, default=3600, help="CPU time of each target in all")
    parser.add_argument("--told", action="store_true", help="write what has run so far")
    parser.add_argument("--replay", action="store_true", help="without atheris")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        fuzz_here(options.target[0], options.child, options.seconds)
        return 0
    from trust.fuzz_targets import TARGETS

    names = options.target or list(TARGETS)
    if options.replay:
        for name in names:
            print(f"{name:<24}{replay(name, mutations=500):,} inputs, no finding", flush=True)
        return 0
    if options.told:
        write_told()
        return 0
    broken = 0
    while names:
        had = {name: ran().get(name, {"seconds": 0})["seconds"] for name in names}
        name = min(names, key=had.__getitem__)
        if had[name] >= options.seconds:
            break
        told = fuzz(name, max(1, min(TURN_SECONDS, options.seconds - had[name])))
        print(told, flush=True)
        if "FINDING" in told:  # it would come again
            names.remove(name)
            broken += 1
        with alone():
            write_told()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
