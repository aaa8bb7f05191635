"""Two-tower retrieval with in-batch negatives, on MovieLens 100k.

    python -m examples.two_tower            # fetches the ratings once, into build/data

A user tower and an item tower give vectors whose dot product ranks films. The other films of a batch are the
negatives; frequent ones are negatives more often, so their logits are lowered by the log of their frequency.
The last film that each user liked is the test: is it among the ten proposed? Its predecessor picks the epoch.
"""

import argparse

import numpy as np
import torch
from torch import Tensor, nn

import embstore
from benchmarks.movielens_data import load

DIM, BATCH, LIKED = 32, 256, 4


class Tower(nn.Module):
    """A row for every id, and a small network over it. Vectors have the length 1."""

    def __init__(self, name: str) -> None:
        super().__init__()
        rule, start = embstore.Adagrad(lr=0.05), embstore.Normal(0.0, 0.1)
        self.rows = embstore.Embedding(DIM, name=name, optimizer=rule, initializer=start)
        self.network = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        return nn.functional.normalize(rows + self.network(rows), dim=1)


def loss_of(users: Tensor, items: Tensor, ids: Tensor, log_share: Tensor) -> Tensor:
    """Which item of the batch belongs to each user? Other places of the same item are no negatives."""
    logits = users @ items.T / 0.2 - log_share
    same = (ids[:, None] == ids[None]) & ~torch.eye(len(ids), dtype=torch.bool)
    return nn.functional.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(ids)))


class HeldOut:
    """The last like of every user. Films that the user liked before are not proposed."""

    def __init__(self, users: np.ndarray, items: np.ndarray, liked: np.ndarray) -> None:
        newest = liked[::-1]
        self.places = newest[np.unique(users[newest], return_index=True)[1]]
        self.users, self.items = users[self.places], items[self.places]
        self.known = np.zeros((users.max() + 1, items.max() + 1), bool)
        self.known[users[liked], items[liked]] = True
        self.known[self.users, self.items] = False

    def recall(self, scores: np.ndarray) -> float:
        """Share of the users whose last like is among the ten best for them."""
        best = np.argsort(np.where(self.known, -np.inf, scores), 1)[:, -10:]
        return float((best[self.users] == self.items[:, None]).any(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for small matrices the fastest
    users, items, stars, _ = load()  # in the order of time
    liked = np.flatnonzero(stars >= LIKED)
    test = HeldOut(users, items, liked)
    liked = np.setdiff1d(liked, test.places)
    validation = HeldOut(users, items, liked)
    liked = np.setdiff1d(liked, validation.places)
    train = torch.from_numpy(np.stack([users[liked], items[liked]]))
    counts = torch.from_numpy(np.bincount(items[liked], minlength=items.max() + 1))
    log_share = torch.log(counts.clamp(min=1) / counts.sum())
    user_tower, item_tower = Tower("user"), Tower("item")
    adam = torch.optim.Adam([*user_tower.network.parameters(), *item_tower.network.parameters()], lr=1e-3)
    best = (-1.0, 0, 0.0)  # recall of the validation, epoch, recall of the test
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in train[:, torch.randperm(len(liked))].split(BATCH, dim=1):
            loss = loss_of(user_tower(batch[0]), item_tower(batch[1]), batch[1], log_share[batch[1]])
            adam.zero_grad()
            loss.backward()  # the rows move in here
            adam.step()
            losses.append(loss.item())
        user_tower.eval(), item_tower.eval()  # an id without a row reads 0.0 now, and gets none
        with torch.no_grad():
            every = [torch.arange(n) for n in test.known.shape]
            scores = (user_tower(every[0]) @ item_tower(every[1]).T).numpy()
        user_tower.train(), item_tower.train()
        best = max(best, (validation.recall(scores), epoch, test.recall(scores)))
        print(f"epoch {epoch:3}: loss {np.mean(losses):.3f}, recall {validation.recall(scores):.4f}")
    print(f"recall at 10 for {len(test.users)} users, after epoch {best[1]}")
    print(f"  two towers     {best[2]:.4f}")
    print(f"  most popular   {test.recall(np.broadcast_to(counts.numpy(), test.known.shape)):.4f}")


if __name__ == "__main__":
    main()
