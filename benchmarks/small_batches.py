"""Small batches: what a training step costs beside the engine, in Python, torch and TorchRec.

26 features with a table each, dim 32, 256 samples of one id, forward and backward with an SGD update, on one
thread. The overhead of a step is its time without the calls of the engine; it should be below 1 ms.

native    embstore.EmbeddingBagCollection, a tensor for each feature
DMP       DistributedModelParallel over dynamic tables, a new KeyedJaggedTensor for each step
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .registry import Row, Run, register

FEATURES, DIM, SAMPLES, IDS = 26, 32, 256, 10_000
LIMIT_SECONDS = 1e-3
MARKS = (1.0, 2.0)
ENGINE_CALLS = ("look_up", "apply_gradients", "copy_columns")
WARMUP_STEPS, STEPS, BATCHES = 50, 500, 8
TIMEOUT_SECONDS = 300


@register("small-batches")
def work(run: Run) -> Iterator[Row]:
    for kind, name in (("native", "native EmbeddingBagCollection"), ("dmp", "DistributedModelParallel")):
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.small_batches", kind],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_SECONDS,
            check=True,
        ).stdout
        step, engine, beside = (seconds * 1e3 for seconds in json.loads(answer))
        yield Row(
            f"26 features x {SAMPLES}, {name}: overhead",
            "1 ms a step beside the engine",
            1,
            LIMIT_SECONDS * 1e3 / beside,
            *MARKS,
            f"step {step:.2f}, engine {engine:.2f}, beside it {beside:.2f} ms",
        )


# ---- what the child does


def measure(step: Callable[[int], None]) -> tuple[float, float, float]:
    """Median seconds of a step, of the engine in it, and of the rest."""
    from embstore import _core

    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent += time.perf_counter() - start

        return run

    for name in ENGINE_CALLS:
        setattr(_core, name, timed(getattr(_core, name)))
    steps, engine = [], []
    for number in range(WARMUP_STEPS + STEPS):
        spent = 0.0
        start = time.perf_counter()
        step(number % BATCHES)
        if number >= WARMUP_STEPS:
            steps.append(time.perf_counter() - start)
            engine.append(spent)
    beside = [whole - part for whole, part in zip(steps, engine)]
    return statistics.median(steps), statistics.median(engine), statistics.median(beside)


def native() -> tuple[float, float, float]:
    import torch

    import embstore

    rng = np.random.default_rng(0)
    names = [f"f{i}" for i in range(FEATURES)]
    options = [embstore.TableOptions(name=name, dim=DIM, optimizer=embstore.SGD(lr=0.01)) for name in names]
    collection = embstore.EmbeddingBagCollection(options)
    offsets = torch.arange(SAMPLES)
    batches = [
        {name: (torch.from_numpy(rng.integers(0, IDS, SAMPLES)), offsets) for name in names}
        for _ in range(BATCHES)
    ]
    gradients = [torch.randn(SAMPLES, DIM) for _ in names]

    def step(number: int) -> None:
        torch.autograd.backward(list(collection(batches[number]).values()), gradients)

    return measure(step)


def dmp() -> tuple[float, float, float]:
    import torch
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    from .dmp import model

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        task = {
            "kind": "ebc",
            "optimizer": "EXACT_SGD",
            "sharding": "table_wise",
            "apart": False,
            "rows": IDS,
        }
        module = model(task, True)
        rng = np.random.default_rng(0)
        names = [f"f{i}" for i in range(FEATURES)]
        batches = [torch.from_numpy(rng.integers(0, IDS, FEATURES * SAMPLES)) for _ in range(BATCHES)]
        lengths = torch.ones(FEATURES * SAMPLES, dtype=torch.int32)
        gradient = torch.randn(SAMPLES, FEATURES * DIM)

        def step(number: int) -> None:
            module(KeyedJaggedTensor(names, batches[number], lengths=lengths)).values().backward(gradient)

        answer = measure(step)
        dist.destroy_process_group()
        return answer


if __name__ == "__main__":
    import logging
    import warnings

    import torch

    import embstore

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    embstore.set_num_threads(1)
    print(json.dumps({"native": native, "dmp": dmp}[sys.argv[1]]()))
