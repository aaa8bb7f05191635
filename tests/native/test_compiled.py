"""torch.compile(fullgraph=True) and torch.export: the same bits as without."""

import gc

import numpy as np
import pytest
import torch
from native_tables import everything

import embstore
from embstore.nn import compiled

DTYPES = {None: torch.float32, torch.float16: torch.float16, torch.float64: torch.float64}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def options(name="t", dim=5, rule=None, **others):
    return embstore.TableOptions(
        name=name,
        dim=dim,
        optimizer=rule or embstore.Adagrad(lr=0.1),
        initializer=embstore.Normal(0, 1),
        score_strategy="step",
        seed=3,
        **others,
    )


class Lookup(torch.nn.Module):
    """A module, called with what a batch of numbers makes for it."""

    def __init__(self, kind, **keywords):
        super().__init__()
        self.kind = kind
        if kind == "embedding":
            self.emb = embstore.Embedding(table=embstore.Table(options()), **keywords)
        elif "collection" not in kind:
            mode = kind.split()[-1]
            self.emb = embstore.EmbeddingBag(table=embstore.Table(options()), mode=mode, **keywords)
        else:
            module = embstore.EmbeddingCollection if kind == "collection" else embstore.EmbeddingBagCollection
            tables = [options("a", 3), options("b", 4, embstore.Adam(lr=0.1), dtype="bfloat16")]
            self.emb = module(tables, {"u": "a", "v": "b", "w": "a"}, **keywords)

    def forward(self, ids, offsets, weights):
        if self.kind == "embedding":
            return self.emb(ids)
        if self.kind == "collection":
            out = self.emb({"u": ids, "v": ids[1:], "w": ids[::2]})
            return torch.cat([v.float().flatten() for v in out.values()])
        if self.kind == "bag collection":
            out = self.emb({"u": (ids, offsets, weights), "v": (ids, offsets), "w": (ids[:4].view(2, 2),)})
            return torch.cat([v.float().flatten() for v in out.values()])
        return self.emb(ids, offsets, weights if "weighted" in self.kind else None)


KINDS = [
    "embedding",
    "bag sum",
    "bag mean",
    "bag weighted sum",
    "bag weighted mean",
    "collection",
    "bag collection",
]
MODES = [{}, {"update_in_backward": False}, {"max_norm": 0.5}]


def batches(count=4):
    rng = np.random.default_rng(0)
    for step in range(count):
        n = (23, 23, 31, 97)[step % 4]
        ids = torch.from_numpy(rng.integers(-20, 40, n))
        offsets = torch.tensor([0, 3, 3, n - 7])
        yield ids, offsets, torch.from_numpy(rng.standard_normal(n).astype(np.float32)).requires_grad_()


def assert_same_rows(one, other):
    for a, b in zip(one.emb.tables.values(), other.emb.tables.values(), strict=True):
        assert everything(a) == everything(b) and a.optimizer_step == b.optimizer_step


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_lookup_trains_as_one_that_is_not(kind, mode):
    plain, model = Lookup(kind, **mode), Lookup(kind, **mode)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids, offsets, weights in batches():
        gradients = []
        for module in (plain, graph):
            weights.grad = None
            out = module(ids, offsets, weights)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            gradients.append((out.detach(), weights.grad))
        assert torch.equal(gradients[0][0], gradients[1][0])
        if gradients[0][1] is not None:
            torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=0, atol=0)
        if mode == {"update_in_backward": False}:
            assert plain.emb.step() and model.emb.step()
        assert_same_rows(plain, model)
    del out
    gc.collect()
    assert len(compiled._batches) == 0  # no row stays pinned


