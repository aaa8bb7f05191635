"""Does `embstore plan` predict what happens? Measures this machine, then compares predictions with real runs.

    python -m trust.plan_check                          measures first
    python -m trust.plan_check --machine machine.json   with the constants of `embstore plan --measure`
    python -m trust.plan_check --short                  1 and 2 ranks, small tables; only bytes are judged
    python -m trust.plan_check --clock                  on a machine that does nothing else

The workloads have other dims, optimizers, batches and numbers of tables than those that were measured, and
run on 1, 2 and 4 ranks. A prediction that is off by more than 20 % fails: bytes, and the work of a step (CPU
time). What other programs, the page cache and the disk change is judged with --clock alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
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


def hosts_of(machine: Machine, ranks: int) -> Hosts:
    """This host, with a thread for each rank."""
    return Hosts(
        ranks=ranks,
        cores=min(ranks, machine.cores),
        memory_bytes=machine.memory_bytes,
        network_bytes_per_second=1.0,  # nothing leaves the host
        latency_seconds=0.0,
        write_bytes_per_second=machine.write_bytes_per_second,
        read_bytes_per_second=machine.read_bytes_per_second,
    )


def compared(
    made: Plan, workload: Workload, observed: Observed, machine: Machine
) -> list[tuple[str, float, float]]:
    """Name, prediction, what was observed. The increment has the rows of one step."""
    tables = made.rank_memory_bytes - machine.process_bytes
    ranks, crowding = made.world, max(1.0, made.world / machine.cores)
    return [
        ("memory", tables, observed.memory_bytes),
        ("sent bytes", made.sent_bytes, observed.sent_bytes),
        ("dump bytes", made.dump_bytes, observed.dump_bytes),
        ("step work", made.step_seconds / crowding, observed.step_cpu_seconds),
        ("dump work", made.dump_work_seconds / ranks, observed.dump_cpu_seconds),
        ("load work", made.load_work_seconds / ranks, observed.load_cpu_seconds),
        ("step", made.step_seconds, observed.step_seconds),
        ("dump", made.dump_seconds, observed.dump_seconds),
        ("load", made.load_seconds, observed.load_seconds),
        ("append", made.append_seconds, observed.append_seconds),
        ("follow", made.follow_seconds, observed.follow_seconds),
    ]


def check(machine: Machine, short: bool, clock: bool, folder: Path) -> int:
    """Prints a line for each prediction; returns how many are off."""
    failed = 0
    print(f"{'workload':<14}{'ranks':>5}  {'':<12}{'predicted':>12}{'observed':>12}{'off':>8}")
    for ranks in WORLDS[:2] if short else WORLDS:
        hosts = hosts_of(machine, ranks)
        chosen = workloads(short)
        orders = [
            Run(
                tables=load.tables,
                batch=load.batch,
                distinct=load.distinct,
                threads=hosts.threads,
                steps=10 if short else 40,
                folder=str(folder),
            )
            for load in chosen.values()
        ]
        for (name, load), order in zip(chosen.items(), orders, strict=True):
            [observed] = run(ranks, [order])  # processes of its own: dumps leave buffers for the next dump
            step = plan(load, hosts, machine).step_seconds
            once = replace(load, append_every_seconds=step)  # an increment has the rows of one step
            for what, predicted, seen in compared(plan(once, hosts, machine), load, observed, machine):
                if not seen and not predicted:
                    continue
                off = predicted / seen - 1 if seen else float("inf")
                judged = what in BYTES or (what in WORK and not short) or clock
                bad = judged and abs(off) > MOST_OFF
                failed += bad
                scale, unit = (1e-6, "MB") if what in BYTES else (1e3, "ms")
                line = f"{name:<14}{ranks:>5}  {what:<12}{predicted * scale:>9.1f} {unit}"
                line += f"{seen * scale:>9.1f} {unit}{100 * off:>+7.1f}%{'  OFF' if bad else ''}"
                print(line, flush=True)
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
