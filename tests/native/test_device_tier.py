"""The device tier, with the CPU as the device: the same vectors and rows as the module without it."""

import copy

import numpy as np
import pytest
import torch

import embstore
from embstore.nn.batch import Access
from embstore.nn.device_tier import DeviceTier

OPTIMIZERS = [
    embstore.SGD(lr=0.3),
    embstore.SGD(lr=0.3, weight_decay=0.01),
    embstore.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    embstore.Adagrad(lr=0.1, eps=1e-3, eps_placement=embstore.EpsPlacement.KERAS),
    embstore.Adam(lr=0.05),
    embstore.Adam(lr=0.05, weight_decay=0.02, bias_correction=False),
    embstore.Adam(lr=0.05, eps=1e-3, eps_placement=embstore.EpsPlacement.KERAS),
    embstore.AdamW(lr=0.05, weight_decay=0.1),
]


def rows_of(module):
    module.flush()
    return module.table.rows()


def assert_same_rows(module, oracle):
    ours, theirs = rows_of(module), rows_of(oracle)
    np.testing.assert_array_equal(ours.keys, theirs.keys)
    np.testing.assert_allclose(ours.values, theirs.values, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ours.states, theirs.states, rtol=2e-5, atol=2e-6)


def train(modules, batches, call):
    for batch in batches:
        outputs = []
        for module in modules:
            out = call(module, batch)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            outputs.append(out.detach())
        torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_rows_that_come_and_go_are_trained_as_those_of_a_table(optimizer):
    generator = torch.Generator().manual_seed(0)
    module = embstore.Embedding(7, optimizer=optimizer, seed=1, device_rows=97)
    oracle = embstore.Embedding(7, optimizer=optimizer, seed=1)
    batches = [torch.randint(-500, 500, (3, 23), generator=generator) for _ in range(40)]
    train([module, oracle], batches, lambda m, ids: m(ids))
    assert_same_rows(module, oracle)
    assert len(module._tiers["embedding"]) <= 97 < len(module.table)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_and_the_gradients_of_their_weights_are_those_of_a_table(mode, weighted):
    generator = torch.Generator().manual_seed(1)
    module = embstore.EmbeddingBag(5, mode=mode, seed=1, optimizer=embstore.Adam(lr=0.1), device_rows=64)
    oracle = embstore.EmbeddingBag(5, mode=mode, seed=1, optimizer=embstore.Adam(lr=0.1))
    offsets = torch.tensor([0, 0, 4, 4, 11, 20])  # empty bags too
    of_weights = {module: [], oracle: []}

    def call(m, batch):
        ids, weights = batch
        given = weights.clone().requires_grad_() if weighted else None
        if weighted:
            given.register_hook(of_weights[m].append)
        return m(ids, offsets, given)

    batches = [
        (torch.randint(0, 200, (31,), generator=generator), torch.rand(31, generator=generator))
        for _ in range(20)
    ]
    train([module, oracle], batches, call)
    assert_same_rows(module, oracle)
    assert len(of_weights[module]) == (20 if weighted else 0)
    for ours, theirs in zip(of_weights[module], of_weights[oracle], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_collections_have_a_tier_for_each_table():
    options = [
        embstore.TableOptions(name="user", dim=4, optimizer=embstore.SGD(lr=0.1), seed=1),
        embstore.TableOptions(name="item", dim=3, optimizer=embstore.Adam(lr=0.1), seed=1),
    ]
    features = {"user": "user", "item": "item", "other": "item"}
    module = embstore.EmbeddingCollection(options, features, device_rows=50)
    oracle = embstore.EmbeddingCollection(options, features)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        inputs = {name: torch.randint(0, 300, (11,), generator=generator) for name in features}
        outputs = [m(inputs) for m in (module, oracle)]
        for out in outputs:
            sum((vectors**2).sum() for vectors in out.values()).backward()
        torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-6)
    module.flush()
    for name in ("user", "item"):
        np.testing.assert_allclose(
            module.tables[name].rows().values, oracle.tables[name].rows().values, rtol=2e-5, atol=2e-6
        )