@pytest.mark.parametrize("how", ["evaluation", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_lookup_that_does_not_train_changes_nothing(kind, how):
    plain = Lookup(kind)
    for ids, offsets, weights in batches(2):
        plain(ids, offsets, weights.detach()).sum().backward()
    before = [everything(t) for t in plain.emb.tables.values()]
    if how == "frozen":
        plain.requires_grad_(False)
    else:
        plain.eval()
    graph = torch.compile(plain, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids, offsets, weights in batches():
        with torch.no_grad():
            torch.testing.assert_close(
                graph(ids, offsets, weights), plain(ids, offsets, weights), rtol=0, atol=0
            )
        expected, found = plain(ids, offsets, weights), graph(ids, offsets, weights)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert found.requires_grad == expected.requires_grad
        if expected.requires_grad:
            upstream = torch.randn_like(expected)
            wanted, got = (torch.autograd.grad(out, [weights], upstream) for out in (expected, found))
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert [everything(t) for t in plain.emb.tables.values()] == before


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_lookup_reads_what_the_tables_hold_now(kind):
    model = Lookup(kind)
    for ids, offsets, weights in batches(2):
        model(ids, offsets, weights.detach()).sum().backward()
    model.eval()
    n = torch.export.Dim("n", min=8, max=4096)
    program = torch.export.export(
        model, (ids, offsets, weights.detach()), dynamic_shapes=({0: n}, None, {0: n})
    )
    for ids, offsets, weights in batches():
        model.train()(ids, offsets, weights.detach()).sum().backward()
        expected = model.eval()(ids, offsets, weights.detach())
        assert torch.equal(program.module()(ids, offsets, weights.detach()), expected)


def test_a_graph_of_two_modules_that_share_a_step_with_a_scaler_and_clipping():
    def make():
        torch.manual_seed(0)
        towers = [Lookup("embedding", update_in_backward=False) for _ in range(2)]
        return torch.nn.ModuleList([*towers, torch.nn.Linear(5, 1)])

    def forward(model, ids):
        return model[2](model[0](ids, None, None) * model[1](ids + 1, None, None))

    plain, compiled_one = make(), make()
    graph = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    sides = [
        (
            model,
            call,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.amp.GradScaler("cpu", init_scale=64.0),
        )
        for model, call in ((plain, forward), (compiled_one, graph))
    ]
    for number, (ids, _, _) in enumerate(batches()):
        for model, call, optimizer, scaler in sides:
            optimizer.zero_grad()
            loss = call(model, ids).square().sum() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert sides[0][3].get_scale() == sides[1][3].get_scale()
        for a, b in zip(plain[:2], compiled_one[:2]):
            np.testing.assert_allclose(
                a.emb.table.rows().values, b.emb.table.rows().values, rtol=1e-5, atol=1e-6
            )
            assert a.emb.table.optimizer_step == b.emb.table.optimizer_step
    assert sides[1][3].get_scale() == 32.0


def test_second_backward_passes_of_a_graph_behave_as_without_it():
    once, patient = Lookup("embedding"), Lookup("embedding", update_in_backward=False)
    graphs = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in (once, patient)]
    ids = torch.arange(7)
    out = graphs[0](ids, None, None)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be backpropagated once"):
        out.sum().backward()
    out = graphs[1](ids, None, None)
    before = out.detach().clone()
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()
    patient.emb.table.set_optimizer(embstore.Adagrad(lr=0.5))
    patient.emb.step()
    np.testing.assert_allclose(patient.emb.table.find(ids)[0], before - 0.5, rtol=1e-5)  # g / sqrt(g^2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_lookup_has_the_dtype_of_a_conversion(dtype):
    model = Lookup("embedding")
    if dtype is not None:
        model.to(dtype)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = graph(torch.arange(7), None, None)
    assert out.dtype == DTYPES[dtype]
    out.sum().backward()
    assert model.emb.table.optimizer_step == 1


def test_training_without_gradients_inserts_and_pins_nothing_in_a_graph():
    model = Lookup("embedding")
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = graph(torch.arange(7), None, None)
    assert not out.requires_grad and len(model.emb.table) == 7 and len(compiled._batches) == 0


def test_bad_ids_are_refused_in_a_graph_too():
    graph = torch.compile(Lookup("embedding"), backend="aot_eager")
    with pytest.raises(Exception, match="ids should be integers but their dtype is: torch.float32"):
        graph(torch.rand(7), None, None)


def test_an_exported_program_whose_module_is_gone_says_so():
    program = torch.export.export(Lookup("embedding").eval(), (torch.arange(7), None, None))
    gc.collect()
    with pytest.raises(RuntimeError, match="needs its module, which is gone"):
        program.module()(torch.arange(7), None, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_default_backend_trains_alike():
    plain, model = Lookup("bag weighted sum"), Lookup("bag weighted sum")
    graph = torch.compile(model, fullgraph=True, dynamic=True)
    for ids, offsets, weights in batches(2):
        for module in (plain, graph):
            module(ids, offsets, weights).square().sum().backward()
        a, b = plain.emb.table.rows(), model.emb.table.rows()
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_allclose(a.values, b.values, rtol=1e-5, atol=1e-6)
