"""Two-tower retrieval with in-batch negatives, on MovieLens 100k.

    python -m examples.two_tower            # fetches the ratings once, into build/data

A user tower and an item tower give vectors whose dot product ranks films. The other films of a batch are the
negatives; frequent films are negatives more often, so their logits are lowered by the log of their frequency.
The last tenth of the ratings, in time, is held out: how often is a film that a user liked among the ten
proposed, of those that the user has not rated before?
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

import embstore
from benchmarks.movielens_data import load

DIM, BATCH, LIKED = 32, 256, 4


class Tower(nn.Module):
    """A row for every id, and a small network over it. Vectors have the length 1."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.rows = embstore.Embedding(
            DIM, name=name, optimizer=embstore.Adagrad(lr=0.05), initializer=embstore.Normal(0.0, 0.1)
        )
        self.network = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        return nn.functional.normalize(rows + self.network(rows), dim=1)


def loss_of(
    users: torch.Tensor, items: torch.Tensor, ids: torch.Tensor, log_share: torch.Tensor
) -> torch.Tensor:
    """Which item of the batch belongs to each user? Other places of the same item are no negatives."""
    logits = users @ items.T / 0.2 - log_share
    same = (ids[:, None] == ids[None]) & ~torch.eye(len(ids), dtype=torch.bool)
    return nn.functional.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(ids)))


def recall(scores: np.ndarray, rated: np.ndarray, users: np.ndarray, items: np.ndarray, k: int = 10) -> float:
    """Share of the (user, item) pairs whose item is among the user's k best that are not rated yet."""
    best = np.argsort(np.where(rated, -np.inf, scores), 1)[:, -k:]
    return float((best[users] == items[:, None]).any(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # for small matrices the fastest

    users, items, stars, _ = load()  # in the order of time
    cut = len(users) * 9 // 10
    liked = np.flatnonzero(stars[:cut] >= LIKED)
    train = torch.from_numpy(np.stack([users[liked], items[liked]]))
    counts = torch.from_numpy(np.bincount(items[liked], minlength=items.max() + 1))
    log_share = torch.log(counts.clamp(min=1) / counts.sum())

    user_tower, item_tower = Tower("user"), Tower("item")
    adam = torch.optim.Adam([*user_tower.network.parameters(), *item_tower.network.parameters()], lr=1e-3)
    for epoch in range(1, options.epochs + 1):
        losses = []
        for batch in train[:, torch.randperm(len(liked))].split(BATCH, dim=1):
            loss = loss_of(user_tower(batch[0]), item_tower(batch[1]), batch[1], log_share[batch[1]])
            adam.zero_grad()
            loss.backward()  # the rows move in here
            adam.step()
            losses.append(loss.item())
        if epoch % max(1, options.epochs // 5) == 0:
            print(f"epoch {epoch:3}: loss {np.mean(losses):.3f}")

    known = np.unique(users[:cut])
    late = np.flatnonzero((stars >= LIKED) & (np.arange(len(users)) >= cut) & np.isin(users, known))
    rated = np.zeros((users.max() + 1, items.max() + 1), bool)
    rated[users[:cut], items[:cut]] = True
    user_tower.eval(), item_tower.eval()  # an id without a row reads 0.0 now, and gets none
    with torch.no_grad():
        all_users, all_items = (torch.arange(n) for n in rated.shape)
        scores = (user_tower(all_users) @ item_tower(all_items).T).numpy()
    popular = np.broadcast_to(counts.numpy(), scores.shape)
    print(f"rows: {len(user_tower.rows.table)} users, {len(item_tower.rows.table)} items")
    print(f"recall at 10 of {len(late)} held-out likes")
    print(f"  two towers     {recall(scores, rated, users[late], items[late]):.4f}")
    print(f"  most popular   {recall(popular, rated, users[late], items[late]):.4f}")


if __name__ == "__main__":
    main()
