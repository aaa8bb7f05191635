"""The command `embstore plan` as a person calls it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embstore.cli.commands import app
from embstore.cli.planning import _number, seconds_text
from embstore.planning import REFERENCE

COMMAND = str(Path(sys.executable).with_name("embstore"))
LARGE = ["--table", "user,rows=1e12,dim=16,dtype=float16,optimizer=RowwiseAdagrad", "--hosts", "256"]
LARGE += ["--ranks", "4", "--cores", "64", "--memory", "512GiB", "--network", "100Gbit", "--disk", "2GB"]


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_the_command_is_there():
    done = subprocess.run([COMMAND, "plan", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--table" in done.stdout


def test_a_plan_says_everything_in_80_columns():
    lines = run(*LARGE, "--ids", "100M").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert lines[0] == "1 table, 1 T rows on 256 hosts with 4 ranks each"
    for name in ("memory", "network", "step", "speed", "dump", "recovery", "freshness", "reader"):
        assert any(line.startswith(f"  {name} ") for line in lines), name
    assert "what breaks first:" in lines and any("then: " in line for line in lines)


def test_a_plan_is_json_for_programs():
    found = json.loads(run(*LARGE, "--table", "item,rows=7,dim=3,ids=0.5", "--json").stdout)
    assert found["world"] == 1024 and found["rows"] == 10**12 + 7
    assert found["step_seconds"] == pytest.approx(
        sum(found[f"{part}_seconds"] for part in ("work", "message", "wait", "network"))
    )
    assert {limit["name"] for limit in found["limits"]} >= {"memory of a host", "network of a host"}


def test_constants_of_another_machine_change_the_plan(tmp_path):
    import dataclasses

    dataclasses.replace(REFERENCE, id=1.0, cores=3).write(tmp_path / "slow.json")
    table = ["--table", "user,rows=1000,dim=4", "--batch", "10"]
    slow = json.loads(run(*table, "--machine", tmp_path / "slow.json", "--json").stdout)
    assert slow["step_seconds"] > 1 > json.loads(run(*table, "--json").stdout)["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--table should be given at least once"),
        (["--table", "user"], "--table should have rows=... but is: 'user'"),
        (["--table", "user,rows=5"], "--table should have dim=... but is: 'user,rows=5'"),
        (["--table", "u,rows=1,dim=1,size=3"], "--table should be NAME and, each once, some of rows=, dim=,"),
        (["--table", "u,rows=1,rows=2,dim=1"], "--table should be NAME and, each once, some of rows=, dim=,"),
        (["--table", "u,rows=1.5,dim=1"], "rows should be an integer but is: '1.5'"),
        (
            ["--table", "u,rows=many,dim=1"],
            "rows should be a number such as 1e9, 20M or 512GiB but is: 'many'",
        ),
        (["--table", "u,rows=1,dim=1,dtype=int3"], "dtype should be one of"),
        (["--table", ",rows=1,dim=1"], "name should be a non-empty string but is: ''"),
        (["--table", "u,rows=1,dim=1", "--hosts", "0"], "hosts should be an integer of at least 1 but is: 0"),
        (["--table", "u,rows=1,dim=1", "--memory", "lots"], "--memory should be a number such as 1e9, 20M"),
        (["--table", "u,rows=1,dim=1", "--memory", "1Gbit"], "--memory should be a number such as 1e9, 20M"),
        (["--table", "u,rows=1,dim=1", "--network", "0Gbit"], "network_bytes_per_second should be above 0"),
        (["--table", "u,rows=1,dim=1", "--machine", "no.json"], "No such file or directory: 'no.json'"),
        (["--machine", "a.json", "--measure", "b.json"], "--machine should not be given beside --measure"),
    ],
)
def test_wrong_plans_are_refused_in_one_line(arguments, reason):
    done = run(*arguments, code=2)
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_numbers_have_units():
    assert _number("x", "1e9") == 1e9 and _number("x", "20M") == 2e7 and _number("x", "512GiB") == 1 << 39
    assert _number("x", "100Gbit", per_second=True) == 1.25e10
    assert _number("x", "2.5 GB/s", per_second=True) == 2.5e9
    times = [seconds_text(s) for s in (0, 2.5e-5, 0.0123, 35, 599, 1200, 90_000)]
    assert times == ["0 us", "25 us", "12.3 ms", "35 s", "599 s", "20 min", "25 h"]


PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
SHOWN = re.findall(
    r"^```\n(embstore plan [^\n]*(?:\\\n[^\n]*)*)\n```\n\n```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_page_shows_what_the_command_prints(number):
    command, output = SHOWN[number]
    arguments = shlex.split(command.replace("\\\n", " "))[2:]
    assert run(*arguments).stdout == output


def test_the_page_shows_plans():
    assert len(SHOWN) >= 3
