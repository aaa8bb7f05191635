"""What every rank of torchrun does, in two parts.

    --part first    trains three models on the same impressions, then dumps the dynamic one:
                      dynamic   tables of `dynamicemb` with room for a part of the ids
                      hashing   static TorchRec tables of the same memory, row = id % rows
                      all       tables of `dynamicemb` with room for every id
    --part second   starts from the dump in new processes, trains on, and publishes increments

Every batch is predicted before it is learned, so each prediction is about impressions not seen yet.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import embstore
from dynamicemb import DynamicEmbDump, DynamicEmbLoad
from examples.click_stream import DIM
from examples.demo.models import Trainer
from examples.demo.progress import HEADER, Progress, say
from examples.demo.sources import Clicks, Recorded, open_source

Source = Clicks | Recorded
LINES = 20  # of progress in the first part
SAME_STEPS = 5  # that both parts train, to compare their rows
NEVER = 1 << 62


def train(source: Source, steps: int, progress: Progress, every: int) -> Iterator[int]:
    """Trains all models on the same batches, and yields the step after each line of progress."""
    for _ in range(steps):
        batch = source.next()
        for name, trainer in progress.trainers.items():
            start = time.perf_counter()
            progress.scores[name].append(trainer.step(batch))
            if name == "dynamic":
                progress.seconds += time.perf_counter() - start
        progress.scores["clicks"].append(batch[2][dist.get_rank() :: dist.get_world_size()])
        progress.samples += source.batch_size
        progress.step += 1
        if progress.step % every == 0:
            progress.line()
            yield progress.step


def static_rows(capacity: int, world: int) -> int:
    """Rows of a static table, each with Adagrad's sums, in the memory of a full dynamic one."""
    rows = capacity // world
    probe = embstore.Table(
        "probe", dim=DIM, optimizer=embstore.Adagrad(), init_capacity=rows, max_capacity=rows
    )
    return world * (probe.stats().bytes + probe.capacity * probe.row_bytes) // (2 * 4 * DIM)


def first(source: Source, wanted: int, folder: Path) -> None:
    world = dist.get_world_size()
    dynamic = Trainer(source.names, source.width, wanted)
    capacity = world * dynamic.dynamic[0].table.stats().max_capacity  # a power of two on each rank
    hashed_rows = static_rows(capacity, world)
    trainers = {
        "dynamic": dynamic,
        "hashing": Trainer(source.names, source.width, hashed_rows, hashed=True),
        "all": Trainer(source.names, source.width, 2 * source.distinct),
    }
    steps = source.steps * 4 // 5
    every = max(1, steps // LINES)
    steps -= steps % every
    tables = f"{len(source.names)} tables of {capacity:,} rows"
    say(f"training on {world} ranks: {tables}, batches of {source.batch_size:,}\n\n{HEADER}")
    progress = Progress(folder, trainers)
    for _ in train(source, steps, progress, every):
        pass
    progress.save_scores()

    start = time.perf_counter()
    DynamicEmbDump(str(folder / "dump"), dynamic.model, optim=True)
    say(f"\ndump of {progress.before['rows']:,} rows in {time.perf_counter() - start:.2f} s")
    mine = dynamic.bytes, trainers["all"].bytes, [t.table.rows().scores for t in dynamic.dynamic]
    of_ranks = [mine] * world
    dist.all_gather_object(of_ranks, mine)
    if dist.get_rank() == 0:
        torch.save({"top": dynamic.top.state_dict(), "adam": dynamic.adam.state_dict()}, folder / "dense.pt")
        (folder / "source.pickle").write_bytes(pickle.dumps(source))
        scores = np.concatenate([part for _, _, parts in of_ranks for part in parts])
        np.save(folder / "last_use.npy", scores.astype(np.int64))
        facts = {
            "names": source.names,
            "batch": source.batch_size,
            "capacity": capacity,
            "steps": steps,
            "every": every,
            "world": world,
            "evictions": progress.before["evictions"],
            "hashed_rows": hashed_rows,
            "bytes": {
                "dynamic": sum(part[0] for part in of_ranks),
                "hashing": hashed_rows * 2 * 4 * DIM * len(source.names),
                "all": sum(part[1] for part in of_ranks),
            },
        }
        (folder / "first.json").write_text(json.dumps(facts))
    # These processes go on for a moment: a restart from the dump has to get to the same rows.
    for _ in range(SAME_STEPS):
        dynamic.step(source.next())
    checksum = dynamic.checksum()
    if dist.get_rank() == 0:
        (folder / "checksum.txt").write_text(checksum)


def second(folder: Path) -> None:
    facts = json.loads((folder / "first.json").read_text())
    source: Source = pickle.loads((folder / "source.pickle").read_bytes())
    trainer = Trainer(source.names, source.width, facts["capacity"])
    DynamicEmbLoad(str(folder / "dump"), trainer.model, optim=True)
    state = torch.load(folder / "dense.pt")
    trainer.top.load_state_dict(state["top"])
    trainer.adam.load_state_dict(state["adam"])

    ((path, collection),) = trainer.collections.items()
    tables = {path: {name: dynamic.table for name, dynamic in collection.tables.items()}}
    ownership = {path: {name: dynamic.ownership for name, dynamic in collection.tables.items()}}
    log = embstore.IncrementLog.create(folder / "log", tables, optim=False, ownership=ownership)

    progress = Progress(folder, {"dynamic": trainer}, facts["steps"], facts["evictions"])
    for _ in train(source, SAME_STEPS, progress, NEVER):
        pass
    if trainer.checksum() != (folder / "checksum.txt").read_text():
        raise SystemExit(f"restart: {SAME_STEPS} steps from the dump give other rows")
    say(f"restart: {SAME_STEPS} steps from the dump give the same rows, bit for bit")
    steps = source.steps - facts["steps"]
    for step in train(source, steps - steps % facts["every"] - SAME_STEPS, progress, facts["every"]):
        say(f"{'':8}increment {log.append(tables)} after step {step}")

    arrays = {}
    for name, table in tables[path].items():
        rows = table.rows()
        arrays |= {f"{name}.keys": rows.keys, f"{name}.values": rows.values}
    np.savez(folder / f"trained-{dist.get_rank()}.npz", **arrays)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "last.partial").write_text(json.dumps({"number": log.last(), "names": source.names}))
        (folder / "last.partial").rename(folder / "last.json")  # the serving process waits for it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["first", "second"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--data")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec's planner has much to tell
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    embstore.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.part == "first":
        source = open_source(options.data, options.steps, options.seed)
        first(source, options.capacity or source.capacity, options.folder)
    else:
        second(options.folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
