"""Fuzzing, guided by coverage (atheris): bytes of all kinds for everything that reads bytes.

    python -m trust.fuzz                                every target, an hour each
    python -m trust.fuzz --target dump-v2 --seconds 60
    python -m trust.fuzz --replay                       the kept inputs once, and a few mutations of them

Inputs that reached new code are kept in trust/corpus/TARGET.zip. A finding stops its target; the input is
written to build/fuzz/TARGET-*.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import random
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
FINDINGS = ROOT / "build" / "fuzz"
MOST_BYTES = 4096  # of an input
MOST_KEPT = 300  # inputs of a target
INPUT_SECONDS = 20
MEMORY_MB = 3000


def kept(name: str) -> list[bytes]:
    """The corpus of a target."""
    file = CORPUS / f"{name}.zip"
    if not file.exists():
        return []
    with zipfile.ZipFile(file) as archive:
        return [archive.read(entry) for entry in sorted(archive.namelist())]


def keep(name: str, inputs: list[bytes]) -> None:
    """Replaces the corpus of a target; the same inputs give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for data in sorted(set(inputs), key=lambda d: (len(d), d))[:MOST_KEPT]:
            archive.writestr(zipfile.ZipInfo(hashlib.sha1(data).hexdigest()), data)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.zip").write_bytes(buffer.getvalue())


def fuzz_here(name: str, corpus: Path, seconds: int) -> None:
    """Fuzzes in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["embstore"], enable_loader_override=False):
        from trust.fuzz_targets import TARGETS
    target = TARGETS[name]
    for data in [*target.seeds(), *kept(name)]:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    flags = [f"-max_total_time={seconds}", f"-timeout={INPUT_SECONDS}", f"-rss_limit_mb={MEMORY_MB}"]
    flags += [f"-max_len={MOST_BYTES}", f"-artifact_prefix={FINDINGS}/{name}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], str(corpus), *flags], target.try_input)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> str:
    """One target in a process of its own; returns what happened, in a line."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trust.fuzz", "--child", folder, "--target", name]
        process = subprocess.run(
            [*command, "--seconds", str(seconds)],
            cwd=ROOT,
            capture_output=True,
            timeout=seconds + 600,
        )
        text = process.stderr.decode(errors="replace")
        runs = [line.split()[-1] for line in text.splitlines() if "number_of_executed_units" in line]
        keep(name, [path.read_bytes() for path in Path(folder).iterdir()])
        inputs = f"{int(runs[-1]):,} inputs" if runs else "no count of inputs"
        if process.returncode == 0:
            return f"{name:<24}{inputs}, no finding"
        (FINDINGS / f"{name}.log").write_text(text)
        return f"{name:<24}{inputs}, FINDING: see {FINDINGS / name}.log"


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


def replay(name: str, mutations: int) -> int:
    """The seeds and the corpus, and mutations of each; returns how many inputs were tried."""
    from trust.fuzz_targets import TARGETS

    def too_slow(*_: object) -> None:
        raise AssertionError(f"an input of {name} takes more than {INPUT_SECONDS} s")

    target, rng = TARGETS[name], random.Random(name)
    inputs = [*target.seeds(), *kept(name)]
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
    parser.add_argument("--seconds", type=int, default=3600, help="for each target")
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
    if importlib.util.find_spec("atheris") is None:
        print("atheris is missing: pip install atheris", file=sys.stderr)
        return 2
    found = []
    for name in names:
        found.append(fuzz(name, options.seconds))
        print(found[-1], flush=True)
    return 1 if any("FINDING" in line for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
