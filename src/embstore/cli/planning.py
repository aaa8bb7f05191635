"""The command plan: what tables will cost on hosts that one does not have yet."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from embstore.cli.app import Json, app, plural, print_card, print_json, refusals, say, width, working
from embstore.planning import REFERENCE, Hosts, Machine, Plan, PlannedTable, Workload, plan, planned_table
from embstore.readable import bytes_text

FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
FIELDS = ("rows", "dim", "dtype", "optimizer", "ids")


@app.command("plan")
def show_plan(
    table: Annotated[
        list[str] | None,
        typer.Option(help="such as user,rows=1e9,dim=16; also dtype=, optimizer= and ids=; once per table"),
    ] = None,
    batch: Annotated[str, typer.Option(help="ids per step on one rank")] = "65536",
    ids: Annotated[str, typer.Option(help="ids per second that all ranks together have to train")] = "0",
    distinct: Annotated[float, typer.Option(help="share of distinct ids in a step")] = 1.0,
    hosts: Annotated[int, typer.Option(help="number of hosts")] = 1,
    ranks: Annotated[int, typer.Option(help="ranks per host")] = 1,
    cores: Annotated[int | None, typer.Option(help="cores per host")] = None,
    memory: Annotated[str, typer.Option(help="memory per host, such as 512GiB")] = "",
    network: Annotated[str, typer.Option(help="per host and second, such as 100Gbit or 10GB")] = "10Gbit",
    latency: Annotated[float, typer.Option(help="seconds for a message between hosts")] = 50e-6,
    disk: Annotated[str, typer.Option(help="per host and second, such as 2GB")] = "",
    dump_every: Annotated[float, typer.Option(help="seconds between dumps")] = 3600.0,
    append_every: Annotated[float, typer.Option(help="seconds between increments")] = 10.0,
    machine: Annotated[Path | None, typer.Option(help="constants that --measure wrote")] = None,
    measure: Annotated[
        Path | None, typer.Option(help="first measure this machine (a minute) and write its constants here")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict memory, traffic, step time, dumps, recovery, freshness, and what breaks first."""
    with refusals(as_json):
        if measure is not None and machine is not None:
            raise ValueError(f"--machine should not be given beside --measure but is: {machine}")
        if measure is None and not table:
            raise ValueError("--table should be given at least once")
        workload = None
        if table:
            workload = Workload(
                tables=[_table(text) for text in table],
                batch=_whole("--batch", batch),
                ids_per_second=_number("--ids", ids),
                distinct=distinct,
                dump_every_seconds=dump_every,
                append_every_seconds=append_every,
            )
        if measure is not None:
            from embstore.planning.measuring import measure as measure_here

            with working("measuring"):
                constants = measure_here(measure.parent)
            constants.write(measure)
            say(f"wrote {measure}", "green")
        else:
            constants = REFERENCE if machine is None else Machine.read(machine)
        if workload is None:
            return
        given = _number("--disk", disk, per_second=True) if disk else None
        planned = Hosts(
            hosts=hosts,
            ranks=ranks,
            cores=constants.cores if cores is None else cores,
            memory_bytes=int(_number("--memory", memory)) if memory else constants.memory_bytes,
            network_bytes_per_second=_number("--network", network, per_second=True),
            latency_seconds=latency,
            write_bytes_per_second=given or constants.write_bytes_per_second,
            read_bytes_per_second=given or constants.read_bytes_per_second,
        )
        made = plan(workload, planned, constants)
    if as_json:
        print_json(made.as_dict())
    else:
        _print(made, workload, planned)


