"""embstore against TorchRec ZCH while new ids arrive: 5 % of the positions of every batch, dim 32.

zch-2       MCHManagedCollisionModule, which takes in new ids every 2nd step. It keeps its ids sorted, and
            sorts all of them again each time. A round is 2 steps, so it holds one cheap and one dear step.
zch-100     the same with every 100th step, for information: ids that are new then read the shared last row
            for up to 100 steps, where embstore gives them a row of their own at once.

Both sides are full, so a new id evicts one that was not used for long. The peer is the bare module with
the LRU policy, followed by a lookup in an nn.Embedding. In a trial with a full table of 4M rows DistanceLFU
was slower, and LFU did not take in ids that were seen once.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

import embstore

from .ids import NewIds, scatter, zipf_batches
from .registry import Row, Run, register
from .tables import full_embedding
from .timing import Side, interleave, rate, set_threads

DIM = 32
SHARE = 0.05


def zch(rows: int, interval_steps: int, batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A full ZCH module and its table: keys -> vectors."""
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    module = MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=interval_steps,
    ).train()
    table = nn.Embedding(rows, DIM)

    def forward(keys: torch.Tensor) -> torch.Tensor:
        feature = JaggedTensor(values=keys, lengths=torch.ones(len(keys), dtype=torch.int64))
        return table(module({"id": feature})["id"].values())

    # The first call sizes its history buffer, so none of these is smaller than a batch.
    share = max(batch, -(-rows // interval_steps))
    for step in range(interval_steps):
        forward(scatter(np.arange(step * share, (step + 1) * share) % rows))
    if module.open_slots().item() != 0:
        raise RuntimeError(f"ZCH should be full but has {module.open_slots().item()} open slots")
    return forward


def arriving(run: Run, interval_steps: int, wanted: float | None, goal: float | None) -> Iterator[Row]:
    sizes = run.sizes
    rows = sizes.full_capacity_rows
    batches = zipf_batches(rows, sizes.batch, sizes.batches)
    arrivals = NewIds(batches, SHARE, first=1 << 40)
    ours = full_embedding(DIM, embstore.SGD(lr=0.01), rows, first=rows)
    forwards = (ours, zch(rows, interval_steps, sizes.batch))
    for keys in batches.keys:
        ours(keys)

    def side(forward: Callable[[torch.Tensor], torch.Tensor]) -> Side:
        ids = torch.empty(0)

        def prepare(step: int) -> None:
            nonlocal ids
            ids = arrivals.at(step)

        return Side(lambda step: void(forward(ids)), prepare)

    sides = [side(forward) for forward in forwards]
    rounds = max(2, sizes.slow_rounds * 2 // interval_steps)
    work = f"forward, 5 % new ids, full table, {rows:,} rows, dim {DIM}"
    against = f"TorchRec ZCH, new ids every {interval_steps} steps"
    for threads in run.threads:
        set_threads(threads)
        our_time, their_time = interleave(sides, rounds, 1, interval_steps, first_step=threads << 20)
        detail = rate(sizes.batch, our_time, their_time)
        yield Row(work, against, threads, their_time / our_time, wanted, goal, detail)
    ours.table.close()


def void(_: torch.Tensor) -> None:
    """Drops the vectors within the timed step."""


@register("zch-2")
def every_other_step(run: Run) -> Iterator[Row]:
    yield from arriving(run, 2, wanted=30.0, goal=100.0)


@register("zch-100")
def every_hundredth_step(run: Run) -> Iterator[Row]:
    yield from arriving(run, 100, wanted=None, goal=None)
