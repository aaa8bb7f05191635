"""Damaged and hostile files of every layout: refused by name with one exception and exit code 3, or read as
what they are. Never a hang, a traceback or another exception.

Layouts and damages are declared lists; a new entry is tested by being there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from checkpoint.tables import make, require_same, train
from checkpoint.test_dump_and_load import write_original

import embstore
from embstore.cli.commands import app

pytestmark = pytest.mark.slow
COMMAND = typer.main.get_command(app)  # once: it takes longer than most commands

# ---- layouts


def a_table() -> embstore.Table:
    table = make()
    train(table, 2, n=11)
    return table


def dumped(path: Path, layout: str) -> None:
    embstore.dump(path, {"model": {"user": a_table()}}, optim=True, layout=layout)


def original(path: Path, layout: str) -> None:
    write_original(path / "model", layout, a_table(), now=1 << 60)


def log(path: Path, _: str) -> None:
    table = a_table()
    entries = embstore.IncrementLog.create(path, {"model": {"user": table}})
    table.erase([7])
    table.find_or_insert([5])
    entries.append({"model": {"user": table}})


def converted(path: Path, to: str) -> None:
    dumped(path.with_name("source"), "v1a")
    run("convert", path.with_name("source"), path, "--to", to)
    shutil.rmtree(path.with_name("source"))


def sok_original(path: Path, _: str) -> None:
    converted(path, "sok")
    (path / "manifest.json").unlink()


def one_embedding(path: Path, _: str) -> None:
    converted(path, "one_embedding")


@dataclass(frozen=True)
class Layout:
    """How a folder is made, whether it has checksums of all its files, and how it is read."""

    make: Callable[[Path, str], None]
    name: str
    sealed: bool
    reads: tuple[str, ...]  # commands
    load: bool = True


DUMP, FOREIGN = ("verify", "inspect", "convert"), ("convert",)
LAYOUTS = {
    "v1a": Layout(dumped, "v1a", True, DUMP),
    "v2": Layout(dumped, "v2", True, DUMP),
    "log": Layout(log, "", True, DUMP),
    "original v1a": Layout(original, "v1a", False, DUMP),
    "original v1b": Layout(original, "v1b", False, DUMP),
    "original v2-alpha": Layout(original, "v2-alpha", False, DUMP),
    "original v2": Layout(original, "v2", False, DUMP),
    "sok": Layout(converted, "sok", True, FOREIGN, load=False),
    "original sok": Layout(sok_original, "", False, FOREIGN, load=False),
    "parquet": Layout(converted, "parquet", False, FOREIGN, load=False),
    "safetensors": Layout(converted, "safetensors", False, FOREIGN, load=False),
}

# ---- damages


def cut_to(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: max(0, size(path.stat().st_size))]) and None


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12345678")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def replaced_by(make_it: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make_it(path)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": cut_to(lambda size: 0),
    "a byte short": cut_to(lambda size: size - 1),
    "a key short": cut_to(lambda size: size - 8),
    "half": cut_to(lambda size: size // 2),
    "too long": lengthen,
    "a bit": flip,
    "garbage": garbage,
    "gone": replaced_by(lambda path: None),
    "a folder": replaced_by(lambda path: path.mkdir()),
    "a pipe": replaced_by(lambda path: os.mkfifo(path)),
    "endless": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "a loop of links": replaced_by(lambda path: path.symlink_to(path.name)),
    "dangling": replaced_by(lambda path: path.symlink_to("nowhere")),
    "huge": lambda path: os.truncate(path, 1 << 40),
}


def run(*arguments: object) -> tuple[int, str]:
    """The exit code of a command and what it printed. Other exceptions than SystemExit come through."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        COMMAND.main([str(argument) for argument in arguments], "embstore")
    return int(end.value.code or 0), said.getvalue()


