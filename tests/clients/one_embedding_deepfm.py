"""DeepFM on OneEmbedding: one lookup brings the vector and the first-order weight of each id as two columns.

Trains with Adam, evaluates, saves a state_dict, restores it into a new model and goes on, and exports the
rows of its snapshot.

python one_embedding_deepfm.py FOLDER        one rank; under torchrun, as many as there are
"""

from __future__ import annotations

import glob
import os
import sys
from typing import Any

import numpy as np
import torch
from click_batches import FIELDS, average_gradients, clicks, start_ranks
from torch import nn

import one_embedding as flow_one_embedding

VECTOR, STEPS = 8, 4


class DeepFM(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        normal = flow_one_embedding.make_normal_initializer
        columns = [
            flow_one_embedding.make_column_options(normal(mean=0.0, std=0.05)),
            flow_one_embedding.make_column_options(normal(mean=0.0, std=0.01)),
        ]
        self.embedding = flow_one_embedding.MultiTableMultiColumnEmbedding(
            name="fm_embedding",
            embedding_dim=[VECTOR, 1],
            dtype=torch.float,
            key_type=torch.int64,
            tables=[flow_one_embedding.make_table_options(columns) for _ in range(FIELDS)],
            store_options=flow_one_embedding.make_cached_ssd_store_options(
                cache_budget_mb=1,
                persistent_path=os.path.join(folder, "persistent"),
                capacity=100_000,
                size_factor=3,
                physical_block_size=4096,
            ),
        )
        self.deep = nn.Sequential(nn.Linear(FIELDS * VECTOR, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = self.embedding(ids)
        vectors, weights = looked_up[..., :VECTOR], looked_up[..., VECTOR:]
        square_of_sum, sum_of_squares = vectors.sum(1) ** 2, (vectors**2).sum(1)
        second_order = 0.5 * (square_of_sum - sum_of_squares).sum(1, keepdim=True)
        return weights.sum(1) + second_order + self.deep(vectors.flatten(1))


class Trainer:
    def __init__(self, folder: str, rank: int) -> None:
        torch.manual_seed(7)
        self.model, self.rank = DeepFM(folder), rank
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loss = nn.BCEWithLogitsLoss()

    def train(self, first: int, last: int) -> list[float]:
        self.model.train()
        losses = []
        for step in range(first, last):
            labels, _, ids = clicks(step, self.rank)
            loss = self.loss(self.model(ids), labels)
            self.optimizer.zero_grad()
            loss.backward()
            average_gradients(self.model.deep)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            return torch.sigmoid(self.model(clicks(99, self.rank)[2]))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def exported(folder: str, snapshot: str) -> dict[int, np.ndarray[Any, Any]]:
    """The rows of all ranks' directories: vector, weight and both moments of Adam."""
    directories = sorted(glob.glob(os.path.join(folder, "persistent", "*-*")))
    rows = {}
    kinds = (torch.int64, torch.float32, 3 * (VECTOR + 1))
    with flow_one_embedding.make_persistent_table_reader(directories, snapshot, *kinds) as reader:
        for keys, values in reader:
            rows.update(zip(keys.tolist(), values, strict=True))
    return rows


def main(folder: str) -> None:
    rank, world = start_ranks()
    trainer = Trainer(folder, rank)
    losses = trainer.train(0, STEPS)
    assert all(np.isfinite(losses))
    seen = trainer.evaluate()
    saved = trainer.state()
    torch.save(saved, os.path.join(folder, f"checkpoint-{rank}.pt"))
    assert any("OneEmbeddingSnapshot" in name for name in saved["model"])
    later = trainer.train(STEPS, 2 * STEPS)
    trainer.model.embedding.close()

    again = Trainer(folder, rank)
    stored = torch.load(os.path.join(folder, f"checkpoint-{rank}.pt"))
    snapshot = next(v for k, v in stored["model"].items() if k.endswith("OneEmbeddingSnapshot"))
    again.model.load_state_dict(stored["model"])
    again.optimizer.load_state_dict(stored["optimizer"])
    assert torch.equal(again.evaluate(), seen), "the restored model answers as the saved one did"
    assert again.train(STEPS, 2 * STEPS) == later, "and goes on as it did"
    again.model.embedding.close()

    rows = exported(folder, snapshot)
    ids = {int(i) for step in range(STEPS) for r in range(world) for i in clicks(step, r)[2].flatten()}
    assert rows.keys() == ids and all(np.isfinite(row).all() for row in rows.values())
    print(f"rank {rank} of {world}: all well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
