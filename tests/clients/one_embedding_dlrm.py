"""DLRM on OneEmbedding: SGD with a schedule, named snapshots, and a reshard of the rows for export.

python one_embedding_dlrm.py FOLDER        one rank; under torchrun, as many as there are
"""

from __future__ import annotations

import glob
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from click_batches import FIELDS, average_gradients, clicks, start_ranks
from torch import nn

import one_embedding

DIM, STEPS, SIZES = 8, 4, (40, 80, 160, 320, 640)


class DLRM(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(3, DIM), nn.ReLU())
        scales = [math.sqrt(1 / size) for size in SIZES]
        tables = [
            one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-scale, high=scale))
            for scale in scales
        ]
        store_options = one_embedding.make_cached_host_mem_store_options(
            cache_budget_mb=1,
            persistent_path=os.path.join(folder, "persistent"),
            capacity=sum(SIZES),
            size_factor=1,
        )
        self.embedding = one_embedding.MultiTableEmbedding(
            "sparse_embedding",
            embedding_dim=DIM,
            dtype=torch.float,
            key_type=torch.int64,
            tables=tables,
            store_options=store_options,
        )
        pairs = (FIELDS + 1) * FIELDS // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), self.embedding(ids)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(FIELDS + 1, FIELDS + 1, offset=-1)
        return self.top(torch.cat([bottom, products[:, rows, columns]], dim=1))


class Trainer:
    def __init__(self, folder: str, rank: int) -> None:
        torch.manual_seed(7)
        self.model, self.rank = DLRM(folder), rank
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 3)
        )
        self.loss = nn.BCEWithLogitsLoss()

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            labels, dense, ids = clicks(step, self.rank)
            loss = self.loss(self.model(dense, ids), labels)
            loss.backward()
            average_gradients(self.model.bottom)
            average_gradients(self.model.top)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def dense_state(self) -> dict[str, torch.Tensor]:
        parts = {"bottom": self.model.bottom, "top": self.model.top}
        return {f"{n}.{k}": v.clone() for n, part in parts.items() for k, v in part.state_dict().items()}


def main(folder: str) -> None:
    rank, world = start_ranks()
    trainer = Trainer(folder, rank)
    trainer.train(0, STEPS)
    dense, schedule = trainer.dense_state(), trainer.schedule.state_dict()
    trainer.model.embedding.save_snapshot("step-4")
    later = trainer.train(STEPS, 2 * STEPS)
    trainer.model.embedding.save_snapshot("step-8")
    trainer.model.embedding.close()

    again = Trainer(folder, rank)
    again.model.embedding.load_snapshot("step-4")
    again.model.load_state_dict(dense, strict=False)
    again.schedule.load_state_dict(schedule)
    again.optimizer.param_groups[0]["lr"] = schedule["_last_lr"][0]
    assert again.train(STEPS, 2 * STEPS) == later, "as if training had not stopped"
    again.model.embedding.close()

    if rank == 0:
        directories = sorted(glob.glob(os.path.join(folder, "persistent", "*-*")))
        assert len(directories) == world
        kinds = (torch.int64, torch.float32, DIM)
        with (
            one_embedding.make_persistent_table_reader(directories, "step-8", *kinds) as reader,
            one_embedding.make_persistent_table_writer([f"{folder}/export"], "final", *kinds) as writer,
        ):
            for keys, values in reader:
                writer.write(keys, values)
        with one_embedding.make_persistent_table_reader(f"{folder}/export", "final", *kinds) as reader:
            rows = {key: row for keys, values in reader for key, row in zip(keys.tolist(), values)}
        ids = {
            int(i) for step in range(2 * STEPS) for r in range(world) for i in clicks(step, r)[2].flatten()
        }
        assert rows.keys() == ids and all(np.isfinite(row).all() for row in rows.values())
    if world > 1:
        dist.barrier()
    print(f"rank {rank} of {world}: all well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
