"""A trained model becomes a serving model in one call: the outputs of eval(), to the bit for float32."""

import copy
import threading

import pytest
import torch

import embstore
import one_embedding
from embstore.nn.row_module import RowModule
from embstore.serving import Reader, serving_model

IDS = torch.arange(40) * 7919 - 100_003


def table(name, dim, **keywords):
    return embstore.TableOptions(
        name=name,
        dim=dim,
        optimizer=embstore.Adagrad(lr=0.1),
        initializer=embstore.Normal(0, 1),
        seed=3,
        **keywords,
    )


class Native(torch.nn.Module):
    """All four native modules, and dense layers behind them."""

    def __init__(self):
        super().__init__()
        self.single = embstore.Embedding(table=embstore.Table(table("single", 3)))
        self.bag = embstore.EmbeddingBag(table=embstore.Table(table("bag", 4)), mode="mean")
        tables = [table("a", 5), table("b", 7, dtype="bfloat16")]
        self.several = embstore.EmbeddingCollection(tables, {"u": "a", "v": "b", "w": "a"})
        self.bags = embstore.EmbeddingBagCollection([table("c", 2), table("d", 6)])
        self.dense = torch.nn.Linear(sum((3, 4, 5, 7, 5, 2, 6)), 2)

    def forward(self, ids, offsets, weights):
        n = offsets.shape[0]
        several = self.several({"u": ids[:n], "v": ids[1 : n + 1], "w": ids[:n].flip(0)})
        bags = self.bags({"c": (ids, offsets), "d": (ids, offsets, weights)})
        parts = [
            self.single(ids[:n]),
            self.bag(ids, offsets, weights),
            *(part.float() for part in several.values()),
            *bags.values(),
        ]
        return self.dense(torch.cat(parts, 1))

    def collections(self):
        modules = {"single": self.single, "bag": self.bag, "several": self.several, "bags": self.bags}
        return {name: dict(module.tables) for name, module in modules.items()}


def batch(seed, known=40):
    generator = torch.Generator().manual_seed(seed)
    ids = IDS[torch.randint(0, known, (23,), generator=generator)]
    return ids, torch.tensor([0, 4, 4, 9, 11, 17]), torch.rand(23, generator=generator)


def trained(model, steps=4):
    model.train()
    for step in range(steps):
        model(*batch(step, 30)).square().sum().backward()
    return model.eval()


@pytest.mark.parametrize("kind", ["dump", "log", "reader"])
def test_a_native_model_has_the_outputs_of_eval(tmp_path, kind):
    model = trained(Native())
    if kind == "log":
        embstore.IncrementLog.create(tmp_path / "d", model.collections())
    else:
        embstore.dump(tmp_path / "d", model.collections())
    source = Reader(tmp_path / "d", cache=tmp_path / "c") if kind == "reader" else tmp_path / "d"
    served = serving_model(model, source, **({} if kind == "reader" else {"cache": tmp_path / "c"}))
    assert not served.training and not any(p.requires_grad for p in served.parameters())
    for seed in range(5):
        assert torch.equal(served(*batch(seed)), model(*batch(seed)))  # ids from 30 on are missing
    assert not any(isinstance(m, embstore.nn.TableModule) for m in served.modules())
    assert type(model.single) is embstore.Embedding  # the trained one is as it was


def test_ids_without_a_row_read_their_shared_row(tmp_path):
    emb = embstore.Embedding(4, name="t", max_capacity=128, seed=1, optimizer=embstore.SGD(lr=0.1))
    assert emb.table.options.shared_rows == 1
    for step in range(3):
        emb(torch.arange(400) * 31 + step).square().sum().backward()
    embstore.dump(tmp_path / "d", {"m": dict(emb.tables)})
    served = serving_model(emb, tmp_path / "d", cache=tmp_path / "c")
    vectors = emb.eval()(torch.arange(2000))
    assert torch.equal(served(torch.arange(2000)), vectors) and vectors.any(1).all()


def test_it_is_a_copy_that_follows_the_log_and_not_the_trainer(tmp_path):
    model = trained(Native())
    log = embstore.IncrementLog.create(tmp_path / "d", model.collections())
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    before = served(*batch(1))
    trained(model)
    weight = model.dense.weight.detach().clone()
    model.dense.weight.data.add_(1)
    assert torch.equal(served(*batch(1)), before)
    log.append(model.collections())
    served.source.reader.follow()
    model.dense.weight.data.copy_(weight)
    assert torch.equal(served(*batch(1)), model(*batch(1)))
    assert not torch.equal(served(*batch(1)), before)


