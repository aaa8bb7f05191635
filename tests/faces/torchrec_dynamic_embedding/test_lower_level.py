"""The classes below wrap: results as their users know them."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from faces.torchrec_dynamic_embedding import twins
from faces.torchrec_dynamic_embedding.models import batches, trainer
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import torchrec_dynamic_embedding as tde
from embstore.stores.plugin import include_dir
from torchrec_dynamic_embedding.id_transformer import IDTransformer, TensorList
from torchrec_dynamic_embedding.id_transformer_collection import IDTransformerCollection
from torchrec_dynamic_embedding.id_transformer_group import IDTransformerGroup
from torchrec_dynamic_embedding.ps import DEFAULT_PS_CHUNK_SIZE, PS, PSCollection


def transform(transformer, ids, time, out=None):
    slots = torch.full((len(ids),), -9) if out is None else out
    complete, new = transformer.transform(TensorList([torch.tensor(ids)]), TensorList([slots]), time)
    return complete, slots.tolist(), None if new is None else new.tolist()


def test_slots_are_given_in_the_order_of_first_appearance():
    transformer = IDTransformer(16, transform_config={"type": "cacheline"})
    assert transform(transformer, [100, 101, 100, -3], 0) == (
        True,
        [0, 1, 0, 2],
        [[100, 0], [101, 1], [-3, 2]],
    )
    assert transform(transformer, [101, 7], 1) == (True, [1, 3], [[7, 3]])
    assert transform(transformer, [101, 7], 1) == (True, [1, 3], None)


def test_a_full_transformer_fills_what_it_can_and_leaves_the_rest():
    transformer = IDTransformer(3)
    complete, slots, new = transform(transformer, [1, 2, 1, 3, 4, 1], 0)
    assert not complete and slots == [0, 1, 0, 2, -9, -9] and len(new) == 3
    evicted = transformer.evict(2)
    assert evicted.shape == (2, 2) and evicted.dtype == torch.int64
    assert transform(transformer, [4], 1)[0]
    assert len(transformer.evict(100)) == 2


def test_several_tensors_are_one_batch():
    transformer = IDTransformer(8)
    slots = [torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)]
    ids = TensorList([torch.tensor([5, 6]), torch.tensor([5])])
    assert transformer.transform(ids, TensorList(slots), 0)[0]
    assert [t.tolist() for t in slots] == [[0, 1], [0]]
    assert len(ids) == 2 and ids[1].tolist() == [5]


def test_save_gives_what_was_used_since_the_last_save():
    transformer = IDTransformer(8)
    transform(transformer, [1, 2], 0)
    assert sorted(transformer.save().tolist()) == [[1, 0], [2, 1]]
    transform(transformer, [2, 3], 1)
    assert sorted(transformer.save().tolist()) == [[2, 1], [3, 2]]
    with pytest.raises(ValueError, match="time should be at least 1"):
        transform(transformer, [2], 0)


def test_ps_moves_weight_and_states_between_slots():
    weight, momentum, rowwise = torch.rand(6, 4), torch.rand(6, 4), torch.rand(6)
    ps = PS("emb.AB", [weight, momentum, rowwise], "memory://ps", DEFAULT_PS_CHUNK_SIZE)
    original = [t.clone() for t in (weight, momentum, rowwise)]
    ps.evict(torch.tensor([[70, 1], [71, 4]]))
    for tensor in (weight, momentum, rowwise):
        tensor.zero_()
    ps.fetch(torch.tensor([[71, 0], [70, 5], [72, 3]]), 0).wait()
    for tensor, before in zip((weight, momentum, rowwise), original):
        assert torch.equal(tensor[0], before[4]) and torch.equal(tensor[5], before[1])
        assert not tensor[3].any(), "an id that the store lacks keeps its slot"
    weight[3], momentum[3] = 9.0, 9.0
    ps.fetch(torch.tensor([[72, 3]]), 1, True, -0.25, 0.25).wait()
    assert (weight[3].abs() <= 0.25).all() and weight[3].any() and not momentum[3].any()


def test_ps_works_in_chunks():
    weight = torch.rand(100, 4)
    ps = PS("emb.chunks", [weight], "memory://chunks", 12)
    before = weight.clone()
    ps.evict(torch.stack([torch.arange(100), torch.arange(100)], 1))
    weight.zero_()
    ps.fetch(torch.stack([torch.arange(100), torch.arange(100).flip(0)], 1), 0).wait()
    assert torch.equal(weight, before.flip(0))
    with pytest.raises(ValueError, match="should hold a row of t .4 numbers. but is: 3"):
        PS("t", [weight], "memory://chunks", 3)


def test_a_ps_collection_names_its_tables_after_the_path():
    collection = PSCollection("emb", {"A": [torch.zeros(2, 2)], "B": [torch.zeros(2, 2)]}, "memory://names")
    assert collection.table_names() == ["A", "B"] and collection["B"].table_name == "emb.B"


def kjt(**features):
    lengths = torch.tensor([len(ids) for ids in features.values()])
    values = torch.tensor([i for ids in features.values() for i in ids], dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths)


def config(name, features, rows=4):
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=features)


def test_a_collection_maps_the_features_of_each_table():
    collection = IDTransformerCollection([config("A", ["a", "c"]), config("B", [])])
    mapped, handles = collection.transform(kjt(a=[9, 8], B=[9], c=[8, 7], other=[55]))
    assert mapped.values().tolist() == [0, 1, 0, 1, 2, 55]
    for handle in handles:
        handle.wait()
    with pytest.raises(RuntimeError, match="num_embeddings of table A is 4, but 5 rows"):
        collection.transform(kjt(a=[1, 2], B=[], c=[]))


def test_a_collection_evicts_to_its_ps():
    weight = torch.zeros(4, 4)
    ps = PSCollection("emb", {"A": [weight]}, "memory://collection")
    collection = IDTransformerCollection([config("A", ["a"])], ps_collection=ps)
    for first in range(0, 40, 4):
        mapped, _ = collection.transform(kjt(a=list(range(first, first + 4))))
        weight[mapped.values()] = torch.arange(first, first + 4.0)[:, None].expand(4, 4)
    collection.save()
    for first in range(0, 40, 4):
        mapped, _ = collection.transform(kjt(a=list(range(first, first + 4))))
        assert weight[mapped.values(), 0].tolist() == list(range(first, first + 4))


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ([config("A", ["a"]), config("A", ["b"])], "Duplicate table name A"),
        ([config("A", ["a"]), config("B", ["a"])], "two share: a"),
    ],
)
def test_a_collection_refuses_tables_that_clash(tables, text):
    with pytest.raises(ValueError, match=text):
        IDTransformerCollection(tables)


def test_a_group_maps_by_path():
    ours = trainer(64)
    group = IDTransformerGroup("memory://group", ours.model, {"emb": ours.configs})
    assert "emb" in group and "other" not in group
    [(_, batch)] = twins.loader_of(batches(1, 50))
    mapped, handles = group.transform({"emb": batch})
    assert len(mapped["emb"].values()) == len(batch.values()) and handles
    assert int(mapped["emb"].values().max()) < 64
    group.save()


def test_register_io_brings_a_plugin_that_trains_as_a_twin(tmp_path):
    source = Path(__file__).parents[3] / "examples/parameter_server_plugin.cpp"
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        "-I",
        include_dir(),
    ]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "plugin.so")], check=True, timeout=100)
    torch.ops.tde.register_io(str(tmp_path / "plugin.so"))
    twins.compare("example://shop", sharding="column_wise", optimizer="rowwise_adagrad", num_prefetch=2)
    with pytest.raises(ValueError, match="cannot be loaded"):
        torch.ops.tde.register_io(str(tmp_path / "other.so"))


def test_the_package_exports_two_names():
    assert tde.__all__ == ["save", "wrap"]