def _number(name: str, text: str, *, per_second: bool = False) -> float:
    """ "1e9", "20M", "512GiB"; with `per_second` "10GB/s" and "100Gbit/s" too, in bytes."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?) ?([KMGTP]i?)?(B|bit)?(/s)?", text.strip(), re.IGNORECASE)
    if found is not None:
        digits, factor, unit, rate = found.groups()
        scale = {**FACTORS, **BINARY}.get((factor or "").capitalize())
        bits = (unit or "").lower() == "bit"
        if scale is not None and (per_second or not (bits or rate)):
            return float(digits) * scale / (8 if bits else 1)
    such = "100Gbit or 10GB" if per_second else "1e9, 20M or 512GiB"
    raise ValueError(f"{name} should be a number such as {such} but is: {text!r}")


def _whole(name: str, text: str) -> int:
    value = _number(name, text)
    if value != int(value):
        raise ValueError(f"{name} should be an integer but is: {text!r}")
    return int(value)


def _table(text: str) -> PlannedTable:
    name, *pairs = text.split(",")
    given: dict[str, str] = {}
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if field not in FIELDS or not equals or field in given:
            raise ValueError(
                f"--table should be NAME and, each once, some of {'=, '.join(FIELDS)}= but is: {text!r}"
            )
        given[field] = value
    for field in ("rows", "dim"):
        if field not in given:
            raise ValueError(f"--table should have {field}=... but is: {text!r}")
    return planned_table(
        name,
        rows=_whole("rows", given["rows"]),
        dim=_whole("dim", given["dim"]),
        dtype=given.get("dtype", "float32"),
        optimizer=given.get("optimizer", "SGD"),
        ids=_number("ids", given.get("ids", "1")),
    )


def seconds_text(seconds: float) -> str:
    """ "1.2 ms", "35.0 s", "2.5 h"."""
    for limit, factor, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (600.0, 1.0, "s"),
        (36000.0, 1 / 60, "min"),
    ):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:,.3g} h"


def _count(value: float) -> str:
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:,.0f}"


def _print(made: Plan, workload: Workload, hosts: Hosts) -> None:
    wanted = f", wanted {_count(workload.ids_per_second)} ids/s" if workload.ids_per_second else ""
    parts = {
        "work": made.work_seconds,
        "messages": made.message_seconds,
        "waiting": made.wait_seconds,
        "network": made.network_seconds,
    }
    step = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    traffic = made.network_bytes / made.step_seconds
    print_card(
        f"{plural(len(workload.tables), 'table')}, {_count(made.rows)} rows on "
        f"{plural(hosts.hosts, 'host')} with {plural(hosts.ranks, 'rank')} each",
        {
            "memory": f"{bytes_text(round(made.memory_bytes))} of {bytes_text(hosts.memory_bytes)} a host",
            "network": f"{bytes_text(round(made.network_bytes))} a step out of a host and into it: "
            f"{bytes_text(round(traffic))}/s of {bytes_text(round(hosts.network_bytes_per_second))}/s",
            "step": f"{seconds_text(made.step_seconds)} for {workload.batch:,} ids a rank ({step})",
            "speed": f"{_count(made.ids_per_second)} ids/s{wanted}",
            "dump": f"{bytes_text(round(made.dump_bytes))} a host in {seconds_text(made.dump_seconds)}, "
            f"every {seconds_text(workload.dump_every_seconds)}",
            "recovery": f"{seconds_text(made.load_seconds)} to load "
            f"({seconds_text(made.reshard_seconds)} on another number of ranks), and at most "
            f"{seconds_text(workload.dump_every_seconds + made.dump_seconds)} of training again",
            "freshness": f"{seconds_text(made.freshness_seconds)}: an increment of "
            f"{_count(made.changed_rows)} rows every {seconds_text(workload.append_every_seconds)}, "
            f"{seconds_text(made.append_seconds)} to write, {seconds_text(made.follow_seconds)} to follow",
            "reader": f"{bytes_text(round(made.reader_bytes))} of vectors and index in each serving host",
        },
    )
    typer.echo("\nwhat breaks first:")
    for limit in made.limits:
        share = f"{100 * limit.use:>8,.1f} %  {limit.name}"
        typer.echo(share)
        if limit.use > 0.5:
            for line in textwrap.wrap(f"then: {limit.then}", width() - 12):
                typer.echo(" " * 12 + line)
