"""The training that trust.ranks and trust.network interrupt: embedding rows over all ranks, a dense layer.

A rank says what it does before it does it ("connecting", "making", "step 3", "saving 2") and what came of it
("loss 3 0x1.8p+1", "saved 2", "rows 7fa1…", "error RankError …"). What is saved, by number:

    dense-2.pt    the dense layer and its optimizer, written by rank 0 before the rows
    dump-2        the rows: published by rename, so it exists when both are complete
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import numpy as np
import torch
import torch.distributed as dist

import embstore
from embstore.distributed.ranks import ranks_of

DIM, BATCH, IDS = 16, 64, 3000
STEPS, STEPS_PER_SAVE = 12, 3
WAYS = ("dump", "background", "log")  # to save rows
GROUP_SECONDS = 5.0

Say = Callable[[str], None]
Tables = dict[str, dict[str, embstore.Table]]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = embstore.TableOptions(name="ids", dim=DIM, optimizer=embstore.Adam(lr=0.05), seed=5)
        self.rows = embstore.Embedding(table=embstore.Table(options), sharded=True)
        torch.manual_seed(3)
        self.top = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(ids)).squeeze(1)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of this rank."""
    rng = np.random.default_rng((step, dist.get_rank()))
    ids = (IDS * rng.random(BATCH) ** 3).astype(np.int64) - IDS // 2
    return torch.from_numpy(ids), torch.from_numpy(rng.normal(size=BATCH).astype(np.float32))


class Saves:
    """What is saved in a folder."""

    def __init__(self, folder: Path, way: str, tables: Tables) -> None:
        self._folder, self._way, self._tables = folder, way, tables
        self._handle: embstore.DumpHandle | None = None
        self._log: embstore.IncrementLog | None = None

    def load(self) -> int:
        """Loads the newest state that is complete; returns its number."""
        if self._way == "log":
            if not (self._folder / "log").exists():
                self._log = embstore.IncrementLog.create(self._folder / "log", self._tables)
                return 0
            self._log = embstore.IncrementLog(self._folder / "log")
            return self._log.load(self._tables, writable=True)
        number = newest(self._folder, self._way)
        if number:
            embstore.load(self._folder / f"dump-{number}", self._tables, optim=True)
        return number

    def save(self, number: int) -> None:
        if self._log is not None:
            self._log.append(self._tables)
            return
        self.wait()
        self._handle = embstore.dump(
            self._folder / f"dump-{number}", self._tables, optim=True, async_=self._way == "background"
        )

    def wait(self) -> None:
        """Until what runs in the background is written."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None


def newest(folder: Path, way: str) -> int:
    """The number of the newest state; everything that is there has to verify."""
    if way == "log":
        if not (folder / "log").exists():
            return 0
        log = embstore.IncrementLog(folder / "log")
        log.verify()
        return log.last()
    numbers = [int(path.name.removeprefix("dump-")) for path in folder.glob("dump-*")]
    for number in numbers:
        embstore.open_dump(folder / f"dump-{number}").verify()
    return max(numbers, default=0)


def train(folder: Path, way: str, say: Say) -> None:
    """Goes on from what the folder holds, up to the last step. The process group is there."""
    say("making")
    model = Model()
    tables = {"m": {"ids": model.rows.table}}
    saves = Saves(folder, way, tables)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    number = saves.load()
    if number:
        dense = torch.load(folder / f"dense-{number}.pt", weights_only=True)
        model.top.load_state_dict(dense["top"])
        optimizer.load_state_dict(dense["optimizer"])
    say(f"made {number}")
    for step in range(number * STEPS_PER_SAVE, STEPS):
        ids, targets = batch_of(step)
        say(f"step {step}")
        optimizer.zero_grad()
        loss = (parallel(ids) - targets).square().mean()
        loss.backward()
        optimizer.step()
        say(f"loss {step} {loss.item().hex()}")
        if (step + 1) % STEPS_PER_SAVE == 0:
            number = (step + 1) // STEPS_PER_SAVE
            say(f"saving {number}")
            if dist.get_rank() == 0:
                dense = {"top": model.top.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(dense, folder / f"writing-{number}.pt")
                os.replace(folder / f"writing-{number}.pt", folder / f"dense-{number}.pt")
            saves.save(number)
            if way != "background":
                say(f"saved {number}")
    saves.wait()
    rows = model.rows.table.rows()
    own = hashlib.sha1(b"".join(a.tobytes() for a in (rows.keys, rows.values, rows.states))).hexdigest()
    say("rows " + hashlib.sha1("".join(ranks_of().gather(own)).encode()).hexdigest())


def run(folder: Path, way: str, say: Say, init: Callable[[], object]) -> None:
    """Trains, and says how it ends; never raises."""
    torch.set_num_threads(1)
    try:
        say("connecting")
        init()
        train(folder, way, say)
    except Exception as error:
        say(f"error {type(error).__name__} {' '.join(str(error).split())[:300]}")


def main() -> None:
    """A process of torchrun: python -m trust.training_job FOLDER SECONDS"""
    folder = Path(sys.argv[1])
    with open(folder / f"said-{os.environ['RANK']}", "a", buffering=1) as file:

        def say(what: str) -> None:
            file.write(f"{time.time():.3f} {what}\n")

        timeout = timedelta(seconds=float(sys.argv[2]))
        run(folder, "dump", say, lambda: dist.init_process_group("gloo", timeout=timeout))
    os._exit(0)  # gloo may wait for ranks that are gone


if __name__ == "__main__":
    main()
