"""A training step of DistributedModelParallel: dynamic tables against TorchRec's static ones.

26 features with a table each, dim 32, 4,096 samples of 10 ids a rank, forward and backward with the update.
Both models live in the same processes and step in turns. A static table gets row numbers, a dynamic one those
numbers scattered over int64. Two ranks have one thread each, as there are two cores.

Two ranks are compared with one that has the same work for itself. Two such dynamic models side by side, which
exchange nothing, show what the machine allows.

Both sides are shown row-wise and table-wise, which is TorchRec's fastest and what dynamic tables of bags
should be where there are more of them than ranks.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from .ids import scatter, zipf_rows
from .registry import Row, Run, register
from .timing import SETTLE_SECONDS

FEATURES, DIM, IDS = 26, 32, 10
OPTIMIZERS = ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD")
MARKS = (1.5, 2.0)
SCALING_MARKS = (0.7, 0.85)
TIMEOUT_SECONDS = 900


def ranks(
    kind: str, optimizer: str, sharding: str, world: int, threads: int, run: Run, *, apart: bool = False
) -> dict[str, float]:
    """Starts the ranks and returns the medians of rank 0. `apart`: each has a dynamic model of its own."""
    quick = run.sizes.rows < 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "kind": kind,
            "optimizer": optimizer,
            "sharding": sharding,
            "world": world,
            "threads": threads,
            "apart": apart,
            "store": os.path.join(folder, "store"),
            "rows": 10_000 if quick else 100_000,
            "samples": 512 if quick else 4096,
            "rounds": 3 if quick else 20,
            "batches": 4 if quick else 8,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "LOCAL_WORLD_SIZE": str(world)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.dmp", json.dumps({**task, "rank": rank})],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(world)
        ]
        try:
            answers = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError(f"ranks should end with 0 but ended with: {[p.returncode for p in processes]}")
        result: dict[str, float] = json.loads(answers[0])
        return result


def register_kind(kind: str, name: str) -> None:
    @register(f"dmp-{kind}")
    def work(run: Run) -> Iterator[Row]:
        for optimizer in OPTIMIZERS:
            one_rank: float | None = None
            for world, threads in [*((1, threads) for threads in run.threads), (2, 1)]:
                for sharding in ("table_wise",) if world == 1 else ("row_wise", "table_wise"):
                    seconds = ranks(kind, optimizer, sharding, world, threads, run)
                    title = f"DMP step, {name}, {optimizer.removeprefix('EXACT_').lower()}, {world} rank(s)"
                    detail = f"ours {seconds['dynamic'] * 1e3:.1f}, theirs {seconds['static'] * 1e3:.1f} ms"
                    ratio = seconds["static"] / seconds["dynamic"]
                    yield Row(title, f"TorchRec static, {sharding}", threads, ratio, *MARKS, detail)
                    ours = seconds["dynamic"]
                    if (world, threads) == (1, 1):
                        one_rank = ours
                        beside = ranks(kind, optimizer, sharding, 2, 1, run, apart=True)["dynamic"]
                        detail = f"{ours * 1e3:.1f} -> {beside * 1e3:.1f} ms, nothing exchanged"
                        yield Row(
                            title, "itself, two side by side", threads, ours / beside, None, None, detail
                        )
                    elif world == 2 and one_rank is not None:
                        detail = f"{one_rank * 1e3:.1f} -> {ours * 1e3:.1f} ms, {sharding}"
                        against = "itself on 1 rank, same work a rank"
                        yield Row(title, against, threads, one_rank / ours, *SCALING_MARKS, detail)


register_kind("ebc", "EmbeddingBagCollection")
register_kind("ec", "EmbeddingCollection")


# ---- what a rank does


def model(task: dict[str, Any], dynamic: bool) -> Any:
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ShardingEnv

    from dynamicemb import DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder

    class BagSharder(DynamicEmbeddingBagCollectionSharder):
        """TorchRec offers row-wise bags for GPUs only, though they run on the CPU."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [*super().sharding_types(compute_device_type), "row_wise"]

    bags = task["kind"] == "ebc"
    config = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        config(name=f"t{i}", num_embeddings=task["rows"], embedding_dim=DIM, feature_names=[f"f{i}"])
        for i in range(FEATURES)
    ]
    collection = (EmbeddingBagCollection if bags else EmbeddingCollection)(
        tables=configs, device=torch.device("meta")
    )
    group = dist.new_subgroups(1)[0] if task["apart"] else dist.group.WORLD
    world = group.size()
    constraint = (
        DynamicEmbParameterConstraints(
            sharding_types=[task["sharding"]],
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(),
        )
        if dynamic
        else DynamicEmbParameterConstraints(sharding_types=[task["sharding"]], compute_kernels=["fused"])
    )
    planner = DynamicEmbeddingShardingPlanner(
        configs,
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={c.name: constraint for c in configs},
        debug=False,
    )
    params = {"optimizer": EmbOptimType[task["optimizer"]], "learning_rate": 0.01, "eps": 1e-8}
    sharders = [BagSharder(params) if bags else DynamicEmbeddingCollectionSharder(params)]
    return DistributedModelParallel(
        collection,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(group),
        plan=planner.collective_plan(collection, sharders, group),
        sharders=sharders,
    )


def step(module: Any, batch: Any, gradients: Any) -> None:
    import torch

    answer = module(batch)
    if hasattr(answer, "values") and not isinstance(answer.values(), type({}.values())):
        answer.values().backward(gradients)
    else:
        vectors = [jagged.values() for jagged in answer.values()]
        torch.autograd.backward(vectors, [gradients[: len(v)] for v in vectors])


def serve(task: dict[str, Any]) -> None:
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    import embstore

    torch.set_num_threads(task["threads"])
    embstore.set_num_threads(task["threads"])
    world, rank = task["world"], task["rank"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task["store"], world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    sides = {"dynamic": model(task, True)}
    if not task["apart"]:  # TorchRec's tables want to be on rank 0 of the world
        sides["static"] = model(task, False)
    features = [f"f{i}" for i in range(FEATURES)]
    count = FEATURES * task["samples"] * IDS
    rng = np.random.default_rng(rank)
    batches: dict[str, list[Any]] = {"dynamic": [], "static": []}
    for _ in range(task["batches"]):
        numbers = zipf_rows(task["rows"], count, rng)
        lengths = torch.full((FEATURES * task["samples"],), IDS, dtype=torch.int32)
        for side, values in (("dynamic", scatter(numbers)), ("static", torch.from_numpy(numbers))):
            batches[side].append(KeyedJaggedTensor(features, values, lengths=lengths))
    rows, width = (task["samples"], FEATURES * DIM) if task["kind"] == "ebc" else (task["samples"] * IDS, DIM)
    gradients = {side: torch.randn(rows, width) * 1e-3 for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    warmup = task["batches"]
    for number in range(warmup + task["rounds"]):
        for side, module in sides.items():
            time.sleep(SETTLE_SECONDS)
            dist.barrier()
            start = time.perf_counter()
            step(module, batches[side][number % task["batches"]], gradients[side])
            dist.barrier()
            if number >= warmup:
                seconds[side].append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({side: statistics.median(times) for side, times in seconds.items()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
