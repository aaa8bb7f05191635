"""Train a click model on a stream of ever-new ids, with a dynamic table and with the hashing trick.

    python examples/click_stream.py [--steps 400] [--capacity 32768] [--seed 0]

Users and items come and go: every step a part of them is replaced by ids that nobody has seen before.
Two models of the same shape learn from the same impressions within the same memory:

    dynamic   embstore.Embedding: an id gets its own row when it first appears, and the rows of ids that
              have become rare make room for new ones
    hashed    torch.nn.Embedding: row = id % rows, so ids share rows, the new with the long gone

Each batch is first predicted and only then learned, so every prediction is about unseen impressions.
The AUC of the last half of the stream is printed for both.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import embstore

DIM, LATENT, BATCH = 16, 4, 4096
ADAGRAD_LR = 0.1


class Stream:
    """Impressions of users and items whose tastes are hidden in their latent vectors."""

    def __init__(self, seed: int, active: int = 20_000, turnover: float = 0.02) -> None:
        self.rng = np.random.default_rng(seed)
        self.active, self.turnover = active, turnover
        self.ids = {side: self._fresh(active) for side in ("user", "item")}
        self.taste = {side: self._tastes(active) for side in ("user", "item")}
        popularity = 1.0 / np.arange(1, active + 1) ** 0.8
        self.popularity = np.cumsum(popularity) / popularity.sum()
        self.seen = 2 * active

    def _fresh(self, n: int) -> np.ndarray:
        return self.rng.integers(-(2**63), 2**63, n, dtype=np.int64)

    def _tastes(self, n: int) -> np.ndarray:
        return self.rng.normal(0.0, 0.9, (n, LATENT))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """user ids, item ids, clicks of one step; afterwards some ids are replaced for good."""
        places = {side: np.searchsorted(self.popularity, self.rng.random(BATCH)) for side in self.ids}
        logits = (self.taste["user"][places["user"]] * self.taste["item"][places["item"]]).sum(1)
        clicks = self.rng.random(BATCH) < 1.0 / (1.0 + np.exp(-1.5 * logits))
        ids = [torch.from_numpy(self.ids[side][places[side]]) for side in ("user", "item")]
        leaving = int(self.active * self.turnover)
        for side in self.ids:
            gone = self.rng.choice(self.active, leaving, replace=False)
            self.ids[side][gone], self.taste[side][gone] = self._fresh(leaving), self._tastes(leaving)
        self.seen += 2 * leaving
        return ids[0], ids[1], torch.from_numpy(clicks.astype(np.float32))


class ClickModel(nn.Module):
    """Dot product of two embeddings beside a small network over both."""

    def __init__(self, user: nn.Module, item: nn.Module) -> None:
        super().__init__()
        self.user, self.item = user, item
        self.top = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        u, v = self.user(users), self.item(items)
        return (u * v).sum(1) + self.top(torch.cat([u, v], 1)).squeeze(1)


class Hashed(nn.Embedding):
    """The hashing trick: ids share a fixed number of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, DIM, sparse=True)
        nn.init.uniform_(self.weight, -0.05, 0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids % self.num_embeddings)


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """The chance that a clicked impression is ranked above one that was not."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = clicks > 0.5
    n1, n0 = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--capacity", type=int, default=32768, help="rows of each dynamic table")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.manual_seed(options.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # explicit, or torch warns

    def dynamic(name: str) -> embstore.Embedding:
        return embstore.Embedding(
            dim=DIM,
            name=name,
            optimizer=embstore.Adagrad(lr=ADAGRAD_LR),
            initializer=embstore.Uniform(-0.05, 0.05),
            init_capacity=options.capacity,
            max_capacity=options.capacity,
            seed=options.seed,
        )

    dynamic_model = ClickModel(dynamic("user"), dynamic("item"))
    table = dynamic_model.user.table
    table_bytes = table.stats().bytes + table.capacity * table.row_bytes  # once it is full
    hashed_rows = table_bytes // (2 * 4 * DIM)  # a weight and Adagrad's sum for each component
    hashed_model = ClickModel(Hashed(hashed_rows), Hashed(hashed_rows))
    hashed_model.top.load_state_dict(dynamic_model.top.state_dict())
    tables = [*hashed_model.user.parameters(), *hashed_model.item.parameters()]
    optimizers = [
        torch.optim.Adam(dynamic_model.top.parameters(), lr=1e-3),
        torch.optim.Adam(hashed_model.top.parameters(), lr=1e-3),
        torch.optim.Adagrad(tables, lr=ADAGRAD_LR),
    ]
    models = {"dynamic": dynamic_model, "hashed": hashed_model}

    stream = Stream(options.seed)
    scores: dict[str, list[np.ndarray]] = {name: [] for name in models}
    clicks_seen: list[np.ndarray] = []
    progress = tqdm(range(options.steps), desc="training", unit="batch", mininterval=1.0)
    for step in progress:
        users, items, clicks = stream.batch()
        for name, model in models.items():
            logits = model(users, items)
            nn.functional.binary_cross_entropy_with_logits(logits, clicks).backward()
            scores[name].append(logits.detach().numpy())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clicks_seen.append(clicks.numpy())
        if step % 20 == 19:
            last = slice(-20, None)
            progress.set_postfix(
                {
                    k: f"{auc(np.concatenate(v[last]), np.concatenate(clicks_seen[last])):.4f}"
                    for k, v in scores.items()
                }
            )

    half = options.steps // 2
    truth = np.concatenate(clicks_seen[half:])
    stats = table.stats()
    print(
        f"\nids so far: {stream.seen:,} for 2 x {stats.capacity:,} rows; evicted: {stats.evictions:,} users"
    )
    print(f"memory of a table: dynamic {stats.bytes:,} bytes, hashed {hashed_rows * 2 * 4 * DIM:,} bytes")
    for name in models:
        print(f"held-out AUC, {name:8s} {auc(np.concatenate(scores[name][half:]), truth):.4f}")


if __name__ == "__main__":
    main()
