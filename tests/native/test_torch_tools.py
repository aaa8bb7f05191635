"""Native modules with what torch has for parameters: scalers, clipping, freezing, conversion."""

import copy
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from native_tables import everything, small_table

import embstore

DIM = 5
IDS = torch.arange(17) * 7919 - 60_000
RULES = {
    "sgd": (embstore.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (embstore.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    "adagrad": (embstore.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


def make_table(name="t", rule="sgd", **options):
    return embstore.Table(
        name, dim=DIM, optimizer=RULES[rule][0], initializer=embstore.Normal(0, 1), **options
    )


class Twins:
    """A module whose rows wait for a step, and torch's own; each with a dense layer behind it."""

    def __init__(self, rule="sgd", **options):
        self.ours = embstore.Embedding(table=make_table(rule=rule), **options)
        self.dense = torch.nn.Embedding.from_pretrained(self.ours.table.initial_values(IDS), freeze=False)
        layers = [torch.nn.Linear(DIM, 1) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        self.models = [torch.nn.Sequential(self.ours, layers[0]), torch.nn.Sequential(self.dense, layers[1])]
        self.optimizers = [RULES[rule][1](model.parameters()) for model in self.models]

    def each(self):
        yield self.models[0], self.optimizers[0], lambda rows: IDS[rows]
        yield self.models[1], self.optimizers[1], lambda rows: rows

    def check(self):
        torch.testing.assert_close(
            self.ours.table.find(IDS)[0], self.dense.weight.detach(), rtol=2e-5, atol=2e-6
        )
        torch.testing.assert_close(self.models[0][1].weight, self.models[1][1].weight, rtol=2e-5, atol=2e-6)


def batch_of(step):
    torch.manual_seed(step)
    rows = torch.cat([torch.arange(17), torch.randint(0, 17, (6,))])
    return rows, torch.randn(23, DIM) * 10.0 ** (step % 4 - 2)


# ---- scalers


@pytest.mark.parametrize("rule", RULES)
def test_a_scaler_steps_the_rows_with_the_dense_part_and_skips_both(rule):
    twins = Twins(rule, update_in_backward=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2)]
    for step in range(9):
        rows, target = batch_of(step)
        if step in (2, 5):
            target[4, 1] = math.inf if step == 2 else math.nan
        for (model, optimizer, ids), scaler in zip(twins.each(), scalers):
            optimizer.zero_grad()
            vectors = model[0](ids(rows))
            loss = (vectors * target).sum() + model[1](vectors.detach()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        twins.check()
    assert scalers[0].get_scale() != 2.0**14


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
def test_step_with_a_scale_undoes_that_of_the_loss_and_skips_what_is_not_finite(bad):
    emb = embstore.Embedding(table=small_table(2, optimizer=embstore.SGD(lr=1.0)), update_in_backward=False)
    ids = torch.tensor([3, 4])
    (emb(ids) * 65536.0).sum().backward()
    assert emb.step(1 / 65536)
    np.testing.assert_array_equal(emb.table.find(ids)[0], [[2, 2], [3, 3]])
    (emb(ids) * torch.tensor([[1.0], [bad]])).sum().backward()
    before = everything(emb.table)
    assert not emb.step(1 / 65536)
    assert everything(emb.table) == before and emb.table.optimizer_step == 1
    emb(ids).sum().backward()  # what was skipped is gone
    assert emb.step(1.0)
    np.testing.assert_array_equal(emb.table.find(ids)[0], [[1, 1], [2, 2]])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device_rows", [0, 64])
def test_a_scaler_over_rows_that_moved_in_backward_raises(fused, device_rows):
    emb = embstore.Embedding(table=make_table(), device_rows=device_rows)
    model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    before = copy.deepcopy(model[1].state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(IDS).sum()).backward()
    with pytest.raises(RuntimeError, match="moved in backward.*update_in_backward=False to use a GradScaler"):
        scaler.step(optimizer)
    assert torch.equal(model[1].weight, before["weight"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    optimizer.zero_grad()
    scaler.scale(model(IDS).sum()).backward()
    scaler.step(optimizer)


# ---- clipping


@pytest.mark.parametrize("by", ["norm", "value"])
@pytest.mark.parametrize("rule", RULES)
def test_clipping_counts_and_changes_pending_rows(rule, by):
    twins = Twins(rule, update_in_backward=False)
    for step in range(8):
        rows, target = batch_of(step)
        norms = []
        for model, optimizer, ids in twins.each():
            optimizer.zero_grad()
            for part in (slice(0, 9), slice(9, 23)):
                vectors = model[0](ids(rows[part]))
                ((vectors * target[part]).sum() + model[1](vectors).square().mean()).backward()
            if by == "norm":
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5))
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
            optimizer.step()
        if by == "norm":
            torch.testing.assert_close(*norms)
        twins.check()


@pytest.mark.parametrize("update_in_backward", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_max_norm_is_clip_grad_norm_over_all_tables_of_a_module(rule, update_in_backward):
    tables = [make_table("a", rule), make_table("b", rule)]
    collection = embstore.EmbeddingCollection(tables, max_norm=1.5, update_in_backward=update_in_backward)
    weights = [torch.nn.Parameter(t.initial_values(IDS)) for t in tables]
    optimizer = RULES[rule][1](weights)
    for step in range(8):
        rows, target = batch_of(step)
        out = collection({"a": IDS[rows], "b": IDS[rows]})
        ((out["a"] * target).sum() + (out["b"] * target * 2).sum()).backward()
        if not update_in_backward:
            collection.step()
        optimizer.zero_grad()
        ((weights[0][rows] * target).sum() + (weights[1][rows] * target * 2).sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.5)
        optimizer.step()
        for table, weight in zip(tables, weights):
            torch.testing.assert_close(table.find(IDS)[0], weight.detach(), rtol=2e-5, atol=2e-6)
        assert [t.optimizer_step for t in tables] == [step + 1] * 2


def test_clipping_after_rows_moved_in_backward_warns_once():
    model = torch.nn.Sequential(embstore.Embedding(table=make_table()), torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(IDS).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    with pytest.warns(UserWarning, match="moved in backward, before gradients were clipped.*max_norm"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        model[0].max_norm, model[0]._told_of_clipping = 0.1, False
        step()


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan])
def test_a_max_norm_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="max_norm should be a number above 0 or None but is"):
        embstore.Embedding(4, max_norm=bad)
    with pytest.raises(ValueError, match="max_norm should be None with device_rows but is: 1.0"):
        embstore.Embedding(4, max_norm=1.0, device_rows=8)


# ---- who steps


def test_an_optimizer_that_holds_the_module_steps_pending_rows_once():
    emb = embstore.Embedding(table=small_table(2, optimizer=embstore.SGD(lr=1.0)), update_in_backward=False)
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.5)
    for step in range(1, 4):
        optimizer.zero_grad()
        emb(torch.tensor([7])).sum().backward()
        optimizer.step()
        emb.step()  # nothing is left for it
        assert emb.table.find([7])[0].tolist() == [[7 - step, 7 - step]]
        assert emb.table.optimizer_step == step
    assert not emb.shadow.any()


@pytest.mark.parametrize("who", ["module", "model", "optimizer", "optimizer to zero"])
def test_zero_grad_of_anyone_who_holds_the_module_drops_pending_gradients(who):
    emb = embstore.Embedding(table=small_table(2, optimizer=embstore.SGD(lr=1.0)), update_in_backward=False)
    model = torch.nn.Sequential(emb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    emb(torch.tensor([7])).sum().backward()
    {
        "module": emb.zero_grad,
        "model": model.zero_grad,
        "optimizer": optimizer.zero_grad,
        "optimizer to zero": lambda: optimizer.zero_grad(set_to_none=False),
    }[who]()
    emb(torch.tensor([8])).sum().backward()
    emb.step()
    assert emb.table.find([7, 8])[0].tolist() == [[7, 7], [7, 7]]


def test_pending_gradients_of_repeated_backward_passes_add_up():
    emb = embstore.EmbeddingBag(
        table=small_table(2, optimizer=embstore.SGD(lr=1.0)), update_in_backward=False
    )
    out = emb(torch.tensor([[5, 6], [6, 7]]))
    out.sum().backward(retain_graph=True)
    (out * 10).sum().backward()
    with pytest.raises(RuntimeError, match="backpropagated again only after .*retain_graph=True"):
        out.sum().backward()
    emb.step()
    assert emb.table.find([5, 6, 7])[0][:, 0].tolist() == [5 - 11, 6 - 22, 7 - 11]


# ---- freezing


def freeze_parameters(model):
    for parameter in model[0].parameters():
        parameter.requires_grad = False


FREEZE = {
    "module": lambda model: model[0].requires_grad_(False),
    "model": lambda model: model.requires_grad_(False),
    "parameters": freeze_parameters,
}


@pytest.mark.parametrize("how", FREEZE)
@pytest.mark.parametrize("options", [{}, {"update_in_backward": False}, {"device_rows": 64}], ids=str)
def test_a_frozen_module_changes_nothing_and_reads_what_new_ids_would_start_with(how, options):
    emb = embstore.Embedding(table=make_table(), **options)
    model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1))
    model(IDS).sum().backward()
    if not emb.update_in_backward:
        emb.step()
    emb.flush()
    FREEZE[how](model)
    model[1].requires_grad_(True)
    before = everything(emb.table)
    ids = torch.cat([IDS, torch.tensor([1, 2, 3])])
    vectors = emb(ids)
    assert not vectors.requires_grad
    known, found = emb.table.find(ids)
    torch.testing.assert_close(
        vectors, torch.where(found[:, None], known, emb.table.initial_values(ids)), rtol=0, atol=0
    )
    model(ids).sum().backward()
    emb.flush()
    assert everything(emb.table) == before
    model.requires_grad_(True)
    model(ids).sum().backward()
    if not emb.update_in_backward:
        emb.step()
    emb.flush()
    assert everything(emb.table) != before and len(emb.table) == 20


def test_no_grad_moves_nothing():
    emb = embstore.Embedding(table=make_table())
    with torch.no_grad():
        assert not emb(IDS).requires_grad
    torch.testing.assert_close(emb.table.find(IDS)[0], emb.table.initial_values(IDS), rtol=0, atol=0)


# ---- weights


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("how", ["training", "evaluation", "frozen"])
@pytest.mark.parametrize("device_rows", [0, 64])
def test_per_sample_weights_get_their_gradient(mode, how, device_rows):
    table = make_table(rule="adagrad")
    bag = embstore.EmbeddingBag(table=table, mode=mode, device_rows=device_rows)
    weight = torch.nn.Parameter(table.find_or_insert(IDS[:12]))
    if how == "evaluation":
        bag.eval()
    elif how == "frozen":
        bag.requires_grad_(False)
    ids, offsets = torch.tensor([0, 1, 1, 5, 11, 3, 0]), torch.tensor([0, 3, 3, 4])
    given = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    scale = given.float() / (torch.tensor([3, 3, 3, 1, 3, 3, 3]) if mode == "mean" else 1)
    rows_of_bag = torch.tensor([0, 0, 0, 2, 3, 3, 3])
    expected = torch.zeros(4, DIM).index_add(0, rows_of_bag, weight[ids] * scale[:, None])
    upstream = torch.randn(4, DIM)
    (wanted,) = torch.autograd.grad(expected, [given], upstream)
    out = bag(IDS[ids], offsets, given)
    torch.testing.assert_close(out, expected)
    with torch.no_grad():
        torch.testing.assert_close(bag(IDS[ids], offsets, given), out, rtol=0, atol=0)
    before = everything(table)
    out.backward(upstream)
    assert given.grad.dtype == torch.float64
    torch.testing.assert_close(given.grad, wanted)
    bag.flush()
    assert (everything(table) == before) == (how != "training")


def test_weights_of_several_features_of_one_table_get_their_gradients_in_evaluation():
    collection = embstore.EmbeddingBagCollection([make_table()], {"a": "t", "b": "t"}).eval()
    weights = [torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)]
    vectors = collection.tables["t"].find_or_insert(IDS[:10])
    out = collection(
        {"a": (IDS[:6].view(2, 3), None, weights[0]), "b": (IDS[6:10], torch.tensor([0, 4]), weights[1])}
    )
    (out["a"].sum() + 2 * out["b"].sum()).backward()
    torch.testing.assert_close(weights[0].grad, vectors[:6].sum(1).view(2, 3))
    torch.testing.assert_close(weights[1].grad, 2 * vectors[6:].sum(1))


# ---- conversion


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"update_in_backward": False}, {"device_rows": 64}], ids=str)
def test_vectors_come_in_the_dtype_of_a_conversion_and_rows_keep_theirs(dtype, options):
    emb = embstore.Embedding(table=make_table(), **options)
    model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1)).to(dtype)
    out = emb(IDS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.detach(), emb.table.initial_values(IDS).to(dtype), rtol=0, atol=0)
    model(IDS).sum().backward()
    if not emb.update_in_backward:
        emb.step()
    emb.flush()
    moved = emb.table.initial_values(IDS) - 0.1 * model[1].weight.detach().float()
    torch.testing.assert_close(emb.table.find(IDS)[0], moved)
    assert copy.deepcopy(emb)(IDS).dtype == dtype
    assert model.to("cpu")[0](IDS).dtype == dtype and model.float()[0](IDS).dtype == torch.float32


