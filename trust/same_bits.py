"""The same bits: trains the same batches in every way there is and prints hashes of scores and rows for each.

    python -m trust.same_bits              every way
    python -m trust.same_bits --short      a few of them, as `make test` runs

The ways: 1, 2 and 4 ranks x 1 and 2 threads x plain, AVX2 and AVX-512 kernels x in one go or with a dump and
a restart in the middle x rows in memory, over an SSD tier, over Redis x the native modules and each package.
Hashes of one rule have to be equal: SGD over all packages, Adam within a package (their rules differ in eps).
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FACES = ("native", "dynamicemb", "one_embedding", "sparse_operation_kit")
KERNELS = ("plain", "avx2", "avx512")
BELOW = {
    "native": ("memory", "ssd", "redis"),
    "dynamicemb": ("memory", "ssd", "redis"),
    "one_embedding": ("memory", "ssd"),
    "sparse_operation_kit": ("memory",),
}
SECONDS = 600  # for all ways of one group of ranks


@dataclass(frozen=True)
class Way:
    """One way to train. What differs between the groups of processes comes first."""

    face: str
    ranks: int
    kernels: str
    threads: int
    restart: bool
    below: str
    rule: str

    @property
    def group(self) -> tuple[str, int, str]:
        return self.face, self.ranks, self.kernels

    @property
    def must_equal(self) -> str:
        """Ways of the same text have to give the same hash."""
        return self.rule if self.rule == "sgd" else f"{self.rule} of {self.face}"


def available_kernels() -> list[str]:
    """Those that this machine runs; EMBSTORE_ISA chooses among them."""
    flags = Path("/proc/cpuinfo").read_text()
    has = {"plain": True, "avx2": " avx2 " in flags, "avx512": " avx512f " in flags}
    return [name for name in KERNELS if has[name]]


def every_way(short: bool) -> list[Way]:
    kernels = available_kernels()
    if short:
        groups = [("native", 2, "plain"), ("dynamicemb", 2, kernels[-1]), ("one_embedding", 1, "plain")]
        groups += [("sparse_operation_kit", 2, "plain")]
    else:
        groups = list(itertools.product(FACES, (1, 2, 4), kernels))
    ways = []
    for face, ranks, isa in groups:
        below = ("memory", "ssd")[: len(BELOW[face])] if short else BELOW[face]
        for threads, restart, place, rule in itertools.product((1, 2), (False, True), below, ("sgd", "adam")):
            if not (short and restart and threads == 1):
                ways.append(Way(face, ranks, isa, threads, restart, place, rule))
    return ways


def run_group(ways: list[Way], redis: str) -> list[dict[str, object]]:
    """Trains all ways of one group on real ranks; a line of JSON for each."""
    first = ways[0]
    with tempfile.TemporaryDirectory() as folder:
        order = json.dumps([asdict(way) for way in ways])
        (Path(folder) / "ways.json").write_text(order)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={first.ranks}", "-m", "trust.same_bits_rank", folder, redis]
        done = subprocess.run(
            ["env", f"EMBSTORE_ISA={first.kernels}", "TF_CPP_MIN_LOG_LEVEL=3", "OMP_NUM_THREADS=1", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        results = Path(folder) / "results.json"
        if done.returncode or not results.exists():
            raise RuntimeError(f"{first.group} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return json.loads(results.read_text())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few ways only")
    parser.add_argument("--out", type=Path, help="also write the lines as JSON")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests"))
    from redis_server import RedisServer

    ways = every_way(options.short)
    groups: dict[tuple[str, int, str], list[Way]] = defaultdict(list)
    for way in ways:
        groups[way.group].append(way)
    hashes: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            for group in groups.values():
                for line in run_group(group, server.where):
                    lines.append(line)
                    way = Way(**line["way"])  # type: ignore[arg-type]
                    how = f"{way.face:<21}{way.ranks} ranks  {way.threads} threads  {way.kernels:<7}"
                    how += f"{'restart' if way.restart else 'one go':<8}{way.below:<7}{way.rule:<5}"
                    print(f"{how}{line['scores'] or '-':<18}{line['rows']}", flush=True)
                    for part in ("rows", "scores"):
                        if line[part]:
                            of = way.must_equal if part == "rows" else f"{way.must_equal} of {way.face}"
                            hashes[part, of][str(line[part])].append(str(way))
        finally:
            server.stop()
    if options.out:
        options.out.write_text(json.dumps(lines, indent=1))
    differ = {key: found for key, found in hashes.items() if len(found) > 1}
    for (part, of), found in differ.items():
        print(f"\n{part} of {of} have {len(found)} hashes:")
        for value, which in found.items():
            print(f"  {value}  {len(which)} ways, such as {which[0]}")
    print(f"\n{len(lines)} ways: " + ("hashes DIFFER" if differ else "the same bits"))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
