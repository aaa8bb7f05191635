"""One rank of trust.same_bits: trains its share of each batch in every way, and hashes the rows."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import embstore
from embstore.stores.urls import tiers
from trust.same_bits import Way

DIM, BATCH, STEPS, IDS, SMALL = 8, 256, 10, 4000, 128
START = 0.25  # of every component of a new row
SGD_RATE, ADAM_RATE = 0.125, 0.01


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and targets of the whole batch of every step; few ids come often, and half of them are negative."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        ids = (IDS * rng.random(BATCH) ** 3).astype(np.int64)
        found.append((ids - IDS // 2, rng.normal(size=(BATCH, DIM)).astype(np.float32)))
    return found


class TorchFace:
    """A package on torch; `factor` undoes its mean over ranks (a power of two, so no bit is lost)."""

    factor = 1

    def __init__(self, way: Way, folder: Path, redis: str) -> None:
        self.way, self.folder = way, folder
        self.below: Any = None
        if way.below == "ssd":
            self.below = tiers(f"ssd://{folder}/ssd", upper_rows=SMALL)
        elif way.below == "redis":
            prefix = "-".join(folder.parts[-3:])  # no other way has it
            self.below = tiers(f"redis://{redis}/?prefix={prefix}", upper_rows=SMALL)
        self.look_up = self.make()

    def make(self) -> Callable[[torch.Tensor], torch.Tensor]:
        raise NotImplementedError

    def step(self, ids: np.ndarray, targets: np.ndarray) -> None:
        out = self.look_up(torch.from_numpy(ids))
        (((out - torch.from_numpy(targets)) ** 2).sum() * (0.5 * self.factor)).backward()

    def table(self) -> embstore.Table:
        raise NotImplementedError

    def save(self, path: Path) -> None:
        embstore.dump(path, {"model": {"t": self.table()}}, optim=True)

    def load(self, path: Path) -> None:
        embstore.load(path, {"model": {"t": self.table()}}, optim=True)

    def close(self) -> None:
        self.table().close()


def native_optimizer(rule: str) -> embstore.Optimizer:
    return embstore.SGD(lr=SGD_RATE) if rule == "sgd" else embstore.Adam(lr=ADAM_RATE)


class Native(TorchFace):
    def make(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.factor = dist.get_world_size()
        options = embstore.TableOptions(
            name="t",
            dim=DIM,
            optimizer=native_optimizer(self.way.rule),
            initializer=embstore.Constant(START),
            score_strategy="step",
            **({"max_capacity": SMALL} if self.below else {}),
        )
        store = self.below(options, dist.get_rank()) if self.below else None
        self.module = embstore.Embedding(table=embstore.Table(options, store=store), sharded=True)
        return self.module

    def table(self) -> embstore.Table:
        return self.module.table


class DynamicEmb(TorchFace):
    def make(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from faces.dynamicemb.models import Spec, dmp, tables
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import KeyedJaggedTensor

        from dynamicemb import DynamicEmbScoreStrategy

        self.factor = dist.get_world_size()
        options: dict[str, Any] = {"score_strategy": DynamicEmbScoreStrategy.STEP}
        if self.below:
            options["external_storage"] = self.below
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": SGD_RATE}
        if self.way.rule == "adam":
            fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": ADAM_RATE}
        rows = SMALL * dist.get_world_size() if self.below else 4096
        model = dmp("ec", [Spec("t", ("f",), dim=DIM, rows=rows, options=options)], fused)
        (self._table,) = tables(model).values()

        def look_up(ids: torch.Tensor) -> torch.Tensor:
            ones = torch.ones(ids.numel(), dtype=torch.int64)
            return model(KeyedJaggedTensor(["f"], ids, lengths=ones))["f"].values()

        return look_up

    def table(self) -> embstore.Table:
        return self._table


class OneEmbedding(TorchFace):
    def make(self) -> Callable[[torch.Tensor], torch.Tensor]:
        import one_embedding as oe

        factor = 1 if self.way.rule == "sgd" else 3
        path = str(self.folder / "one")
        if self.way.below == "ssd":
            store = oe.make_cached_ssd_store_options(1, path, size_factor=factor)
        else:
            store = oe.make_device_mem_store_options(path, capacity=4096, size_factor=factor)
        initial = oe.make_table_options(oe.make_constant_initializer(START))
        self.module = oe.MultiTableEmbedding("t", DIM, torch.float, torch.int64, [initial], store)
        kind, rate = (torch.optim.SGD, SGD_RATE) if self.way.rule == "sgd" else (torch.optim.Adam, ADAM_RATE)
        self.optimizer = kind(self.module.parameters(), lr=rate)
        return lambda ids: self.module(ids.unsqueeze(1)).squeeze(1)

    def step(self, ids: np.ndarray, targets: np.ndarray) -> None:
        self.optimizer.zero_grad()
        super().step(ids, targets)
        self.optimizer.step()

    def table(self) -> embstore.Table:
        return self.module.table

    def save(self, path: Path) -> None:
        self.module.save_snapshot("half")
        self.saved = self.optimizer.state_dict()

    def load(self, path: Path) -> None:
        self.module.load_snapshot("half")

    def close(self) -> None:
        self.module.close()


class Sok:
    """SparseOperationKit; ranks talk through torch.distributed."""

    def __init__(self, way: Way, folder: Path, redis: str) -> None:
        import tf_keras

        import sparse_operation_kit as sok

        self.sok = sok
        sok.init(comm_tool="torch" if dist.get_world_size() > 1 else "single", same_bits=True)
        self.variable = sok.DynamicVariable(dimension=DIM, initializer=str(START), var_type="hbm", name="t")
        kinds = tf_keras.optimizers.legacy
        plain = kinds.SGD(SGD_RATE) if way.rule == "sgd" else kinds.Adam(ADAM_RATE)
        self.optimizer = sok.OptimizerWrapper(plain)

    def step(self, ids: np.ndarray, targets: np.ndarray) -> None:
        import tensorflow as tf

        rows = tf.RaggedTensor.from_row_lengths(ids, np.ones(len(ids), np.int64))
        with tf.GradientTape() as tape:
            (out,) = self.sok.lookup_sparse([self.variable], [rows], combiners=["sum"])
            loss = 0.5 * tf.reduce_sum((out - targets) ** 2)
        gradients = tape.gradient(loss, [self.variable])
        self.optimizer.apply_gradients(zip(gradients, [self.variable]))

    def table(self) -> embstore.Table:
        return self.variable.table

    def save(self, path: Path) -> None:
        self.sok.dump(str(path), [self.variable], self.optimizer)

    def load(self, path: Path) -> None:
        self.sok.load(str(path), [self.variable], self.optimizer)

    def close(self) -> None:
        pass


MAKERS: dict[str, Any] = {
    "native": Native,
    "dynamicemb": DynamicEmb,
    "one_embedding": OneEmbedding,
    "sparse_operation_kit": Sok,
}


def digest(table: embstore.Table, with_states: bool) -> tuple[int, int]:
    """Sums of hashes of (key, vector, state) and of (key, score): the order of rows does not matter."""

    def mixed(words: np.ndarray) -> int:
        factors = np.random.default_rng(7).integers(1, 2**63, words.shape[1], dtype=np.uint64) | np.uint64(1)
        hashes = (words * factors).sum(axis=1, dtype=np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return int((hashes ^ (hashes >> np.uint64(32))).sum(dtype=np.uint64))

    rows = table.rows()
    floats = [rows.values, rows.states] if with_states else [rows.values]
    words = np.concatenate(floats, axis=1).astype(np.float32).view(np.uint32).astype(np.uint64)
    keys = rows.keys.view(np.uint64)[:, None]
    return mixed(np.concatenate([keys, words], axis=1)), mixed(
        np.concatenate([keys, rows.scores[:, None]], axis=1)
    )


def train(way: Way, folder: Path, redis: str) -> dict[str, str]:
    embstore.set_num_threads(way.threads)
    rank, world = dist.get_rank(), dist.get_world_size()
    make = MAKERS[way.face]
    face = make(way, folder / "first", redis)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for number, (ids, targets) in enumerate(batches()):
        if way.restart and number == STEPS // 2:
            face.save(folder / "dump")
            face.close()
            after = folder / ("first" if way.face == "one_embedding" else "second")
            again = make(way, after, redis)
            again.load(folder / "dump")
            if way.face == "one_embedding":
                again.optimizer.load_state_dict(face.saved)
            face = again
        face.step(ids[share], targets[share])
    if way.below != "memory" and way.face != "one_embedding":  # whose cache is counted in MB
        assert face.table().stats().evictions > 0, "the table should be smaller than the ids of its rank"
    own = digest(face.table(), with_states=way.rule != "sgd")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    face.close()
    rows, scores = (sum(part) % 2**64 for part in zip(*everyone))
    counted = way.face in ("native", "dynamicemb")  # the others score by the time of day
    return {"rows": f"{rows:016x}", "scores": f"{scores:016x}" if counted else ""}


def main() -> None:
    folder, redis = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = []
    for number, order in enumerate(json.loads((folder / "ways.json").read_text())):
        way = Way(**order)
        place = folder / f"way-{number}"
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        results.append({"way": order, **train(way, place, redis)})
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