def test_bags_and_collections_are_converted_too():
    bag = embstore.EmbeddingBag(table=make_table()).half()
    assert bag(IDS.view(1, 17)).dtype == torch.float16
    collection = embstore.EmbeddingCollection([make_table("a"), make_table("b", dtype="bfloat16")])
    both = {"a": IDS, "b": IDS}
    assert [v.dtype for v in collection(both).values()] == [torch.float32, torch.bfloat16]
    assert {v.dtype for v in collection.double()(both).values()} == {torch.float64}
    with pytest.raises(TypeError, match="dtype should be one of floating point .* but is: torch.int8"):
        collection.type(torch.int8)
    assert {v.dtype for v in collection(both).values()} == {torch.float64}


def test_a_conversion_of_the_dtype_leaves_the_device_tier_where_it_is():
    emb = embstore.Embedding(table=make_table(), device_rows=64)
    emb(IDS).sum().backward()
    (tier,) = emb._tiers.values()
    tier.device = torch.device("meta")  # a device that is not the default one
    emb.float().double().half()
    assert list(emb._tiers.values()) == [tier]


def test_a_state_dict_is_as_it_was_and_loads_by_assignment():
    emb, other = (embstore.Embedding(table=make_table(), update_in_backward=False) for _ in range(2))
    emb(IDS).sum().backward()
    emb.step()
    assert list(emb.state_dict()) == ["_extra_state"]
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other.load_state_dict(emb.state_dict(), assign=True)
    before = other.table.find(IDS)[0]
    other(IDS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(other.table.find(IDS)[0], before - 0.1)


def test_a_module_under_data_parallel_ranks_is_refused_instead_of_training_tables_apart():
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import embstore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = torch.nn.Sequential(embstore.Embedding(4), torch.nn.Linear(4, 1))
replica = torch.nn.parallel.DistributedDataParallel(model)
try:
    replica(torch.arange(3))
except RuntimeError as error:
    print(error)
assert len(model[0].table) == 0
replica.eval()
assert replica(torch.arange(3)).shape == (3, 1)
model.train()
assert model(torch.arange(3)).requires_grad and len(model[0].table) == 3  # outside
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "would train a separate table on each rank" in done.stdout
