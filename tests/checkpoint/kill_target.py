"""A trainer to be killed, started by forked_trainers.py; it prints "ready".

Each generation assigns its number to every row, replaces a dump in one step, appends to a log, and
compacts the log now and then.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import embstore

KEYS = np.arange(-1500, 1500)


def table() -> embstore.Table:
    return embstore.Table(
        "user",
        dim=8,
        optimizer=embstore.Adagrad(),
        score_strategy="step",
        init_capacity=4096,
        max_capacity=8192,
    )


def generation_of(user: embstore.Table) -> int:
    """The number in all rows, vector and state and score alike; raises where generations are mixed."""
    rows = user.rows()
    number = int(rows.values[0, 0])
    assert len(rows) == len(KEYS) - 1, f"{len(rows)} rows"
    assert (rows.values == number).all() and (rows.states == number + 0.5).all(), "generations are mixed"
    assert (rows.scores == number + 1).all(), "scores are mixed"
    assert KEYS[number % len(KEYS)] not in rows.keys, "a removed key came back"
    return number


def advance(user: embstore.Table, number: int) -> None:
    n = len(KEYS)
    user.insert_or_assign(
        KEYS,
        np.full((n, 8), number),
        states=np.full((n, 8), number + 0.5),
        scores=np.full(n, number + 1, np.uint64),
    )
    user.erase([KEYS[number % n]])


def main(folder: Path) -> None:
    user = table()
    tables = {"model": {"user": user}}
    embstore.set_num_threads(1)
    log = embstore.IncrementLog(folder / "log")
    log.load(tables, writable=True)
    number = generation_of(user)
    print("ready", flush=True)
    while True:
        number += 1
        advance(user, number)
        embstore.dump(folder / "current", tables, optim=True, overwrite=True)
        log.append(tables)
        if number % 2 == 0:
            log.compact()