def test_batches_may_push_each_other_out_between_forward_and_backward():
    module = embstore.Embedding(2, seed=1, optimizer=embstore.SGD(lr=1.0), device_rows=8)
    oracle = embstore.Embedding(2, seed=1, optimizer=embstore.SGD(lr=1.0))
    for m in (module, oracle):
        outputs = [m(torch.arange(start, start + 8)) for start in (0, 100, 200)]
        for factor, out in enumerate(outputs):
            (out * factor).sum().backward()
    assert_same_rows(module, oracle)


def test_evaluation_reads_both_tiers_and_changes_neither():
    module = embstore.Embedding(3, optimizer=embstore.SGD(lr=1.0), device_rows=8)
    module(torch.arange(8)).sum().backward()
    module(torch.arange(10, 18)).sum().backward()  # 0 .. 7 are in the table again
    expected = torch.from_numpy(rows_of(module).values)
    module.eval()
    ids = torch.tensor([12, 3, 12, 777, 0])
    out = module(ids)
    torch.testing.assert_close(out[[0, 1, 2, 4]], expected[[10, 3, 10, 0]])
    assert not out[3].any() and len(module.table) == 16 and len(module._tiers["embedding"]) == 8


def test_state_dicts_copies_and_moves_hold_what_the_device_has():
    module = embstore.Embedding(3, optimizer=embstore.Adam(lr=0.1), device_rows=16)
    ids = torch.arange(10)
    (module(ids) ** 2).sum().backward()
    other = embstore.Embedding(3, optimizer=embstore.Adam(lr=0.1), device_rows=16)
    (other(ids + 5) ** 2).sum().backward()
    other.load_state_dict(module.state_dict())
    twin = copy.deepcopy(module)
    expected = module.eval()(ids)
    for m in (other, twin, copy.deepcopy(module).to("cpu")):
        torch.testing.assert_close(m.eval()(ids), expected, rtol=0, atol=0)
        assert_same_rows(m, module)


def test_more_keys_than_rows_and_double_backward_raise_and_change_nothing():
    module = embstore.Embedding(3, optimizer=embstore.SGD(lr=1.0), device_rows=4)
    with pytest.raises(ValueError, match="should be at least 5, the different keys of a batch, but are: 4"):
        module(torch.arange(5))
    assert len(module.table) == 0
    out = module(torch.tensor([1, 1, 2, 3, 4, 4]))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        out.sum().backward()


def test_a_table_that_fails_leaves_the_tier_usable(monkeypatch):

    table = embstore.Table("t", dim=2, optimizer=embstore.SGD(lr=1.0))
    tier = DeviceTier(table, "cpu", 4)
    before = tier.vectors(torch.arange(4), Access.TRAIN).clone()
    tier.update(torch.arange(4), torch.ones(4, 2))
    real, table.insert_or_assign = (
        table.insert_or_assign,
        lambda *_, **__: (_ for _ in ()).throw(OSError("full")),
    )
    with pytest.raises(OSError, match="full"):
        tier.vectors(torch.arange(10, 14), Access.TRAIN)
    table.insert_or_assign = real
    torch.testing.assert_close(tier.vectors(torch.arange(4), Access.TRAIN), before - 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": embstore.Ftrl()}, NotImplementedError, "not: Ftrl"),
        ({"optimizer": embstore.SGD(momentum=0.9)}, NotImplementedError, "no momentum"),
        ({"optimizer": embstore.Adam(clip_norm=1.0)}, NotImplementedError, "clip_norm"),
        ({"dtype": embstore.DType.FLOAT16}, ValueError, "dtype should be FLOAT32"),
        ({"update_in_backward": False}, ValueError, "update_in_backward should be True"),
        ({"device_rows": -1}, ValueError, "rows should be an integer"),
        ({"device_rows": 1.5}, ValueError, "rows should be an integer"),
    ],
)
def test_what_a_tier_cannot_do_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        embstore.Embedding(3, **{"device_rows": 8, **options})


def test_a_meta_device_is_refused_and_the_rows_stay():
    module = embstore.Embedding(3, optimizer=embstore.SGD(lr=1.0), device_rows=8)
    before = module(torch.arange(4)).detach()
    with pytest.raises(ValueError, match="device should hold data but is: meta"):
        module.to("meta")
    torch.testing.assert_close(module(torch.arange(4)).detach(), before)
