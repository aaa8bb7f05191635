"""Learn from clicks as they come, and serve what was learned a moment later, in another process.

    python examples/online_learning.py

The trainer publishes an increment of its table every few batches: rows that changed, ids that were evicted.
A reader in a process of its own follows them while users come and go. It predicts every batch before the
trainer learns from it, with the dense weights that belong to the same state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import embstore

DIM, BATCH, ACTIVE = 16, 512, 5_000


def clicks(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Users of this moment, and whether they click. A user's taste is a function of the id."""
    rng = np.random.default_rng(step)
    users = (rng.random(BATCH) ** 2 * ACTIVE).astype(np.int64) + 20 * step  # the oldest leave, new ones come
    clicked = np.sin(users * 12.9898) + rng.normal(0, 0.3, BATCH) > 0
    return torch.from_numpy(users * 0x5DEECE66D), torch.from_numpy(clicked)


def serve(folder: Path, steps: int, answers) -> None:
    """The serving process. A batch that it has answered may be learned."""
    torch.set_num_threads(1)
    head, right, known = nn.Linear(DIM, 1), [], []
    with embstore.serving.Reader(folder / "log", cache=folder / "cache") as reader:
        reader.start(interval_seconds=0.02)
        for step in range(steps):
            state = reader.state  # rows and weights of one moment
            head.load_state_dict(torch.load(folder / f"head-{state.number}.pt"))
            users, clicked = clicks(step)
            vectors, found = state.find("user", users)
            with torch.no_grad():
                right.append(((head(vectors)[:, 0] > 0) == clicked).double().mean().item())
            known.append(found.double().mean().item())
            answers.put(step)
            answers.join()  # until the trainer is through with it
    answers.put((np.mean(right[steps // 2 :]), np.mean(known[steps // 2 :]), reader.state.number))
    answers.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=10, help="batches between two increments")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    users = embstore.Embedding(DIM, name="user", optimizer=embstore.Adagrad(lr=0.5), max_capacity=8192)
    head = nn.Linear(DIM, 1)
    adam = torch.optim.Adam(head.parameters(), lr=0.01)
    tables = {"model": {"user": users.table}}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.save(head.state_dict(), folder / "head-0.pt")
        log = embstore.IncrementLog.create(folder / "log", tables, optim=False)
        context = multiprocessing.get_context("spawn")
        answers = context.JoinableQueue()
        server = context.Process(target=serve, args=(folder, options.steps, answers), daemon=True)
        server.start()
        for step in range(options.steps):
            answers.get(timeout=60)
            ids, clicked = clicks(step)
            logits = head(users(ids))[:, 0]
            adam.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, clicked.float()).backward()
            adam.step()
            if step % options.every == 0:  # the weights first: a state that is served has its own
                torch.save(head.state_dict(), folder / f"head-{log.last() + 1}.pt")
                log.append(tables)
            answers.task_done()
        right, known, number = answers.get(timeout=60)
        answers.task_done()
        server.join(60)
    stats = users.table.stats()
    print(f"trainer: {stats.size:,} rows, {stats.evictions:,} evicted, {number} increments followed")
    print(f"served in the last half: {known:.1%} of the ids known, {right:.1%} of the clicks predicted")


if __name__ == "__main__":
    main()
