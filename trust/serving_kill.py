"""kill -9 of a trainer and of readers of its log, again and again.

    python -m trust.serving_kill --rounds 1000

Ends with 1, and names the folder, when a reader showed a mixture of states, an erased row or an unverified
one, or did not catch up.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from serving import kill_rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trust.serving_kill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; chosen and told by default")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="embstore-kill-"))
    begin = time.monotonic()

    def report(done: int) -> None:
        if done % 50 == 0:
            print(f"{done} of {options.rounds} rounds in {time.monotonic() - begin:.0f} s", flush=True)

    try:
        increments = kill_rounds.run(folder, options.rounds, seed, report)
    except AssertionError as error:
        print(f"serving_kill: seed {seed}, {folder}: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    seconds = time.monotonic() - begin
    print(f"serving_kill: {options.rounds} rounds, {increments} increments, {seconds:.0f} s, seed {seed}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
