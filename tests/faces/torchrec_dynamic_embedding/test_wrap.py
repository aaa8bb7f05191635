"""What wrap and save promise about batches, ids, arguments and errors."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from faces.torchrec_dynamic_embedding import twins
from faces.torchrec_dynamic_embedding.models import DIM, FEATURES, batches, kjt, scattered, trainer
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dynamic_embedding as tde
from embstore import Uniform
from embstore.stores.urls import open_store
from torchrec_dynamic_embedding.dataloader import DataLoader

NUMBER = iter(range(10**6))


def url():
    return f"memory://wrap{next(NUMBER)}"


def wrapped(data, rows=64, address=None, **options):
    ours = trainer(rows)
    return ours, tde.wrap(address or url(), data, ours.model, {"emb": ours.configs}, **options)


def one_feature(ids, feature="user", weights=None, dtype=torch.int64):
    """A batch of one sample that has these ids in one feature."""
    lengths = torch.tensor([len(ids) if f == feature else 0 for f in FEATURES])
    return KeyedJaggedTensor(
        keys=FEATURES, values=torch.tensor(ids, dtype=dtype), lengths=lengths, weights=weights
    )


def vectors(ours, slots, table="user"):
    return ours.model.state_dict()[f"emb.embedding_bags.{table}.weight"].local_shards()[0].tensor[slots]


@pytest.mark.parametrize("num_prefetch", [0, 1, 4])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_batch_comes_once_and_in_order_in_every_epoch(num_prefetch, count):
    data = [
        (label, k, number, "text") for number, (label, k) in enumerate(twins.loader_of(batches(count, 300)))
    ]
    _, loader = wrapped(data, rows=512, num_prefetch=num_prefetch)
    assert len(loader) == count
    for _ in range(3):
        found = list(loader)
        assert [batch[2] for batch in found] == list(range(count))
        for batch, original in zip(found, data):
            assert type(batch) is tuple and batch[0] is original[0] and batch[3] == "text"


def test_keys_lengths_and_weights_of_a_kjt_are_handed_through():
    weights = torch.tensor([0.5, 2.0, 3.0])
    batch = one_feature([40, -7, 40], weights=weights)
    _, loader = wrapped([(batch,)])
    [(found,)] = list(loader)
    assert found.keys() == FEATURES and found.weights() is weights
    assert found.lengths().tolist() == [3, 0, 0]
    assert found.values().tolist() == [0, 1, 0]
    assert batch.values().tolist() == [40, -7, 40], "the batch of the user stays as it was"


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_any_int64_is_an_id(num_prefetch):
    ids = [-1, 2**31, 2**32 + 5, 5, 2**62 + 9, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 0]
    address = url()
    ours, loader = wrapped([(one_feature(ids),)] * 2, address=address, num_prefetch=num_prefetch)
    for (batch,) in loader:
        assert batch.values().tolist() == list(range(8))
        np.testing.assert_array_equal(
            vectors(ours, batch.values()).detach(), Uniform(-0.5, 0.5).rows(ids, DIM, table="emb.user")
        )
    tde.save(ours.model)
    assert open_store(address, table="emb.user", tensor_bytes=[32, 32]).contains(np.array(ids)).all()


def test_int32_ids_and_empty_batches_are_accepted():
    data = [
        (one_feature([7, 9], dtype=torch.int32),),
        (one_feature([]),),
        (one_feature([9, -3], dtype=torch.int32),),
    ]
    ours, loader = wrapped(data)
    found = []
    for (batch,) in loader:
        ours.model(batch)
        found.append(batch.values().tolist())
    assert found == [[0, 1], [], [1, 2]]


@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.BF16])
def test_half_precision_rows_come_back_as_they_went(dtype):
    data = [(one_feature(list(range(i, i + 40))),) for i in range(0, 400, 40)] * 2
    ours = trainer(48, dtype=dtype)
    loader = tde.wrap(url(), data, ours.model, {"emb": ours.configs}, num_prefetch=2)
    number = -1
    for (batch,) in loader:
        number += 1
        slots = batch.values()
        weight = vectors(ours, slots)
        if number < 10:
            start = Uniform(-0.5, 0.5).rows(data[number][0].values(), DIM, table="emb.user")
            np.testing.assert_array_equal(weight.float(), torch.from_numpy(start).to(weight.dtype).float())
            with torch.no_grad():
                vectors_ = ours.model.state_dict()["emb.embedding_bags.user.weight"].local_shards()[0].tensor
                vectors_[slots] = float(number)
        else:
            assert (weight.float() == number - 10).all()
        del batch, slots  # what is held and not trained stays in the table


def test_an_error_of_the_loader_comes_out_with_its_type_and_traceback():
    def source():
        yield from twins.loader_of(batches(3, 100))
        raise ZeroDivisionError("in the loader")

    class Loader:
        def __iter__(self):
            return source()

    for num_prefetch in (0, 4):
        _, loader = wrapped(Loader(), num_prefetch=num_prefetch)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        with pytest.raises(ZeroDivisionError, match="in the loader") as info:
            next(iterator)
        assert "source" in [entry.name for entry in info.traceback]
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("num_prefetch", [0, 3])
def test_a_table_too_small_for_one_batch_raises_and_the_next_epoch_works(num_prefetch):
    data = [(one_feature([1, 2, 3]),), (one_feature(list(range(10, 25))),)]
    _, loader = wrapped(data, rows=12, num_prefetch=num_prefetch)
    with pytest.raises(RuntimeError, match="num_embeddings of table user is 12, but 15 rows"):
        list(loader)
    data.pop()
    assert [batch.values().tolist() for (batch,) in loader] == [[0, 1, 2]]


def test_batches_in_flight_may_fill_a_table_that_holds_one_batch_only():
    data = [(one_feature(list(range(12 * i, 12 * i + 12))),) for i in range(6)]
    ours, loader = wrapped(data, rows=12, num_prefetch=4)
    for number, (batch,) in enumerate(loader):
        ours.model(batch)  # the output is dropped, so no backward will come
        ids = list(range(12 * number, 12 * number + 12))
        np.testing.assert_array_equal(
            vectors(ours, batch.values()).detach(), Uniform(-0.5, 0.5).rows(ids, DIM, table="emb.user")
        )


def test_a_second_loader_serves_in_the_middle_of_an_epoch():
    ours, loader = wrapped([(one_feature([1, 2, 3]),), (one_feature([4, 5, 6]),)], rows=8, num_prefetch=1)
    other = DataLoader(ours.model._id_transformer_group, [(one_feature([1, 9, 8, 7]),)], num_prefetch=1)
    iterator = iter(loader)
    [first] = next(iterator)
    before = vectors(ours, first.values()).clone()
    try:
        list(other)
    except RuntimeError as error:  # when the thread of the first one has prepared its second batch as well
        assert "batches in flight" in str(error)
    torch.testing.assert_close(vectors(ours, first.values()), before, rtol=0, atol=0)
    ours.model(first)
    assert next(iterator)


def test_save_pushes_what_changed_since_the_last_save_and_only_that():
    address = url()
    data = [(one_feature([1, 2]),), (one_feature([3]),), (one_feature([4]),)]
    ours, loader = wrapped(data, address=address)
    store = open_store(address, table="emb.user", tensor_bytes=[32, 32])
    iterator = iter(loader)
    for _ in range(2):
        batch = next(iterator)
        ours.model(*batch)
    tde.save(ours.model)
    assert store.contains(np.array([1, 2, 3, 4])).tolist() == [True, True, True, False]
    store.erase(np.array([1, 2, 3]))
    ours.model(*next(iterator))
    tde.save(ours.model)
    # 3 was in our hands as the first save ran, so it may have been trained again afterwards.
    assert store.contains(np.array([1, 2, 3, 4])).tolist() == [False, False, True, True]


def test_save_runs_while_batches_are_prepared():
    ours, loader = wrapped(twins.loader_of(batches(40, 400)), num_prefetch=4)
    for label, k in loader:
        ours.step(k, label)
        tde.save(ours.model)


def test_a_dropped_iterator_ends_its_thread():
    ours, loader = wrapped(twins.loader_of(batches(50, 300)), num_prefetch=2)
    next(iter(loader))
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name == "tde-prefetch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread is still there"
        time.sleep(0.01)
    assert ours.model._id_transformer_group.windows.in_flight.oldest(97)[1] == 97, "nothing is pinned"


def test_data_info_says_which_kjt_belongs_to_which_collection():
    other = kjt(*batches(1, 10)[0][1:])
    data = [(other, 1, one_feature([70]))]
    ours, loader = wrapped(data, data_info={2: "emb"})
    [(untouched, _, mapped)] = list(loader)
    assert untouched is other and mapped.values().tolist() == [0]
    _, loader = wrapped(data)
    with pytest.raises(ValueError, match="as many KeyedJaggedTensors as there are collections"):
        next(iter(loader))


def test_the_url_may_be_a_function_of_path_and_table():
    asked = []

    def address(path, table):
        asked.append((path, table))
        return f"memory://by-{table}"

    wrapped([], address=address)
    assert set(asked) == {("emb", "user"), ("emb", "item")}


def test_return_module_gives_the_pair():
    ours = trainer(64)
    loader, module = tde.wrap(url(), [], ours.model, {"emb": ours.configs}, return_module=True)
    assert module is ours.model and list(loader) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_prefetch": -1}, "num_prefetch should be an integer of at least 0 but is: -1"),
        ({"eviction_config": {"type": "lru"}}, "should be one of .'mixed_lru_lfu'. but is: 'lru'"),
        ({"eviction_config": {}}, "but is: None"),
        ({"eviction_config": {"type": "mixed_lru_lfu", "min_used_freq_power": 40}}, "but is: 40"),
        ({"transform_config": {"type": "cuckoo"}}, "but is: 'cuckoo'"),
        ({"ps_config": {"chunk_size": 3}}, "should hold a row of emb.user .16 numbers. but is: 3"),
        ({"ps_config": {"chunks": 3}}, "but has: .'chunks'."),
        ({"data_info": {0: "nowhere"}}, "but has: 'nowhere'"),
        ({"address": "no://x"}, "the scheme of url should be one of .* but is: no"),
        ({"address": "nothing"}, "url should be scheme"),
        ({"address": "redis://h/?color=red"}, "should be one of .* but is: 'color'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(options, text):
    with pytest.raises(ValueError, match=text):
        wrapped([], **options)


def test_a_wrong_path_or_table_is_named():
    ours = trainer(64)
    with pytest.raises(ValueError, match="paths of sharded modules .* but has: 'embeddings'"):
        tde.wrap(url(), [], ours.model, {"embeddings": ours.configs})
    ours.configs[0].name = "visitor"
    with pytest.raises(ValueError, match="but are: .'visitor'."):
        tde.wrap(url(), [], ours.model, {"emb": ours.configs})


def test_save_and_a_second_wrap_refuse_the_wrong_module():
    ours, _ = wrapped([])
    with pytest.raises(ValueError, match="should not be wrapped yet"):
        tde.wrap(url(), [], ours.model, {"emb": ours.configs})
    with pytest.raises(ValueError, match="should be wrapped by tde.wrap but is a plain: Linear"):
        tde.save(torch.nn.Linear(1, 1))


def test_scattered_ids_are_distinct():
    assert len(np.unique(scattered(np.arange(twins.IDS)))) == twins.IDS