def outcomes(layout: Layout, path: Path) -> Iterator[tuple[str, int, str]]:
    """The exit code of every way to read a folder; a load counts as one."""
    for command in layout.reads:
        target = path.with_name("out")
        if command == "convert":
            # The original does not say how many floats of a row are the vector.
            code, said = run("convert", path, target, "--to", "v2")
        else:
            code, said = run(command, path, "--json")
        assert (code == 0) or not target.exists()
        shutil.rmtree(target, ignore_errors=True)
        yield command, code, said
    for optim in (True, False) if layout.load else ():
        table = make()
        table.insert_or_assign([123], np.ones((1, 5)))
        before = table.rows()
        try:
            if layout.make is log:
                embstore.IncrementLog(path).load({"model": {"user": table}})
            else:
                embstore.load(path, {"model": {"user": table}}, optim=optim)
        except embstore.CheckpointError as error:
            require_same(before, table)
            yield f"load {optim}", 3, str(error)
        else:
            yield f"load {optim}", 0, ""


def check(layout: Layout, path: Path, file: Path, what: str, must_refuse: bool) -> None:
    for how, code, said in outcomes(layout, path):
        place = f"{file.relative_to(path)}: {what}: {how}: exit code {code}: {said}"
        assert "Traceback" not in said, place
        if code == 2:  # what is left is not even a part of a dump
            assert "is not a dump" in said and not any(p.is_file() for p in path.rglob("*")), place
            continue
        assert code in (0, 3), place
        # `inspect` compares no checksums.
        if must_refuse and not (how == "inspect" and what in ("a bit", "garbage")):
            assert code == 3 and (file.name in said or "is not an entry of an increment log" in said), place


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_damage_of_every_file_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    whole, path = tmp_path / "whole", tmp_path / "d"
    layout.make(whole, layout.name)
    shutil.copytree(whole, path)
    assert all(code == 0 for _, code, _ in outcomes(layout, path))
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        for what, damage in DAMAGES.items():
            damage(file)
            is_manifest = file.name in ("embstore.json", "manifest.json")
            # Without a manifest it is a dump of the original package; its last byte is the end of a line.
            legal = is_manifest and (what == "a byte short" or (what == "gone" and name != "log"))
            check(layout, path, file, what, layout.sealed and not legal)
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            shutil.copyfile(whole / file.relative_to(path), file)


# ---- JSON whose checksum is right


def sealed(document: Any) -> str:
    if not isinstance(document, dict):
        return json.dumps(document)
    document.pop("crc32", None)
    text = json.dumps(document, indent=1, sort_keys=True)
    return json.dumps({**document, "crc32": zlib.crc32(text.encode())}, indent=1, sort_keys=True)


# Of each JSON type one or two that are wrong nearly everywhere.
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0.5,
    10**18,
    10**400,
    float("nan"),
    "../../x",
    "\ud800",
    [[]],
    {"x": {}},
]


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(inner)[:2] if at and at[-1] == "files" else inner:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


def with_value(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return copy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["v1a", "log", "original v1a", "original v1b", "original v2", "sok"])
def test_json_with_strange_values_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    quick = replace(layout, reads=layout.reads[:1])
    path = tmp_path / "d"
    layout.make(path, layout.name)
    # All manifests of a dump are of one kind, and what they list has a checksum there.
    pattern = {"v1a": "embstore.json", "log": "increment-*/*/embstore.json"}.get(name, "*.json")
    (file,) = path.rglob(pattern)
    document = json.loads(file.read_text())
    seal = sealed if layout.sealed else json.dumps
    texts = [seal(["x"]), "[" * 200_000, '{"a":' * 200_000, "\xff", "9" * 5000, seal({"a": 10**4000})]
    for at in places(document):
        texts += [seal(with_value(document, at, value)) for value in (KeyError, *STRANGE)]
    for number, text in enumerate(texts):
        file.write_bytes(text.encode("latin-1"))
        check(layout if number % 5 == 0 else quick, path, file, text[:200], False)
