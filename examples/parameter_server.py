"""Two ranks train a click model whose tables hold 5 % of the ids; the rest is in Redis.

    torchrun --nproc_per_node 2 examples/parameter_server.py --url 'redis://127.0.0.1:6379/?prefix=clicks'

Without --url a redis-server is started on a free port for the run. The second epoch starts with nearly all of
its rows in Redis, and its loss shows that they come back as they went.
"""

import argparse
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)  # TorchRec's planner says a lot

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torch import nn  # noqa: E402
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.types import ParameterConstraints  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

import torchrec_dynamic_embedding as tde  # noqa: E402

FEATURES = ("user", "item")
IDS, ROWS, DIM, BATCH = 40_000, 2_000, 16, 256


class Model(nn.Module):
    def __init__(self, configs: list[EmbeddingConfig]) -> None:
        super().__init__()
        self.emb = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        self.score = nn.Linear(DIM, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        vectors = self.emb(kjt)
        return self.score(vectors["user"].values() * vectors["item"].values())[:, 0]


class Clicks:
    """Users click on items of their own taste: what is learned lives in the rows of both."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank, self.batches = rank, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        rng = np.random.default_rng(self.rank)
        for _ in range(self.batches):
            users, items = (rng.integers(0, IDS, BATCH) for _ in FEATURES)
            clicks = torch.from_numpy((users % 7 == items % 7).astype(np.float32))
            ids = torch.from_numpy(np.concatenate([users, items])) * 1_000_003 - 5_000_000_000
            yield (
                clicks,
                KeyedJaggedTensor(list(FEATURES), ids, lengths=torch.ones(2 * BATCH, dtype=torch.int64)),
            )


def sharded(configs: list[EmbeddingConfig]) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    world = dist.get_world_size()
    model = Model(configs)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    sharders = [EmbeddingCollectionSharder(fused_params=fused)]
    rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={config.name: rows for config in configs},
    )
    dmp = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=planner.collective_plan(model, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def start_redis() -> tuple[subprocess.Popen, int]:
    if shutil.which("redis-server") is None:
        raise SystemExit("there is no redis-server here: install one, or name another with --url")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
        if time.monotonic() > deadline:
            server.kill()
            raise SystemExit("redis-server did not start")
        time.sleep(0.05)
    return server, port


def train(url: str, epochs: int, batches: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    configs = [
        EmbeddingConfig(name=f"{f}_table", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
        for f in FEATURES
    ]
    model, optimizer = sharded(configs)
    loader = tde.wrap(url, Clicks(rank, batches), model, {"emb": configs}, num_prefetch=4)
    for epoch in range(epochs):
        losses, begin = [], time.perf_counter()
        for clicks, kjt in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(kjt), clicks)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            rate = dist.get_world_size() * BATCH * batches / (time.perf_counter() - begin)
            third = len(losses) // 3
            first, last = np.mean(losses[:third]), np.mean(losses[-third:])
            print(f"epoch {epoch}: loss {first:.4f} to {last:.4f}, {rate:,.0f} samples/s", flush=True)
    tde.save(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # torchrun's, when another rank failed: stop the server
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)  # without torchrun: one rank
    dist.init_process_group("gloo")
    server, address = None, [options.url]
    try:
        if options.url is None and dist.get_rank() == 0:
            server, port = start_redis()
            address = [f"redis://127.0.0.1:{port}/?prefix=clicks&layout=packed"]
        dist.broadcast_object_list(address)
        train(address[0], options.epochs, options.batches)
        dist.barrier()
    finally:
        if server is not None:
            server.kill()
            server.wait()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
