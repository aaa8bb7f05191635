"""Moving from TorchRec contrib's dynamic embedding (TDE): train on with the rows that it left in Redis.

    python examples/from_tde.py --url 'redis://127.0.0.1:6379/?prefix=shop'
    python examples/from_tde.py --url 'redis://127.0.0.1:6379/?prefix=try' --sample   # writes such rows first

`import torchrec_dynamic_embedding as tde` stays, and so do the keys and values in Redis: an id that the
server knows comes into its table with the optimizer state it left with. examples/parameter_server.py is the
same on several ranks. Take a copy of the database first (`redis-cli SAVE`): `tde.save` writes into it.
"""

from __future__ import annotations

import argparse
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_dynamic_embedding as tde
from embstore.stores.urls import open_store

DIM, IDS = 16, 500


class Model(torch.nn.Module):
    def __init__(self, configs: list[EmbeddingConfig]) -> None:
        super().__init__()
        self.emb = EmbeddingCollection(tables=configs, device=torch.device("meta"))

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.emb(kjt)["user"].values()


def write_sample(url: str) -> None:
    """Vectors, and the sum of row-wise Adagrad behind each: a value of Redis for either."""
    store = open_store(url, table="emb.t_user", tensor_bytes=[4 * DIM, 4])
    rows = np.concatenate([np.full((IDS, DIM), 0.5), np.full((IDS, 1), 0.01)], 1).astype(np.float32)
    store.put(np.arange(IDS, dtype=np.int64) * 1_000_003, rows.view(np.uint8), np.ones(IDS, np.uint64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True, help="the server and the prefix of the keys")
    parser.add_argument("--sample", action="store_true", help="write some rows first, as TDE would have")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec's planner has much to tell
    if options.sample:
        write_sample(options.url)

    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(one_rank)  # torchrun would say
    dist.init_process_group("gloo")
    configs = [EmbeddingConfig(name="t_user", num_embeddings=128, embedding_dim=DIM, feature_names=["user"])]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders = [EmbeddingCollectionSharder(fused_params=fused)]
    model = DistributedModelParallel(Model(configs), device=torch.device("cpu"), sharders=sharders)

    ids = torch.arange(IDS).mul(1_000_003).split(100)  # the table has room for 128 of the 500
    batches = [
        KeyedJaggedTensor(["user"], part, lengths=torch.ones(len(part), dtype=torch.int64)) for part in ids
    ]
    loader = tde.wrap(options.url, batches, model, {"emb": configs})
    for epoch in range(3):
        losses = []
        for batch in loader:
            vectors = model(batch)
            if epoch == 0 and not losses:
                print(f"first vectors, as the server had them: mean {vectors.mean().item():.4f}")
            loss = (vectors - 1).square().sum()
            loss.backward()  # the rows move in here
            losses.append(loss.item() / vectors.numel())
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
    tde.save(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
