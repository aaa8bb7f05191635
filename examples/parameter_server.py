"""Ranks train a click model whose tables hold 5 % of the ids; the rest is in Redis.

    redis-server --save '' &
    torchrun --nproc_per_node 2 examples/parameter_server.py --url 'redis://127.0.0.1:6379/?prefix=clicks'

The second epoch starts with nearly all of its rows in Redis, and its loss shows that they come back as they
went.
"""

import argparse
import logging
import time

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_dynamic_embedding as tde

IDS, ROWS, DIM, BATCH = 40_000, 2_000, 16, 256
CONFIGS = [
    EmbeddingConfig(name=f"{f}_table", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
    for f in ("user", "item")
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = EmbeddingCollection(tables=CONFIGS, device=torch.device("meta"))
        self.score = nn.Linear(DIM, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        vectors = self.emb(kjt)
        return self.score(vectors["user"].values() * vectors["item"].values())[:, 0]


class Clicks:
    """Users click on items of their own taste: what is learned lives in the rows of both."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        rng = np.random.default_rng(dist.get_rank())
        for _ in range(self.batches):
            users, items = rng.integers(0, IDS, (2, BATCH))
            clicks = torch.from_numpy((users % 7 == items % 7).astype(np.float32))
            ids = torch.from_numpy(np.concatenate([users, items])) * 1_000_003 - 5_000_000_000
            lengths = torch.ones(2 * BATCH, dtype=torch.int64)
            yield clicks, KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="redis://127.0.0.1:6379/?prefix=clicks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=120)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec's planner has much to tell
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = Model()
    adagrad = torch.optim.Adagrad(plain.score.parameters(), lr=0.1)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    sharders = [EmbeddingCollectionSharder(fused_params=fused)]
    model = DistributedModelParallel(plain, device=torch.device("cpu"), sharders=sharders)
    loader = tde.wrap(options.url, Clicks(options.batches), model, {"emb": CONFIGS}, num_prefetch=4)
    for epoch in range(options.epochs):
        losses, begin = [], time.perf_counter()
        for clicks, kjt in loader:  # the ids of kjt are slots of the tables now
            adagrad.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(kjt), clicks)
            loss.backward()  # the rows of the tables move in here
            adagrad.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            rate = dist.get_world_size() * BATCH * options.batches / (time.perf_counter() - begin)
            third = len(losses) // 3
            first, last = np.mean(losses[:third]), np.mean(losses[-third:])
            print(f"epoch {epoch}: loss {first:.4f} to {last:.4f}, {rate:,.0f} samples/s", flush=True)
    tde.save(model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