def test_one_forward_answers_from_one_state(tmp_path):
    """The reader moves on in the middle of a forward pass."""
    model = trained(Native())
    log = embstore.IncrementLog.create(tmp_path / "d", model.collections())
    before = model(*batch(1))
    trained(model)
    after = model(*batch(1))
    log.append(model.collections())

    served = serving_model(model, Reader(tmp_path / "d", cache=tmp_path / "c"))
    assert torch.equal(served(*batch(1)), after)
    first = embstore.checkpoint.open_dump(tmp_path / "d" / "base-000000000000")
    assert first.tables
    old = serving_model(model, tmp_path / "d" / "base-000000000000", cache=tmp_path / "c2")
    state, new = old.source.reader.state, served.source.reader.state
    old.bag.register_forward_pre_hook(lambda *_: setattr(old.source.reader, "_state", new))
    assert torch.equal(old(*batch(1)), before)  # the hook came too late for this one
    assert old.source.reader.state is new is not state
    assert torch.equal(old(*batch(1)), after)


def test_threads_have_their_own_states(tmp_path):
    model = trained(Native())
    embstore.dump(tmp_path / "d", model.collections())
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    wanted, found = model(*batch(1)), []
    threads = [threading.Thread(target=lambda: found.append(served(*batch(1)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(one, wanted) for one in found)


def test_torch_export_takes_the_serving_model_with_any_number_of_ids(tmp_path):
    model = trained(Native())
    embstore.dump(tmp_path / "d", model.collections())
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    n = torch.export.Dim("n", min=9)
    program = torch.export.export(served, batch(0), dynamic_shapes=({0: n}, None, {0: n}))
    operators = {str(node.target) for node in program.graph.nodes}
    assert {"embstore.serve.default", "embstore.serve_bags.default"} <= operators
    exported = program.module()
    for seed in range(3):
        ids, offsets, weights = batch(seed)
        for end in (23, 19):
            assert torch.equal(
                exported(ids[:end], offsets, weights[:end]), model(ids[:end], offsets, weights[:end])
            )


def test_torch_compile_takes_it_too(tmp_path):
    torch._dynamo.reset()
    model = trained(Native())
    embstore.dump(tmp_path / "d", model.collections())
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    graph = torch.compile(served, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(*batch(2)), model(*batch(2)))


def test_rows_may_be_smaller_and_vectors_keep_the_dtype_that_the_module_gave(tmp_path):
    emb = embstore.Embedding(8, name="t", initializer=embstore.Normal(0, 1)).half()
    emb(IDS)
    embstore.dump(tmp_path / "d", {"m": dict(emb.tables)})
    served = serving_model(emb, tmp_path / "d", dtype="int8", cache=tmp_path / "c")
    vectors = served(IDS.view(8, 5))
    assert vectors.shape == (8, 5, 8) and vectors.dtype == torch.float16
    torch.testing.assert_close(vectors, emb.eval()(IDS.view(8, 5)), rtol=0, atol=0.02)


def test_modules_that_share_names_are_told_apart_by_their_path_or_by_the_caller(tmp_path):
    model = torch.nn.ModuleDict(
        {name: embstore.Embedding(3, name="t", initializer=embstore.Normal(0, 1)) for name in "xy"}
    )
    expected = {name: module(IDS).detach() for name, module in model.items()}
    named = {name: dict(model[name].tables) for name in "xy"}
    embstore.dump(tmp_path / "d", named)
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    assert all(torch.equal(served[name](IDS), expected[name]) for name in "xy")
    embstore.dump(tmp_path / "e", {"monday": named["x"], "tuesday": named["y"]})
    with pytest.raises(KeyError, match=r"has: monday/t, tuesday/t; collections=\{'model.x'"):
        serving_model(model, tmp_path / "e", cache=tmp_path / "c")
    names = {"model.x": "tuesday", "model.y": "monday"}
    crossed = serving_model(model, tmp_path / "e", collections=names, cache=tmp_path / "c")
    assert torch.equal(crossed["x"](IDS), expected["y"]) and torch.equal(crossed["y"](IDS), expected["x"])
    with pytest.raises(ValueError, match=r"collections should name modules among"):
        serving_model(model, tmp_path / "d", collections={"model.z": "x"}, cache=tmp_path / "c")


def test_a_module_that_appears_twice_is_replaced_by_one(tmp_path):
    emb = embstore.Embedding(3, name="t")
    emb(IDS)
    model = torch.nn.Sequential(torch.nn.ModuleList([emb]), torch.nn.ModuleList([emb]))
    embstore.dump(tmp_path / "d", {"m": dict(emb.tables)})
    served = serving_model(model, tmp_path / "d", cache=tmp_path / "c")
    assert served[0][0] is served[1][0] is not emb
    twin = copy.deepcopy(served)
    assert torch.equal(twin[0][0](IDS), served[0][0](IDS))


def test_what_cannot_be_served_is_said(tmp_path):
    emb = embstore.Embedding(3, name="t")
    embstore.dump(tmp_path / "d", {"m": dict(emb.tables)})
    with pytest.raises(ValueError, match="should have tables of embstore"):
        serving_model(torch.nn.Linear(2, 2), tmp_path / "d", cache=tmp_path / "c")
    with pytest.raises(TypeError, match="model should be a torch module but is: str"):
        serving_model("model", tmp_path / "d")
    with pytest.raises(FileNotFoundError):
        serving_model(emb, tmp_path / "nothing")
    with pytest.raises(KeyError, match=r"table 'other' of the module 'model' is not in .*d, which has: m/t"):
        serving_model(embstore.Embedding(3, name="other"), tmp_path / "d", cache=tmp_path / "c")
    with pytest.raises(TypeError, match="options should come without a Reader"):
        serving_model(emb, Reader(tmp_path / "d", cache=tmp_path / "c"), dtype="int8")
    with pytest.raises(TypeError, match="module 'model.0' should have a method to_serving but is: RowModule"):
        serving_model(torch.nn.Sequential(RowModule()), tmp_path / "d", cache=tmp_path / "c")
    served = serving_model(emb, tmp_path / "d", cache=tmp_path / "c")
    with pytest.raises(TypeError, match="should be integers"):
        served(torch.rand(3))


# ---- one_embedding


def embedding_of(path, name, **keywords):
    tables = [one_embedding.make_table(one_embedding.make_uniform_initializer(-b, b)) for b in (0.1, 0.3)]
    store = one_embedding.make_cached_ssd_store_options(1, str(path / name), size_factor=1)
    return one_embedding.MultiTableEmbedding(
        name, 6, torch.float, torch.int64, keywords.pop("tables", tables), store, **keywords
    )


class Pair(torch.nn.Module):
    """Two embeddings of one_embedding, of which one has a padding id and one initializer."""

    def __init__(self, path):
        super().__init__()
        self.first = embedding_of(path, "first", padding_idx=int(IDS[3]))
        self.second = embedding_of(path, "second", tables=None)
        self.dense = torch.nn.Linear(6, 2)

    def forward(self, ids, table_ids):
        return self.dense(self.first(ids) + self.first(ids, table_ids) + self.second(ids))

    def close(self):
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(tmp_path):
    model = Pair(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(IDS[:24].view(12, 2), (IDS[:24].view(12, 2) + step) % 2).square().sum().backward()
        optimizer.step()
    embeddings = {"first": model.first.table, "second": model.second.table}
    embstore.dump(
        tmp_path / "d",
        {name: {table.name: table} for name, table in embeddings.items()},
        ownership=embstore.Ownership.XXH64,
    )
    yield model.eval()
    model.close()


def test_a_model_of_one_embedding_is_served_to_the_bit_with_initial_values_for_missing_ids(pair, tmp_path):
    served = serving_model(pair, tmp_path / "d", cache=tmp_path / "c")
    ids = IDS.view(20, 2)
    for table_ids in (torch.zeros_like(ids), ids % 2):
        assert torch.equal(served(ids, table_ids), pair(ids, table_ids))
    assert pair.first(ids).abs().min(-1).values.gt(0).sum() == 39  # all but the padding id
    with pytest.raises(ValueError, match="table_ids should be between 0 and 1 but one is: 2"):
        served(ids, torch.full_like(ids, 2))
    with pytest.raises(TypeError, match="key_type"):
        served(ids.int(), ids)
    pair.close()
    assert torch.isfinite(served(ids, ids % 2)).all()  # needs the model no more


def test_torch_export_takes_a_model_of_one_embedding(pair, tmp_path):
    served = serving_model(pair, tmp_path / "d", cache=tmp_path / "c")
    ids = IDS.view(20, 2)
    program = torch.export.export(served, (ids, ids % 2))
    assert torch.equal(program.module()(ids, (ids + 1) % 2), pair(ids, (ids + 1) % 2))
