"""A trainer and a reader to be killed, started by forked_trainers.py; both print "ready".

Each generation gives its number to every row of two tables and erases another key. Every other trainer
appends each generation and compacts the log now and then; the others publish in the background while they go
on. A reader raises when it sees anything but one whole generation.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import embstore

KEYS = np.arange(-700, 700)
TABLES = ("user", "item")


def tables() -> dict[str, dict[str, embstore.Table]]:
    made = {name: embstore.Table(name, dim=8, optimizer=embstore.SGD(lr=1.0)) for name in TABLES}
    return {"model": made}


def advance(of: dict[str, dict[str, embstore.Table]], number: int) -> None:
    for table in of["model"].values():
        table.insert_or_assign(KEYS, np.full((len(KEYS), 8), number, np.float32))
        table.erase([KEYS[number % len(KEYS)]])


def generation_of(reader: embstore.serving.Reader) -> int:
    """The number in all rows of all tables of the newest state."""
    state = reader.state
    seen: set[int] = set()
    for name in TABLES:
        vectors, found = state.find(name, KEYS)
        numbers = np.unique(vectors[found])
        assert len(numbers) == 1, f"generations are mixed: {numbers}"
        number = int(numbers[0])
        gone = KEYS[~found].tolist()
        assert gone == [KEYS[number % len(KEYS)]], f"erased keys at {number}: {gone}"
        assert state.rows(name) == len(KEYS) - 1
        seen.add(number)
    assert len(seen) == 1, f"tables are mixed: {seen}"
    return seen.pop()


def train(folder: Path) -> None:
    of = tables()
    log = embstore.IncrementLog(folder / "log")
    log.load(of, writable=True)
    number = int(of["model"]["user"].rows().values.max())
    print("ready", flush=True)
    if os.getpid() % 2:
        publisher = log.append_every(of, steps=1, compact_after=3)
        while True:
            number += 1
            advance(of, number)
            publisher.step()
    while True:
        number += 1
        advance(of, number)
        log.append(of)
        if number % 3 == 0:
            log.compact()


def read(folder: Path) -> None:
    reader = embstore.serving.Reader(folder / "log", cache=folder / "cache")
    reader.start(0.001)
    newest = generation_of(reader)
    print("ready", flush=True)
    try:
        while True:
            number = generation_of(reader)
            assert number >= newest, f"the reader went back from {newest} to {number}"
            assert reader.error is None, str(reader.error)
            newest = number
    except BaseException as error:
        (folder / f"failure-{os.getpid()}").write_text(repr(error))
        raise


def main(folder: Path) -> None:
    (train if folder.name == "trainer" else read)(folder.parent)
