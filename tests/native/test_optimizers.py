"""Every optimizer of the declared list against torch.optim (or a formula where torch has none) on a
dense table, over many steps with duplicates; and its error inputs."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from native_tables import random_keys, small_table

import embstore
from embstore.optimizers import OPTIMIZERS, from_dict

DIM = 7


class Formula:
    """An optimizer of one dense parameter, written with torch operations."""

    def __init__(self, weight):
        self.weight, self.state = weight, None

    def zero_grad(self):
        self.weight.grad = None


class RowwiseAdagrad(Formula):
    def step(self):
        g = self.weight.grad
        if self.state is None:
            self.state = torch.full((len(g), 1), 0.25)
        self.state += g.square().mean(1, keepdim=True)
        with torch.no_grad():
            self.weight -= 0.05 * g / (self.state.sqrt() + 1e-6)


class Ftrl(Formula):
    lr, power, l1, l2, beta, shrinkage = 0.1, 0.5, 0.01, 0.02, 0.5, 0.0

    def step(self):
        g = self.weight.grad
        if self.state is None:
            self.state = [torch.full_like(g, 0.1), torch.zeros_like(g)]
        n, z = self.state
        with torch.no_grad():
            new = n + g * g
            z += (
                g
                + 2 * self.shrinkage * self.weight
                - (new**self.power - n**self.power) / self.lr * self.weight
            )
            n.copy_(new)
            moved = (z.sign() * self.l1 - z) / ((self.beta + n**self.power) / self.lr + self.l2)
            self.weight.copy_(torch.where(z.abs() <= self.l1, torch.zeros_like(z), moved))


class ShrinkingFtrl(Ftrl):
    shrinkage = 0.03


class SmartDecayAdam(Formula):
    """A step without a gradient decays the averages, and its move is owed until the row has one."""

    def step(self):
        g = self.weight.grad
        if self.state is None:
            self.state = [torch.zeros_like(g), torch.zeros_like(g), torch.zeros_like(g)]
        m, v, owed = self.state
        touched = g.any(1, keepdim=True)
        with torch.no_grad():
            m.mul_(0.8).add_(0.2 * g)
            v.mul_(0.95).add_(0.05 * g * g)
            owed += m
            self.weight -= torch.where(touched, 0.02 * owed / (v.sqrt() + 1e-4), 0.0)
            owed.masked_fill_(touched, 0.0)


def of_torch(name, **keywords):
    return lambda weight: getattr(torch.optim, name)([weight], **keywords)


@dataclass
class Sample:
    """An optimizer, its oracle on a dense weight, and keywords that its class should refuse."""

    ours: embstore.Optimizer
    oracle: Any
    lazy: bool = False  # the oracle leaves rows without gradient alone, so batches may touch a part
    errors: list[tuple[dict[str, Any], str]] = field(default_factory=list)


NAN, INF = math.nan, math.inf
SAMPLES = [
    Sample(
        embstore.SGD(lr=0.1),
        of_torch("SGD", lr=0.1),
        True,
        [
            ({"lr": NAN}, "lr"),
            ({"lr": -0.1}, "lr"),
            ({"lr": INF}, "lr"),
            ({"lr": True}, "lr"),
            ({"momentum": NAN}, "momentum"),
            ({"momentum": -1.0}, "momentum"),
            ({"dampening": INF}, "dampening"),
            ({"nesterov": True}, "nesterov"),
            ({"momentum": 0.9, "velocity": True, "dampening": 0.5}, "dampening"),
            ({"weight_decay": -1.0}, "weight_decay"),
            ({"clip_value": NAN}, "clip_value"),
            ({"clip_norm": -2.0}, "clip_norm"),
        ],
    ),
    Sample(embstore.SGD(lr=0.1, weight_decay=0.05), of_torch("SGD", lr=0.1, weight_decay=0.05)),
    Sample(embstore.SGD(lr=0.1, momentum=0.9), of_torch("SGD", lr=0.1, momentum=0.9)),
    Sample(
        embstore.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    Sample(
        embstore.SGD(lr=0.1, momentum=0.8, dampening=0.3),
        of_torch("SGD", lr=0.1, momentum=0.8, dampening=0.3),
    ),
    # A velocity differs from torch's buffer only when the learning rate changes.
    Sample(embstore.SGD(lr=0.1, momentum=0.9, velocity=True), of_torch("SGD", lr=0.1, momentum=0.9)),
    Sample(
        embstore.SGD(lr=0.1, momentum=0.9, nesterov=True, velocity=True),
        of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True),
    ),
    Sample(
        embstore.Adagrad(lr=0.1),
        of_torch("Adagrad", lr=0.1),
        True,
        [
            ({"eps": NAN}, "eps"),
            ({"eps": -1e-3}, "eps"),
            ({"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
            ({"initial_accumulator_value": INF}, "initial_accumulator_value"),
        ],
    ),
    Sample(
        embstore.Adagrad(lr=0.1, eps=1e-5, initial_accumulator_value=0.5, weight_decay=0.02),
        of_torch("Adagrad", lr=0.1, eps=1e-5, initial_accumulator_value=0.5, weight_decay=0.02),
    ),
    Sample(
        embstore.RowwiseAdagrad(lr=0.05, eps=1e-6, initial_accumulator_value=0.25),
        RowwiseAdagrad,
        True,
        [({"eps": INF}, "eps")],
    ),
    Sample(
        embstore.Adam(lr=0.01),
        of_torch("Adam", lr=0.01),
        False,
        [
            ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
            ({"betas": (0.9, NAN)}, r"betas\[1\]"),
            ({"betas": (0.9,)}, "betas"),
            ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
            ({"eps": -1.0}, "eps"),
        ],
    ),
    Sample(
        embstore.Adam(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        of_torch("Adam", lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    Sample(
        embstore.AdamW(lr=0.01, weight_decay=0.1),
        of_torch("AdamW", lr=0.01, weight_decay=0.1),
        False,
        [({"weight_decay": NAN}, "weight_decay")],
    ),
    Sample(
        embstore.Adamax(lr=0.01, weight_decay=0.1),
        of_torch("Adamax", lr=0.01, weight_decay=0.1),
        False,
        [({"betas": (0.9, 1.0)}, r"betas\[1\]")],
    ),
    Sample(
        embstore.Adadelta(lr=0.5),
        of_torch("Adadelta", lr=0.5),
        False,
        [({"rho": 1.5}, "rho"), ({"rho": NAN}, "rho"), ({"eps": NAN}, "eps")],
    ),
    Sample(
        embstore.Ftrl(lr=0.1, lambda1=0.01, lambda2=0.02, beta=0.5),
        Ftrl,
        False,
        [
            ({"lr": 0.0}, "lr"),
            ({"lr_power": NAN}, "lr_power"),
            ({"lambda1": -1.0}, "lambda1"),
            ({"lambda2": NAN}, "lambda2"),
            ({"beta": -1.0}, "beta"),
            ({"l2_shrinkage": -1.0}, "l2_shrinkage"),
        ],
    ),
    Sample(embstore.Ftrl(lr=0.1, lambda1=0.01, lambda2=0.02, beta=0.5, l2_shrinkage=0.03), ShrinkingFtrl),
    Sample(
        embstore.SmartDecayAdam(lr=0.02, betas=(0.8, 0.95), eps=1e-4),
        SmartDecayAdam,
        True,
        [({"betas": (0.9, 1.0)}, r"betas\[1\]"), ({"betas": 0.9}, "betas"), ({"eps": NAN}, "eps")],
    ),
]
IDS = [str(i) + type(s.ours).__name__ for i, s in enumerate(SAMPLES)]


def test_every_optimizer_has_a_sample():
    assert {type(s.ours) for s in SAMPLES} == set(OPTIMIZERS)


def train(table, weight, optimizer, keys, *, part, steps=12):
    """The same random gradients on both sides; a batch has duplicates and touches all keys or a part."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        touched = (
            rng.choice(len(keys), size=max(1, len(keys) // 3), replace=False)
            if part
            else np.arange(len(keys))
        )
        occurrences = np.concatenate([touched, rng.choice(touched, size=2 * len(touched))])
        rng.shuffle(occurrences)
        grads = rng.standard_normal((len(occurrences), DIM)).astype(np.float32)
        optimizer.zero_grad()
        weight.grad = torch.zeros_like(weight).index_add_(
            0, torch.from_numpy(occurrences), torch.from_numpy(grads)
        )
        optimizer.step()
        table.apply_gradients(keys[occurrences], grads)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("n", [1, 97])
def test_rows_move_as_a_dense_table_does(sample, n):
    keys = np.unique(random_keys(5 * n, n, seed=n))
    table = small_table(DIM, optimizer=sample.ours, initializer=embstore.Normal(0, 0.5), max_capacity=1024)
    others = np.arange(100, dtype=np.int64)
    table.find_or_insert(others)
    untouched = table.read(others)
    weight = torch.nn.Parameter(torch.from_numpy(table.find_or_insert(keys).copy()))
    train(table, weight, sample.oracle(weight), keys, part=sample.lazy)
    np.testing.assert_allclose(table.find(keys)[0], weight.detach().numpy(), rtol=2e-5, atol=2e-6)
    after = table.read(others)
    assert after.values.tobytes() == untouched.values.tobytes()
    assert after.states.tobytes() == untouched.states.tobytes()
    assert table.optimizer_step == 12


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rows_stay_near_the_dense_table(sample, dtype):
    keys = np.unique(random_keys(100, 50, seed=3))
    table = small_table(DIM, dtype=dtype, optimizer=sample.ours, initializer=embstore.Normal(0, 0.5))
    weight = torch.nn.Parameter(torch.from_numpy(table.find_or_insert(keys).copy()))
    train(table, weight, sample.oracle(weight), keys, part=sample.lazy)
    bound = 0.1 if dtype == "bfloat16" else 0.02
    np.testing.assert_allclose(table.find(keys)[0], weight.detach().numpy(), rtol=bound, atol=bound)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_an_optimizer_survives_a_dictionary(sample):
    assert from_dict(sample.ours.to_dict()) == sample.ours
    assert (
        sum(width for _, width in sample.ours.state_names(DIM))
        == small_table(DIM, optimizer=sample.ours).state_width
    )


@pytest.mark.parametrize(
    ("kind", "keywords", "names"),
    [(type(s.ours), keywords, names) for s in SAMPLES for keywords, names in s.errors],
)
def test_a_bad_hyper_parameter_is_named(kind, keywords, names):
    with pytest.raises(ValueError, match=names):
        kind(**keywords)


def test_sparse_adam_touches_the_rows_that_we_touch():
    keys = np.unique(random_keys(500, 97, seed=1))
    # SparseAdam adds eps before the bias correction and torch.optim.Adam behind it, so make it tiny.
    ours = embstore.Adam(lr=0.02, eps=1e-15)
    table = small_table(DIM, optimizer=ours, initializer=embstore.Normal(0, 0.5))
    weight = torch.nn.Parameter(torch.from_numpy(table.find_or_insert(keys).copy()))
    optimizer = torch.optim.SparseAdam([weight], lr=0.02, eps=1e-15)
    rng = np.random.default_rng(5)
    for _ in range(15):
        rows = rng.integers(0, len(keys), size=40)
        grads = rng.standard_normal((40, DIM)).astype(np.float32)
        weight.grad = torch.sparse_coo_tensor(
            rows[None], torch.from_numpy(grads), weight.shape, check_invariants=True
        )
        optimizer.step()
        table.apply_gradients(keys[rows], grads)
    np.testing.assert_allclose(table.find(keys)[0], weight.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("clip", [{"clip_value": 0.5}, {"clip_norm": 0.7}])
def test_the_summed_gradient_of_a_row_is_clipped(clip):
    table = small_table(DIM, optimizer=embstore.SGD(lr=1.0, **clip), initializer=embstore.Constant(0.0))
    keys = np.array([3, 4, 3])
    grads = np.random.default_rng(0).standard_normal((3, DIM)).astype(np.float32)
    table.find_or_insert(keys)
    table.apply_gradients(keys, grads)
    for key, g in ((3, grads[0] + grads[2]), (4, grads[1])):
        if "clip_value" in clip:
            g = np.clip(g, -0.5, 0.5)
        else:
            g = g * min(1.0, 0.7 / np.linalg.norm(g))
        np.testing.assert_allclose(table.find([key])[0][0], -g, rtol=1e-5, atol=1e-7)


def test_the_learning_rate_follows_a_schedule():
    table = small_table(2, optimizer=embstore.SGD(lr=1.0), initializer=embstore.Constant(0.0))
    table.find_or_insert([1])
    for rate in (1.0, 0.5, 0.0, 0.25):
        table.learning_rate = rate
        table.apply_gradients([1], np.ones((1, 2)))
    np.testing.assert_array_equal(table.find([1])[0], [[-1.75, -1.75]])
    with pytest.raises(ValueError, match="lr should be .* but is: nan"):
        table.learning_rate = math.nan
    assert table.learning_rate == 0.25


@pytest.mark.parametrize("dim", [7, 8])
def test_a_row_of_smart_decay_adam_keeps_its_last_step_through_a_dump(tmp_path, dim):
    keys = np.array([5, 6])
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((6, 2, dim)).astype(np.float32)
    batches = [[0, 1], [0], [1, 1], [0], [0], [0, 1]]  # rows of a batch; key 6 rests for two steps

    def train(table, batches, gradients):
        for batch, g in zip(batches, gradients, strict=True):
            table.apply_gradients(keys[batch], g[: len(batch)])

    def make():
        return small_table(dim, optimizer=embstore.SmartDecayAdam(lr=0.1), initializer=embstore.Normal(0, 1))

    whole, first, second = make(), make(), make()
    whole.find_or_insert(keys)
    first.find_or_insert(keys)
    train(whole, batches, gradients)
    train(first, batches[:4], gradients[:4])
    embstore.dump(tmp_path / "d", {"model": {first.name: first}}, optim=True)
    embstore.load(tmp_path / "d", {"model": {second.name: second}}, optim=True)
    assert second.read(keys).states[:, -2:].copy().view(np.int64).tolist() == [[4], [3]]
    train(second, batches[4:], gradients[4:])
    assert second.read(keys).values.tobytes() == whole.read(keys).values.tobytes()
    assert second.read(keys).states.tobytes() == whole.read(keys).states.tobytes()
