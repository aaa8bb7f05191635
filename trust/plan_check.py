"""Does `embstore plan` predict what happens? Measures this machine, then compares predictions with real runs.

    python -m trust.plan_check                          measures first
    python -m trust.plan_check --machine machine.json   with the constants of `embstore plan --measure`
    python -m trust.plan_check --short                  1 and 2 ranks, small tables; only bytes are judged
    python -m trust.plan_check --clock                  on a machine that does nothing else

The workloads have other dims, optimizers, batches and numbers of tables than those that were measured, and
run on 1, 2 and 4 ranks. A prediction that is off by more than 20 % fails: bytes, and the work of a step (CPU
time). What other programs and the disk change is judged with --clock alone.

Work with files is done in five rounds, and a prediction is compared with their median. The speed of the disk
changes from minute to minute, so it is measured again beside each round; all other constants are those of the
machine. The last column has the least and the most of the rounds, and a prediction that is off but between
them says "noise?": another run may have another median. It fails nevertheless.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from embstore.planning import Hosts, Machine, Plan, Workload, plan, planned_table
from embstore.planning.measuring import measure
from embstore.planning.running import Observed, Run, run

ROOT = Path(__file__).parents[1]
MOST_OFF = 0.20
BYTES = ("memory", "sent bytes", "dump bytes")
WORK = ("step work",)  # what dumps and loads cost depends on new pages and the page cache
WORLDS = (1, 2, 4)
ROUNDS = 5
DISK = ("write_bytes_per_second", "read_bytes_per_second")


def workloads(short: bool) -> dict[str, Workload]:
    if short:
        return {"one table": Workload(tables=[planned_table("user", rows=300_000, dim=16)], batch=4096)}
    several = [
        planned_table("user", rows=1_500_000, dim=16, optimizer="Adam", ids=2.0),
        planned_table("item", rows=600_000, dim=48, optimizer="RowwiseAdagrad", dtype="float16"),
        planned_table("shop", rows=400_000, dim=24, optimizer="Adagrad"),
    ]
    return {
        "one table": Workload(
            tables=[planned_table("user", rows=2_000_000, dim=32, optimizer="Adagrad")],
            batch=49152,
            distinct=0.6,
        ),
        "three tables": Workload(tables=several, batch=81920, distinct=0.4),
    }


def hosts_of(machine: Machine, ranks: int, cores: int) -> Hosts:
    """This host."""
    return Hosts(
        ranks=ranks,
        cores=cores,
        memory_bytes=machine.memory_bytes,
        network_bytes_per_second=1.0,  # nothing leaves the host
        latency_seconds=0.0,
        write_bytes_per_second=machine.write_bytes_per_second,
        read_bytes_per_second=machine.read_bytes_per_second,
    )


def predicted(load: Workload, ranks: int, machine: Machine, seen: Observed) -> tuple[Plan, Plan]:
    """Of steps, with one thread for each rank; and of files, with all cores and the disk as it was then. The
    increment has the rows of one step."""
    now = replace(machine, file=seen.file_seconds, **{name: getattr(seen, name) for name in DISK})
    steps = plan(load, hosts_of(now, ranks, min(ranks, machine.cores)), now)
    whole = hosts_of(now, ranks, machine.cores)
    once = replace(load, append_every_seconds=plan(load, whole, now).step_seconds)
    return steps, plan(once, whole, now)


def compared(
    steps: Plan, files: Plan, seen: Observed, machine: Machine
) -> list[tuple[str, float, float, Sequence[float]]]:
    """Name, prediction, what was observed, and that in each round."""
    tables = steps.rank_memory_bytes - machine.process_bytes
    ranks, crowding = steps.world, max(1.0, steps.world / machine.cores)
    return [
        ("memory", tables, seen.memory_bytes, ()),
        ("sent bytes", steps.sent_bytes, seen.sent_bytes, ()),
        ("dump bytes", files.dump_bytes, seen.dump_bytes, ()),
        ("step work", (steps.step_seconds - steps.wait_seconds) / crowding, seen.step_cpu_seconds, ()),
        (
            "dump work",
            files.dump_work_seconds / ranks,
            seen.dump_cpu_seconds,
            seen.rounds["dump_cpu_seconds"],
        ),
        (
            "load work",
            files.load_work_seconds / ranks,
            seen.load_cpu_seconds,
            seen.rounds["load_cpu_seconds"],
        ),
        ("step", steps.step_seconds, seen.step_seconds, ()),
        ("dump", files.dump_seconds, seen.dump_seconds, seen.rounds["dump_seconds"]),
        ("load", files.load_seconds, seen.load_seconds, seen.rounds["load_seconds"]),
        ("append", files.append_seconds, seen.append_seconds, seen.rounds["append_seconds"]),
        ("follow", files.follow_seconds, seen.follow_seconds, seen.rounds["follow_seconds"]),
    ]


def check(machine: Machine, short: bool, clock: bool, folder: Path) -> int:
    """Prints a line for each prediction; returns how many are off."""
    failed = 0
    print(f"{'workload':<14}{'ranks':>5}  {'':<12}{'predicted':>12}{'observed':>12}{'off':>8}   rounds")
    for ranks in WORLDS[:2] if short else WORLDS:
        for name, load in workloads(short).items():
            order = Run(
                tables=load.tables,
                batch=load.batch,
                distinct=load.distinct,
                steps=10 if short else 40,
                folder=str(folder),
                file_threads=max(1, machine.cores // ranks),
                file_rounds=1 if short else ROUNDS,
            )
            [seen] = run(ranks, [order])  # processes of its own: dumps leave buffers for the next dump
            steps, files = predicted(load, ranks, machine, seen)
            for what, expected, found, rounds in compared(steps, files, seen, machine):
                if not found and not expected:
                    continue
                off = expected / found - 1 if found else float("inf")
                judged = what in BYTES or (what in WORK and not short) or clock
                bad = judged and abs(off) > MOST_OFF
                failed += bad
                scale, unit = (1e-6, "MB") if what in BYTES else (1e3, "ms")
                line = f"{name:<14}{ranks:>5}  {what:<12}{expected * scale:>9.1f} {unit}"
                line += f"{found * scale:>9.1f} {unit}{100 * off:>+7.1f}%"
                if rounds:
                    line += f"{min(rounds) * scale:>9.1f} to {max(rounds) * scale:.1f}"
                noise = rounds and min(rounds) <= expected <= max(rounds)
                print(f"{line}{('  noise?' if noise else '  OFF') if bad else ''}", flush=True)
            if not short:
                rate = "".join(
                    f" {min(seen.rounds[of]) / 1e9:.2f} to {max(seen.rounds[of]) / 1e9:.2f}" for of in DISK
                )
                low, high = (1e3 * of(seen.rounds["file_seconds"]) for of in (min, max))
                print(f"{name:<14}{ranks:>5}  disk{rate} GB/s, a file {low:.2f} to {high:.2f} ms")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machine", type=Path, help="constants; without it they are measured")
    parser.add_argument("--short", action="store_true", help="as `make test` runs")
    parser.add_argument("--clock", action="store_true", help="everything is judged")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="on the disk that dumps go to")
    options = parser.parse_args(arguments)
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.machine:
            machine = Machine.read(options.machine)
        else:
            machine = measure(folder)
            machine.write(options.folder / "machine.json")
        failed = check(machine, options.short, options.clock, Path(folder))
    print(f"{failed} predictions are off by too much")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
