"""Trains a wrapped model and its static twin on the same batches, and compares all that can be compared."""

import os
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from faces.torchrec_dynamic_embedding.models import (
    DIM,
    EPS,
    FEATURES,
    LR,
    TABLES,
    batches,
    fill,
    full_weights,
    kjt,
    scattered,
    trainer,
)
from tolerances import drift

import torchrec_dynamic_embedding as tde
from embstore.stores.urls import open_store

IDS, WINDOW = 640, 64
ADDENDS = len(FEATURES) * DIM + 8  # the dense layer; the keys of a bag, and its duplicates in a batch


def train(trainer_, loader):
    return [trainer_.step(kjt_, label) for label, kjt_ in loader]


def loader_of(data, of=scattered):
    return [(label, kjt(numbers, lengths, of)) for label, numbers, lengths in data]


def ahead(loader, count):
    """The batches of the loader, each one handed on once `count` later ones were taken."""
    taken = deque()
    for batch in loader:
        taken.append(batch)
        del batch
        if len(taken) > count:
            yield taken.popleft()
    while taken:
        yield taken.popleft()


def compare(
    url,
    *,
    kind="ebc",
    sharding="row_wise",
    optimizer="adagrad",
    num_prefetch=0,
    epochs=2,
    steps=12,
    window=WINDOW,
    taken=0,
):
    """Raises AssertionError where the wrapped model and its twin differ. `taken`: batches taken ahead."""
    rank = dist.get_rank()
    data = batches(steps, IDS, rank=rank, seed=7)
    twin = trainer(IDS, kind, sharding, optimizer)
    fill(twin, IDS)
    ours = trainer(window, kind, sharding, optimizer)
    loader = tde.wrap(url, loader_of(data), ours.model, {"emb": ours.configs}, num_prefetch=num_prefetch)
    for epoch in range(epochs):
        expected = train(twin, loader_of(data, of=lambda numbers: numbers))
        losses = train(ours, ahead(loader, taken))
        assert len(losses) == steps, f"epoch {epoch} had {len(losses)} batches"
        np.testing.assert_allclose(
            losses, expected, rtol=0, atol=loss_drift((epoch + 1) * steps), err_msg=f"losses of epoch {epoch}"
        )
    tde.save(ours.model)
    compare_rows(url, twin, data, sharding, optimizer, epochs)


def loss_drift(steps):
    """The loss has a slope of about 1 in each of the numbers that it depends on."""
    return ADDENDS * drift(LR, steps, ADDENDS, eps=EPS)


def compare_rows(url, twin, data, sharding, optimizer, epochs=1):
    """The rows in the store against those of the twin. With memory:// each rank looks at what it has."""
    seen = {name: set() for name in TABLES}
    for _, numbers, lengths in data:
        ends = np.cumsum(lengths.reshape(3, -1).sum(1).numpy())
        for name, part in zip(("user", "item", "item"), np.split(numbers, ends[:-1])):
            seen[name] |= set(part.tolist())
    weights = full_weights(twin)
    parts = 2 if sharding == "column_wise" else 1
    width = DIM // parts
    state = {"sgd": [], "adagrad": [4 * width], "rowwise_adagrad": [4]}[optimizer]
    allowed = drift(LR, epochs * len(data), ADDENDS, eps=None if optimizer == "sgd" else EPS)
    checked = 0
    for name, numbers in seen.items():
        numbers = np.array(sorted(numbers))
        for column in range(parts):
            sizes = [4 * width, *state]
            store = open_store(url, table=f"emb.{name}", tensor_bytes=sizes, column=column)
            rows, _, found = store.get(scattered(numbers))
            if url.startswith("memory") and not found.any():
                continue  # of another rank
            assert found.all(), f"{name}: the store lacks {np.flatnonzero(~found)[:5]} of {len(numbers)}"
            ours = np.ascontiguousarray(rows[:, : 4 * width]).view(np.float32)
            wanted = weights[name][numbers, column * width : (column + 1) * width].numpy()
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=allowed, err_msg=f"rows of {name}")
            checked += len(numbers)
    assert checked or dist.get_world_size() > 1


class Run:
    """A wrapped model and its twin, fed step by step."""

    def __init__(self, url, num_prefetch=2, steps=30):
        data = batches(steps, IDS, seed=4)
        self.data = data
        self.twin = trainer(IDS)
        fill(self.twin, IDS)
        self.ours = trainer(WINDOW)
        self.loader = tde.wrap(
            url, _Remaining(self), self.ours.model, {"emb": self.ours.configs}, num_prefetch=num_prefetch
        )
        self.done = 0

    def train(self, until):
        """Trains both up to this step and compares the losses."""
        iterator = iter(self.loader)
        while self.done < until:
            label, slots = next(iterator)
            numbers, lengths = self.data[self.done][1:]
            loss = self.ours.step(slots, label)
            expected = self.twin.step(kjt(numbers, lengths, of=lambda n: n), label)
            self.done += 1
            np.testing.assert_allclose(
                loss, expected, rtol=0, atol=loss_drift(self.done), err_msg=f"step {self.done}"
            )


class _Remaining:
    """The batches that were not trained yet."""

    def __init__(self, run):
        self._run = run

    def __iter__(self):
        return iter(loader_of(self._run.data[self._run.done :]))


def start():
    """Joins the ranks that were started together, or is the only one."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
