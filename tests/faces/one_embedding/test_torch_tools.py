"""GradScaler, clipping, repeated backward passes and schedulers, against a dense table."""

import math

import pytest
import torch

import one_embedding as oe

DIM = 5
IDS = torch.arange(17) * 7919 - 60_000

OPTIMIZERS = {
    "sgd": (1, torch.optim.SGD, {}),
    "adam": (3, torch.optim.Adam, {}),
    "adagrad": (2, torch.optim.Adagrad, {}),
    "fused sgd": (1, torch.optim.SGD, {"fused": True}),
    "fused adam": (3, torch.optim.Adam, {"fused": True}),
    "wrapper": (1, torch.optim.SGD, {}),
    "fused wrapper": (3, torch.optim.Adam, {"fused": True}),
}


class Twins:
    """An embedding and a dense table with the same rows, each with a dense layer behind it."""

    def __init__(self, tmp_path, name="sgd", lr=0.1):
        size_factor, kind, options = OPTIMIZERS[name]
        store = oe.make_device_mem_store_options(str(tmp_path), 1000, size_factor=size_factor)
        table = oe.make_table_options(oe.make_normal_initializer(0.0, 1.0))
        self.ours = oe.MultiTableEmbedding("twins", DIM, torch.float, torch.int64, [table], store)
        rows = self.ours.eval()(IDS).clone()
        self.ours.train()
        self.dense = torch.nn.Embedding.from_pretrained(rows, freeze=False)
        layers = [torch.nn.Linear(DIM, 1) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        self.models = [torch.nn.Sequential(self.ours, layers[0]), torch.nn.Sequential(self.dense, layers[1])]
        if "wrapper" in name:
            inner = kind(layers[0].parameters(), lr=lr, **options)
            first = oe.Optimizer(inner, [self.ours])
        else:
            first = kind(self.models[0].parameters(), lr=lr, **options)
        self.optimizers = [first, kind(self.models[1].parameters(), lr=lr, **options)]

    def each(self):
        """(model, optimizer, ids of the rows) of both."""
        yield self.models[0], self.optimizers[0], lambda rows: IDS[rows]
        yield self.models[1], self.optimizers[1], lambda rows: rows

    def check(self):
        torch.testing.assert_close(self.ours.eval()(IDS), self.dense.weight.detach(), rtol=2e-5, atol=2e-6)
        self.ours.train()
        torch.testing.assert_close(self.models[0][1].weight, self.models[1][1].weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaler_skips_steps_whose_row_gradients_overflow_and_lowers_its_scale(tmp_path, name):
    twins = Twins(tmp_path, name)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2)]
    torch.manual_seed(0)
    scales = []
    for step in range(9):
        rows = torch.cat([torch.arange(17), torch.randint(0, 17, (6,))])
        target = torch.randn(23, DIM)
        if step in (2, 3, 7):  # of one row alone
            target[4, 1] = (math.inf, math.nan, 1e37)[(2, 3, 7).index(step)]
        for (model, optimizer, ids), scaler in zip(twins.each(), scalers):
            optimizer.zero_grad()
            vectors = model[0](ids(rows))
            loss = (vectors * target).sum() + model[1](vectors.detach()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
        twins.check()
    assert scales[1] > scales[3] < scales[5] and scales[7] < scales[6]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("by", ["norm", "value", "nothing"])
@pytest.mark.parametrize("name", ["sgd", "adam", "wrapper"])
def test_clipping_counts_and_changes_rows_as_those_of_a_dense_table(tmp_path, name, by, scaled):
    twins = Twins(tmp_path, name)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled) for _ in range(2)]
    torch.manual_seed(1)
    for step in range(8):
        rows = torch.cat([torch.arange(17), torch.randint(0, 17, (6,))])
        target = torch.randn(23, DIM) * 10.0 ** (step % 4 - 2)
        norms = []
        for (model, optimizer, ids), scaler in zip(twins.each(), scalers):
            optimizer.zero_grad()
            for part in (slice(0, 9), slice(9, 23)):  # accumulated
                vectors = model[0](ids(rows[part]))
                loss = (vectors * target[part]).sum() + model[1](vectors).square().mean()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if by == "norm":
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5))
            elif by == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        if by == "norm":
            torch.testing.assert_close(*norms)
        twins.check()


def test_gradients_scaled_between_two_backward_passes_scale_what_was_there(tmp_path):
    twins = Twins(tmp_path)
    for model, optimizer, ids in twins.each():
        model[0](ids(torch.arange(9))).square().sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        next(model.parameters()).grad.mul_(0.25)
        model[0](ids(torch.arange(4, 17))).square().sum().backward()
        optimizer.step()
        optimizer.step()  # gradients stay until zero_grad, as in torch
    twins.check()


def test_a_second_backward_over_one_lookup_adds(tmp_path):
    twins = Twins(tmp_path)
    for model, optimizer, ids in twins.each():
        out = model[0](ids(torch.tensor([1, 2, 2])))
        out.square().sum().backward(retain_graph=True)
        out.sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        (out * 3).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="backward.*a second time|backpropagated again"):
            out.sum().backward()
    twins.check()


def test_rows_are_unpinned_by_a_backward_that_frees_the_graph(tmp_path):
    twins = Twins(tmp_path)
    out = twins.ours(IDS)
    loss = out.sum()
    loss.backward()
    batch = out.grad_fn
    while not hasattr(batch, "batch"):
        batch = batch.next_functions[0][0]
    assert batch.batch.slots == []


@pytest.mark.parametrize("name", ["sgd", "wrapper", "fused wrapper"])
@pytest.mark.parametrize("kind", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_lr_schedulers_drive_rows(tmp_path, name, kind):
    twins = Twins(tmp_path, name)
    arguments = {
        "StepLR": {"step_size": 1, "gamma": 0.5},
        "CosineAnnealingLR": {"T_max": 5},
        "OneCycleLR": {"max_lr": 0.3, "total_steps": 6, "cycle_momentum": False},
        "ReduceLROnPlateau": {"patience": 0},
    }[kind]
    schedulers = [
        getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments) for optimizer in twins.optimizers
    ]
    for _ in range(4):
        for (model, optimizer, ids), scheduler in zip(twins.each(), schedulers):
            optimizer.zero_grad()
            model(ids(torch.arange(17))).square().sum().backward()
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        assert twins.optimizers[0].param_groups[0]["lr"] == twins.optimizers[1].param_groups[0]["lr"]
        twins.check()


def test_the_wrapper_saves_and_loads_the_state_of_its_optimizer(tmp_path):
    twins = Twins(tmp_path, "fused wrapper")
    wrapper = twins.optimizers[0]
    for _ in range(3):
        twins.models[0](IDS).sum().backward()
        wrapper.step()
    state = wrapper.state_dict()
    wrapper.param_groups[0]["lr"] = 7.0
    wrapper.load_state_dict(state)
    assert wrapper.optimizer.param_groups[0]["lr"] == 0.1
    assert int(wrapper.state[twins.ours.shadow]["step"]) == 3
