"""Modules: train and eval, order of forward and backward, pending gradients, collections, copies."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from native_tables import as_dict, everything, small_table, values_of

import embstore
from embstore.nn.table_module import TableModule


def sgd_table(**keywords):
    return small_table(2, optimizer=embstore.SGD(lr=1.0), **keywords)


def rows(table):
    return {k: v[0] for k, v in values_of(table).items()}


# ---- train and eval


def test_training_inserts_and_evaluation_changes_nothing():
    emb = embstore.Embedding(table=small_table(2, initializer=embstore.Uniform(0.5, 1.0)))
    trained = emb(torch.tensor([1, 2, 3]))
    emb.eval()
    before = everything(emb.table)
    out = emb(torch.tensor([[2, 9], [3, -9]]))
    assert everything(emb.table) == before and not out.requires_grad
    assert (out[0, 1] == 0).all() and (out[1, 1] == 0).all()
    torch.testing.assert_close(out[:, 0], trained[1:].detach(), rtol=0, atol=0)
    emb.train()
    assert (emb(torch.tensor([9])) != 0).all() and len(emb.table) == 4


def test_training_without_gradients_inserts_and_pins_nothing():
    emb = embstore.Embedding(table=sgd_table())
    with torch.no_grad():
        for i in range(20):
            assert not emb(torch.arange(100 * i, 100 * i + 100)).requires_grad
    assert emb.table.stats().refusals == 0 and len(emb.table) == 128


# ---- forward and backward in any order


def test_two_outstanding_forwards_each_update_once():
    emb = embstore.Embedding(table=sgd_table())
    first = emb(torch.tensor([1, 2]))
    second = emb(torch.tensor([2, 3]))
    second.sum().backward()
    first.sum().backward()
    assert rows(emb.table) == {1: 0.0, 2: 0.0, 3: 2.0}
    assert emb.table.optimizer_step == 2
    third = emb(torch.tensor([1])) * 2 + emb(torch.tensor([1])) * 3
    third.sum().backward()
    assert rows(emb.table)[1] == -5.0


def test_a_forward_without_backward_leaves_rows_and_pins_nothing():
    emb = embstore.Embedding(table=sgd_table())
    for i in range(20):
        emb(torch.arange(100 * i, 100 * i + 100))
    assert emb.table.stats().refusals == 0 and emb.table.optimizer_step == 0
    assert all(rows(emb.table)[k] == k for k in rows(emb.table))


def test_rows_of_an_outstanding_forward_are_not_evicted():
    emb = embstore.Embedding(table=sgd_table(check_mode="ignore"))
    out = emb(torch.arange(0, 100))
    for i in range(1, 10):
        with torch.no_grad():
            emb(torch.arange(1000 * i, 1000 * i + 28))
    out.sum().backward()
    assert all(rows(emb.table)[k] == k - 1 for k in range(100))


def test_outputs_that_are_kept_never_cause_a_refusal():
    emb = embstore.Embedding(table=sgd_table(check_mode="error"))
    kept = [emb(torch.arange(100 * i, 100 * i + 100)) for i in range(10)]  # for a metric, say
    assert emb.table.stats().refusals == 0 and emb.table.stats().dropped_gradients == 9 * 100 - 28
    kept[0].sum().backward()  # its rows have gone: nothing is updated
    kept[-1].sum().backward()
    assert all(rows(emb.table)[k] == k - 1 for k in range(900, 1000))


def test_after_a_refusal_the_next_batch_is_not_refused():
    emb = embstore.Embedding(table=sgd_table(check_mode="error"))
    with pytest.raises(RuntimeError, match="refused 72 distinct keys of a batch of 200: .* same batch"):
        emb(torch.arange(200))
    caught = emb(torch.arange(1000, 1128)).sum()
    assert emb.table.stats().refusals == 72
    caught.backward()
    assert all(rows(emb.table)[k] == k - 1 for k in range(1000, 1128))


def test_a_backward_follows_growth_and_passes_erased_rows_by():
    emb = embstore.Embedding(table=sgd_table(max_capacity=1 << 14))
    out = emb(torch.arange(0, 100))
    emb.table.find_or_insert(np.arange(1000, 6000))
    assert emb.table.erase(np.arange(0, 50)) == 50
    emb.table.find_or_insert([7])  # back, as a new row
    out.sum().backward()
    got = rows(emb.table)
    assert got[7] == 7 and 8 not in got
    assert all(got[k] == k - 1 for k in range(50, 100)) and all(got[k] == k for k in range(1000, 6000))


def test_a_batch_is_backpropagated_once():
    emb = embstore.Embedding(table=sgd_table())
    out = emb(torch.tensor([1])).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be backpropagated once"):
        out.backward()
    assert rows(emb.table) == {1: 0.0} and emb.table.optimizer_step == 1


def test_a_backward_on_a_closed_table_raises():
    emb = embstore.Embedding(table=sgd_table())
    out = emb(torch.tensor([1])).sum()
    emb.table.close()
    with pytest.raises(RuntimeError, match="closed"):
        out.backward()
    with pytest.raises(RuntimeError, match="closed"):
        emb(torch.tensor([1]))
    assert emb.table.optimizer_step == 0


# ---- accumulate now, step later


@pytest.mark.parametrize(
    "optimizer", [embstore.SGD(lr=0.5), embstore.Adam(lr=0.5), embstore.RowwiseAdagrad(lr=0.5)]
)
def test_pending_gradients_equal_one_big_batch(optimizer):
    def make(**keywords):
        table = small_table(3, optimizer=optimizer, initializer=embstore.Normal(0, 1), max_capacity=1024)
        return embstore.EmbeddingBag(table=table, **keywords)

    later, at_once = make(update_in_backward=False), make()
    rng = np.random.default_rng(0)
    for _ in range(10):
        parts = [torch.from_numpy(rng.integers(0, 60, size=(8, 5))) for _ in range(3)]
        # Small whole numbers: sums are exact in any order.
        grads = [torch.from_numpy(rng.integers(-3, 4, size=(8, 3)).astype(np.float32)) for _ in parts]
        for ids, g in zip(parts, grads):
            before = values_of(later.table)
            later(ids).backward(g)
            assert all((values_of(later.table)[k] == v).all() for k, v in before.items())
        later.step()
        at_once(torch.cat(parts)).backward(torch.cat(grads))
    assert {k: r[:2] for k, r in as_dict(later.table).items()} == {
        k: r[:2] for k, r in as_dict(at_once.table).items()
    }
    assert later.table.optimizer_step == at_once.table.optimizer_step == 10


def test_pending_gradients_are_dropped_by_zero_grad_and_keep_their_rows():
    emb = embstore.Embedding(table=sgd_table(), update_in_backward=False)
    emb(torch.arange(100)).sum().backward()
    with torch.no_grad():
        emb(torch.arange(1000, 1028))
    emb.step()
    assert all(rows(emb.table)[k] == k - 1 for k in range(100))
    emb(torch.arange(100)).sum().backward()
    emb.zero_grad()
    emb.step()
    assert all(rows(emb.table)[k] == k - 1 for k in range(100))
    assert emb.table.optimizer_step == 1  # as in torch, a step without gradients is none
    with pytest.raises(RuntimeError, match="step should not be called"):
        embstore.Embedding(table=sgd_table()).step()


@pytest.mark.parametrize("update_in_backward", [True, False])
def test_a_step_counts_once_for_every_table_also_without_gradient(update_in_backward):
    options = [embstore.TableOptions(name=n, dim=2, optimizer=embstore.Adam()) for n in "ab"]
    collection = embstore.EmbeddingCollection(options, update_in_backward=update_in_backward)
    for step in range(1, 4):
        out = collection({"a": torch.tensor([1]), "b": torch.tensor([1])})
        out["a"].sum().backward()  # b gets none
        if not update_in_backward:
            collection.step()
        assert [collection.tables[n].optimizer_step for n in "ab"] == [step, step]


# ---- collections


def mixed_collection(kind, seed=None, **keywords):
    options = [
        embstore.TableOptions(
            name=name,
            dim=dim,
            dtype=dtype,
            optimizer=optimizer,
            initializer=embstore.Normal(0, 1),
            max_capacity=4096,
            seed=seed,
        )
        for name, dim, dtype, optimizer in [
            ("user", 3, "float32", embstore.SGD(lr=0.5)),
            ("item", 16, "float32", embstore.Adagrad(lr=0.5)),
            ("tag", 7, "bfloat16", embstore.SGD(lr=0.5)),
        ]
    ]
    return kind(options, {"user": "user", "item": "item", "seen": "item", "tag": "tag"}, **keywords)


def test_a_collection_equals_its_tables_alone():
    together, alone = (mixed_collection(embstore.EmbeddingCollection, seed=1) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(5):
        inputs = {
            "user": torch.from_numpy(rng.integers(0, 50, size=(4, 2))),
            "seen": torch.from_numpy(rng.integers(0, 50, size=33)),
            "item": torch.from_numpy(rng.integers(0, 50, size=7)),
            "tag": torch.empty(0, dtype=torch.int64),
        }
        out = together(inputs)
        assert {f: tuple(v.shape) for f, v in out.items()} == {
            "user": (4, 2, 3),
            "item": (7, 16),
            "seen": (33, 16),
            "tag": (0, 7),
        }
        weights = {f: torch.randn(v.shape) for f, v in out.items()}
        sum((v.float() * weights[f]).sum() for f, v in out.items()).backward()
        # Features of one table in one update: a row that both touch moves once.
        user = embstore.Embedding(table=alone.tables["user"])(inputs["user"])
        item = embstore.Embedding(table=alone.tables["item"])(torch.cat([inputs["item"], inputs["seen"]]))
        torch.testing.assert_close(out["user"], user, rtol=0, atol=0)
        torch.testing.assert_close(torch.cat([out["item"], out["seen"]]), item, rtol=0, atol=0)
        user.backward(weights["user"])
        item.backward(torch.cat([weights["item"], weights["seen"]]))
    for name in ("user", "item"):
        a, b = (c.tables[name].rows() for c in (together, alone))
        assert (a.keys == b.keys).all() and a.values.tobytes() == b.values.tobytes()


def test_a_bag_collection_merges_features_with_and_without_weights():
    collection = mixed_collection(embstore.EmbeddingBagCollection, mode="mean")
    collection.tables["item"].insert_or_assign(np.arange(10), np.repeat(np.arange(10.0)[:, None], 16, 1))
    weights = torch.tensor([[1.0, 3.0], [2.0, 2.0]]).t().contiguous().t().requires_grad_()
    out = collection(
        {
            "item": (torch.tensor([[1, 2], [3, 4]]), None, weights),
            "seen": (torch.tensor([5, 6, 7]), torch.tensor([0, 1])),
        }
    )
    np.testing.assert_allclose(out["item"].detach()[:, 0], [(1 + 6) / 2, (6 + 8) / 2])
    np.testing.assert_allclose(out["seen"].detach()[:, 5], [5, 6.5])
    out["item"].sum().backward()
    np.testing.assert_allclose(weights.grad, 16 * np.array([[0.5, 1.0], [1.5, 2.0]]))


def test_a_collection_takes_any_part_of_its_features():
    collection = mixed_collection(embstore.EmbeddingCollection)
    assert collection({}) == {}
    assert set(collection({"seen": torch.tensor([1])})) == {"seen"}
    with pytest.raises(ValueError, match="features should be among .* but are: \\['nobody'\\]"):
        collection({"nobody": torch.tensor([1])})
    with pytest.raises(ValueError, match="features\\['x'\\] should name one of"):
        embstore.EmbeddingCollection([embstore.TableOptions(name="a", dim=2)], {"x": "b"})
    with pytest.raises(ValueError, match="names of tables should differ"):
        embstore.EmbeddingCollection([embstore.TableOptions(name="a", dim=2)] * 2)
    collection.set_learning_rate(0.125)
    assert {t.learning_rate for t in collection.tables.values()} == {0.125}


# ---- seeds

MODULES = {
    "embedding": lambda **o: embstore.Embedding(4, **o),
    "bag": lambda **o: embstore.EmbeddingBag(4, **o),
    "collection": lambda **o: embstore.EmbeddingCollection([embstore.TableOptions(name="a", dim=4, **o)]),
}


def first_vectors(module):
    (table,) = module.tables.values()
    return table.find_or_insert(np.arange(-7, 7)).tobytes()


@pytest.mark.parametrize("kind", MODULES)
def test_modules_start_differently_and_torch_manual_seed_governs_them(kind):
    def two():
        torch.manual_seed(3)
        return [first_vectors(MODULES[kind]()) for _ in range(2)]

    first, second = two()
    assert first != second and two() == [first, second]
    torch.manual_seed(4)
    assert first_vectors(MODULES[kind]()) not in (first, second)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("seed", [0, 7, -1])
def test_a_seed_that_is_given_is_exact_and_takes_nothing_from_torch(kind, seed):
    torch.manual_seed(5)
    name = "a" if kind == "collection" else "embedding"
    table = embstore.Table(name, dim=4, seed=seed)
    modules = [MODULES[kind](seed=seed) for _ in range(2)]
    assert {first_vectors(m) for m in modules} == {table.initial_values(np.arange(-7, 7)).tobytes()}
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_collections_give_each_table_a_seed_of_its_own():
    options = [embstore.TableOptions(name=name, dim=4) for name in "ab"]
    a, b = embstore.EmbeddingCollection(options).tables.values()
    assert a.seed != b.seed and options[0].seed is None


def test_a_dump_carries_the_seed_of_a_module(tmp_path):
    emb, other = embstore.Embedding(4), embstore.Embedding(4)
    emb(torch.arange(10))
    embstore.dump(tmp_path / "dump", {"model": dict(emb.tables)}, optim=True)
    embstore.load(tmp_path / "dump", {"model": dict(other.tables)}, optim=True)
    assert other.table.seed == emb.table.seed
    assert torch.equal(other(torch.arange(20)), emb(torch.arange(20)))


# ---- copies


def trained_collection():
    collection = mixed_collection(embstore.EmbeddingCollection)
    for step in range(5):
        ids = torch.arange(50 * step, 50 * step + 97)
        out = collection({"user": ids, "item": ids, "tag": ids})
        sum(v.float().square().sum() for v in out.values()).backward()
    return collection


def through_state_dict(collection, weights_only):
    buffer = io.BytesIO()
    torch.save(collection.state_dict(), buffer)
    buffer.seek(0)
    other = mixed_collection(embstore.EmbeddingCollection)
    other({"user": torch.arange(9000, 9100)})  # what was there goes
    other.load_state_dict(torch.load(buffer, weights_only=weights_only))
    return other


COPIES = {
    "state_dict": lambda c: through_state_dict(c, False),
    "state_dict weights_only": lambda c: through_state_dict(c, True),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copied_module_trains_on_alike(kind):
    collection = trained_collection()
    other = COPIES[kind](collection)
    assert isinstance(other, TableModule) and other.tables["user"] is not collection.tables["user"]
    for step in range(5):
        ids = torch.arange(30 * step, 30 * step + 97)
        for module in (collection, other):
            sum(v.float().square().sum() for v in module({"user": ids, "item": ids}).values()).backward()
    for name, table in collection.tables.items():
        assert {k: r[:2] for k, r in as_dict(table).items()} == {
            k: r[:2] for k, r in as_dict(other.tables[name]).items()
        }
        assert other.tables[name].optimizer_step == table.optimizer_step


def test_a_module_inside_a_model_saves_with_it():
    model = torch.nn.Sequential(
        embstore.Embedding(4, initializer=embstore.Normal(0, 1)), torch.nn.Linear(4, 1)
    )
    ids = torch.arange(97)
    model(ids).sum().backward()
    twin = torch.nn.Sequential(embstore.Embedding(4), torch.nn.Linear(4, 1))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin.eval()(ids), model.eval()(ids), rtol=0, atol=0)
    with pytest.raises(ValueError, match="state should hold the tables"):
        embstore.Embedding(4, name="other").load_state_dict(model[0].state_dict())


def test_a_module_with_pending_gradients_is_not_copied():
    emb = embstore.Embedding(table=sgd_table(), update_in_backward=False)
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="pending gradients"):
        copy.deepcopy(emb)
    emb.step()
    assert as_dict(copy.deepcopy(emb).table) == as_dict(emb.table)
