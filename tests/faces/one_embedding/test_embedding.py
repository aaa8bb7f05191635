"""Options, initial values, padding, evaluation, snapshots and state dicts of the modules."""

import copy
import gc
import inspect

import numpy as np
import pytest
import torch

import embstore
import one_embedding as oe


def device_mem(path, capacity=100_000, **options):
    return oe.make_device_mem_store_options(str(path), capacity, **options)


def make(name, store, tables=None, dim=4, key_type=torch.int64, **options):
    return oe.MultiTableEmbedding(name, dim, torch.float, key_type, tables, store, **options)


def train(embedding, steps=3, ids=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding.train()
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randint(0, ids, (31,), generator=generator).to(embedding.key_type)
        (embedding(batch) ** 2).sum().backward()
        optimizer.step()


def test_options_are_the_dicts_of_the_original_and_are_not_changed(tmp_path):
    column = oe.make_column_options(oe.make_normal_initializer(0.0, 0.1))
    assert oe.make_table([column, column]) == {"columns": [column, column]}
    store = oe.make_cached_ssd_store_options(
        16, str(tmp_path), capacity=1000, size_factor=3, host_cache_budget_mb=8
    )
    assert store == {
        "kv_store": {
            "caches": [
                {"policy": "lru", "cache_memory_budget_mb": 16, "value_memory_kind": "device"},
                {"policy": "lru", "cache_memory_budget_mb": 8, "value_memory_kind": "host"},
            ],
            "persistent_table": {
                "path": str(tmp_path),
                "physical_block_size": 4096,
                "capacity_hint": 1000,
            },
        },
        "size_factor": 3,
        "storage_dim": -1,
    }
    tables = [oe.make_table_options([column, column])]
    before = copy.deepcopy((store, tables))
    oe.MultiTableMultiColumnEmbedding("e", [3, 5], torch.float, torch.int64, tables, store)
    assert (store, tables) == before


def test_the_table_of_an_id_chooses_its_initializer(tmp_path):
    tables = [oe.make_table_options(oe.make_constant_initializer(float(i))) for i in range(3)]
    embedding = make("e", device_mem(tmp_path), tables)
    ids = torch.arange(12).view(4, 3)
    wanted = (torch.arange(12) % 3).view(4, 3, 1).expand(4, 3, 4).float()
    assert torch.equal(embedding.eval()(ids), wanted)
    assert torch.equal(embedding.train()(ids), wanted)
    chosen = torch.tensor([2, 0])
    assert torch.equal(embedding(torch.tensor([100, 101]), chosen)[:, 0], chosen.float())
    # The first table that met an id has chosen.
    assert torch.equal(embedding(torch.tensor([100]), torch.tensor([1]))[:, 0], torch.tensor([2.0]))


def test_columns_have_initializers_of_their_own(tmp_path):
    columns = [oe.make_column_options(oe.make_constant_initializer(float(i + 1))) for i in range(2)]
    tables = [oe.make_table_options(columns), oe.make_table_options(oe.make_constant_initializer(9.0))]
    embedding = oe.MultiTableMultiColumnEmbedding(
        "e", [2, 3], torch.float, torch.int64, tables, device_mem(tmp_path)
    )
    out = embedding(torch.tensor([[7, 8]]))
    assert out.shape == (1, 2, 5)
    assert out[0].tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0], [9.0] * 5]


@pytest.mark.parametrize(
    "initializer",
    [
        oe.make_uniform_initializer(-0.5, 0.5),
        oe.make_normal_initializer(1.0, 0.5),
        oe.make_trunc_normal_initializer(0.0, 1.0, -0.5, 1.5),
    ],
)
def test_initial_values_depend_on_seed_and_id_alone(tmp_path, initializer):
    tables = [oe.make_table_options(initializer)]
    a = make("a", device_mem(tmp_path / "a"), tables, seed=1)
    b = make("b", oe.make_cached_ssd_store_options(1, str(tmp_path / "b")), tables * 2, seed=1)
    c = make("c", device_mem(tmp_path / "c"), tables, seed=2)
    ids = torch.randint(-(2**62), 2**62, (500, 2))
    first = a(ids)
    assert torch.equal(b(ids.flip(0)).flip(0), first) and not torch.equal(c(ids), first)
    if initializer["type"] == "trunc_normal":
        assert first.min() >= -0.5 and first.max() <= 1.5
    elif initializer["type"] == "normal":
        assert abs(first.mean() - 1.0) < 0.1 and abs(first.std() - 0.5) < 0.05


def test_evaluation_stores_nothing(tmp_path):
    embedding = make("e", device_mem(tmp_path))
    train(embedding)
    rows = len(embedding.table)
    embedding.eval()
    first = embedding(torch.arange(1000, 1100))
    assert len(embedding.table) == rows and first.std() > 0
    assert torch.equal(embedding.train()(torch.arange(1000, 1100)), first)


def test_the_padding_id_is_zero_gets_no_gradient_and_is_not_stored(tmp_path):
    embedding = make("e", device_mem(tmp_path), padding_idx=0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([[0, 1], [2, 0]])
    out = embedding(ids)
    before = out.detach().clone()
    assert torch.equal(out[0, 0], torch.zeros(4)) and out[0, 1].any()
    (out * 2).sum().backward()
    optimizer.step()
    after = embedding.eval()(ids)
    assert torch.equal(after[0, 0], torch.zeros(4))
    torch.testing.assert_close(after[1, 0], before[1, 0] - 2.0)
    assert not embedding.table.contains([0]).any() and len(embedding.table) == 2
    assert torch.equal(embedding(torch.zeros(0, dtype=torch.int64)), torch.zeros(0, 4))


def test_int32_ids(tmp_path):
    embedding = make("e", device_mem(tmp_path), key_type=torch.int32)
    ids = torch.tensor([-(2**31), -1, 2**31 - 1], dtype=torch.int32)
    train(embedding)
    first = embedding.eval()(ids)
    embedding.save_snapshot("s")
    assert torch.equal(embedding(ids), first)
    with pytest.raises(
        TypeError, match="ids should be a tensor of the key_type torch.int32 but are: torch.int64"
    ):
        embedding(ids.long())


@pytest.mark.parametrize("kind", ["ssd", "device"])
def test_snapshots_and_state_dicts_bring_all_rows_back(tmp_path, kind):
    def store():
        if kind == "ssd":
            return oe.make_cached_ssd_store_options(1, str(tmp_path))
        return device_mem(tmp_path)

    ids = torch.arange(-20, 3000)
    embedding = make("e", store())
    model = torch.nn.ModuleDict({"embedding": embedding, "linear": torch.nn.Linear(4, 1)})
    train(embedding, steps=40, ids=2500)
    embedding.save_snapshot("first")
    first = embedding.eval()(ids)
    train(embedding, steps=10, ids=2500, seed=1)
    second = embedding.eval()(ids)
    state = model.state_dict()
    assert isinstance(state["embedding.OneEmbeddingSnapshot"], str)
    train(embedding, steps=5, ids=2500, seed=2)
    model.load_state_dict(state)
    assert torch.equal(embedding.eval()(ids), second)
    embedding.load_snapshot("first")
    assert torch.equal(embedding.eval()(ids), first)
    del model, embedding
    gc.collect()

    embedding = make("e", store())
    assert len(embedding.table) == len(embedding.store) == 0
    with pytest.raises(FileNotFoundError, match="nothing"):
        embedding.load_snapshot("nothing")
    embedding.load_snapshot("first")
    assert torch.equal(embedding.eval()(ids), first)
    train(embedding, steps=2)


def test_rows_go_from_n_directories_to_m_through_reader_and_writer(tmp_path):
    keys = np.arange(-3000, 3000) * 7919
    values = np.random.default_rng(0).standard_normal((6000, 8)).astype(np.float32)
    paths = {n: [str(tmp_path / f"{n}" / str(i)) for i in range(n)] for n in (1, 2, 3)}
    with oe.make_persistent_table_writer(paths[2], "s", np.int64, np.float32, 8) as writer:
        for part in np.array_split(np.arange(6000), 7):
            writer.write(keys[part], values[part])
    for source, target in ((2, 3), (3, 1)):
        with (
            oe.make_persistent_table_reader(paths[source], "s", np.int64, np.float32, 8) as reader,
            oe.make_persistent_table_writer(paths[target], "s", np.int64, np.float32, 8) as writer,
        ):
            for some_keys, some_values in reader:
                assert some_keys.dtype == np.int64 and len(some_keys) <= 65536
                writer.write(some_keys, some_values)
    for rank, path in enumerate(paths[3]):
        with oe.make_persistent_table_reader(path, "s", np.int64, np.float32, 8) as reader:
            for some_keys, _ in reader:
                assert (embstore.owner(some_keys, 3, embstore.Ownership.XXH64) == rank).all()
    with oe.make_persistent_table_reader(paths[1], "s", np.int64, np.float32, 8) as reader:
        blocks = list(reader)
    found = np.concatenate([k for k, _ in blocks])
    order = np.argsort(found)
    np.testing.assert_array_equal(found[order], keys)
    np.testing.assert_array_equal(np.concatenate([v for _, v in blocks])[order], values)


def test_a_snapshot_that_a_writer_made_trains_on(tmp_path):
    with oe.make_persistent_table_writer([str(tmp_path / "0-1")], "s", np.int64, np.float32, 4) as writer:
        writer.write(np.arange(10), np.full((10, 4), 3.0, np.float32))
    embedding = make("e", device_mem(tmp_path))
    embedding.load_snapshot("s")
    assert torch.equal(embedding.eval()(torch.arange(10)), torch.full((10, 4), 3.0))
    train(embedding)


def test_reader_and_writer_refuse_what_does_not_fit(tmp_path):
    path = str(tmp_path / "t")
    with pytest.raises(FileNotFoundError):
        oe.make_persistent_table_reader(path, "s", np.int64, np.float32, 4)
    with pytest.raises(ValueError, match="value_type should be float32 but is: float64"):
        oe.make_persistent_table_writer(path, "s", np.int64, np.float64, 4)
    with pytest.raises(ValueError, match="key_type should be int64 or int32 but is: uint8"):
        oe.make_persistent_table_writer(path, "s", np.uint8, np.float32, 4)
    with oe.make_persistent_table_writer(path, "s", np.int64, np.float32, 4) as writer:
        with pytest.raises(ValueError, match="keys should be a 1-D array of int64 but are: int32"):
            writer.write(np.arange(3, dtype=np.int32), np.zeros((3, 4), np.float32))
        with pytest.raises(
            ValueError, match=r"values should be .* \(3, 4\) but are: float32 of the shape \(3, 5\)"
        ):
            writer.write(np.arange(3), np.zeros((3, 5), np.float32))
    with pytest.raises(ValueError, match="VALUE_SIZE 16 but is opened with: 32"):
        oe.make_persistent_table_reader(path, "s", np.int64, np.float32, 8)
    with pytest.raises(FileNotFoundError, match="has no snapshot 'other'"):
        oe.make_persistent_table_reader(path, "other", np.int64, np.float32, 4)
    with (
        pytest.raises(ZeroDivisionError),
        oe.make_persistent_table_writer(path, "half", np.int64, np.float32, 4),
    ):
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError, match="has no snapshot 'half'"):
        oe.make_persistent_table_reader(path, "half", np.int64, np.float32, 4)


def test_the_capacity_of_a_cached_ssd_store_is_a_hint(tmp_path):
    store = oe.make_cached_ssd_store_options(1, str(tmp_path), capacity=100)
    embedding = make("e", store, dim=8)
    for start in range(0, 50_000, 10_000):  # a cache of 1 MB holds 32,768
        embedding(torch.arange(start, start + 10_000))
    embedding.save_snapshot("s")
    assert len(embedding.store) == 50_000


@pytest.mark.parametrize("kind", ["device", "ssd"])
def test_snapshots_hold_rows_that_were_looked_up_in_training_and_not_updated(tmp_path, kind):
    store = device_mem(tmp_path) if kind == "device" else oe.make_cached_ssd_store_options(1, str(tmp_path))
    tables = [oe.make_table_options(oe.make_constant_initializer(float(i))) for i in range(2)]
    embedding = make("e", store, tables)
    ids = torch.arange(97)
    embedding(ids, ids % 2)
    embedding.eval()(torch.arange(200, 300), torch.zeros(100, dtype=torch.int64))
    embedding.save_snapshot("s")
    embedding.close()
    folder = str(tmp_path / "0-1")
    with oe.make_persistent_table_reader([folder], "s", torch.int64, torch.float32, 4) as reader:
        blocks = list(reader)
    found = {int(k): v.tolist() for keys, values in blocks for k, v in zip(keys, values)}
    assert found == {i: [float(i % 2)] * 4 for i in range(97)}


def test_a_memory_store_that_is_full_raises_and_keeps_the_rows(tmp_path):
    embedding = make("e", device_mem(tmp_path, 100))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.arange(100)).sum().backward()
    optimizer.step()
    before = embedding.eval()(torch.arange(100))
    embedding.train()
    embedding(torch.arange(100))
    with pytest.raises(
        RuntimeError, match="embedding 'e' is full: it holds 100 of 100 rows and was given 2 new"
    ):
        embedding(torch.arange(98, 102))
    assert torch.equal(embedding.eval()(torch.arange(100)), before)


def test_misuse_is_refused_with_the_argument_and_its_value(tmp_path):
    store = device_mem(tmp_path)
    embedding = make("e", store, [oe.make_table(oe.make_uniform_initializer())] * 2)
    with pytest.raises(ValueError, match="an embedding named 'e' already exists"):
        make("e", device_mem(tmp_path / "other"))
    with pytest.raises(OSError, match="is locked"):
        make("f", store)
    with pytest.raises(ValueError, match="dtype should be torch.float32 but is: torch.float16"):
        oe.MultiTableEmbedding("g", 4, torch.half, torch.int64, None, store)
    with pytest.raises(ValueError, match="embedding_dim should be an integer but is: "):
        oe.MultiTableEmbedding("g", [4], torch.float, torch.int64, None, store)
    with pytest.raises(ValueError, match="key_type should be torch.int64 or torch.int32 but is: torch.int8"):
        make("g", store, key_type=torch.int8)
    with pytest.raises(ValueError, match="param must be initializer or columns"):
        oe.make_table_options(3)
    with pytest.raises(ValueError, match="physical_block_size should be 512 or 4096 but is: 1024"):
        device_mem(tmp_path, physical_block_size=1024)
    with pytest.raises(ValueError, match="cache_budget_mb or host_cache_budget_mb should be above 0"):
        oe.make_cached_ssd_store_options(0, str(tmp_path))
    with pytest.raises(ValueError, match="storage_dim should be at least embedding_dim"):
        make("g", device_mem(tmp_path, storage_dim=3))
    with pytest.raises(ValueError, match=r"ids should have a last dimension of 2 .* the shape: \(3,\)"):
        embedding(torch.arange(3))
    with pytest.raises(ValueError, match=r"table_ids should have the shape \(2,\) of ids but have: \(3,\)"):
        embedding(torch.arange(2), torch.arange(3))
    with pytest.raises(ValueError, match="table_ids should be between 0 and 1 but one is: 2"):
        embedding(torch.arange(2), torch.tensor([0, 2]))
    with pytest.raises(
        TypeError, match="ids should be a tensor of the key_type torch.int64 but are: torch.int32"
    ):
        embedding(torch.arange(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="ids should have data but their device is: meta"):
        embedding(torch.arange(2, device="meta"))
    assert len(embedding.table) == 0


def test_module_methods_return_the_module_also_while_gradients_are_pending(tmp_path):
    embedding = make("e", device_mem(tmp_path))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([1, 2])
    before = embedding(ids).detach().clone()
    embedding(ids).sum().backward()
    for change in (embedding.to, embedding.cpu, embedding.double, embedding.half, embedding.float):
        assert (change("cpu") if change == embedding.to else change()) is embedding
    optimizer.step()
    torch.testing.assert_close(embedding.eval()(ids), before - 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_vectors_come_in_the_dtype_that_the_module_was_converted_to(tmp_path, dtype):
    embedding = make("e", device_mem(tmp_path), padding_idx=0).to(dtype)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 1).to(dtype))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([0, 1, 1, 2])
    first = embedding(ids)
    assert first.dtype == dtype
    before = embedding.table.find(ids)[0]
    model(ids).sum().backward()
    optimizer.step()
    gradient = model[1].weight.detach().float() * torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    torch.testing.assert_close(embedding.table.find(ids)[0], before - gradient)
    with pytest.raises(TypeError, match="dtype should be one of floating point .* but is: torch.int32"):
        embedding.type(torch.int32)


def test_dtypes_may_be_of_torch_or_numpy_or_names(tmp_path):
    keys, values = np.arange(5), np.ones((5, 4), np.float32)
    for number, kinds in enumerate(
        [
            (torch.int64, torch.float32),
            (np.int64, np.float32),
            ("int64", "float32"),
            (torch.long, torch.float),
        ]
    ):
        path = str(tmp_path / str(number) / "0-1")
        with oe.make_persistent_table_writer([path], "s", *kinds, 4) as writer:
            writer.write(keys, values)
        with oe.make_persistent_table_reader([path], "s", *kinds, 4) as reader:
            ((found, _),) = list(reader)
        assert found.dtype == np.int64 and sorted(found) == list(range(5))
        embedding = oe.MultiTableEmbedding(
            f"e{number}", 4, kinds[1], kinds[0], None, device_mem(tmp_path / str(number))
        )
        embedding.load_snapshot("s")
        assert embedding(torch.arange(5)).eq(1.0).all()
    with pytest.raises(TypeError, match="key_type should be a dtype of torch or numpy, .* but is: 'ints'"):
        oe.make_persistent_table_writer(path, "s", "ints", torch.float32, 4)


def test_the_signatures_of_both_classes_are_the_same_to_help():
    ours, theirs = (
        list(inspect.signature(kind).parameters)
        for kind in (oe.MultiTableEmbedding, oe.MultiTableMultiColumnEmbedding)
    )
    assert ours == theirs
    assert ours[:4] == ["name", "embedding_dim", "dtype", "key_type"] and ours[-1] == "seed"


def test_a_frozen_embedding_reads_initial_values_and_changes_nothing(tmp_path):
    embedding = make("e", device_mem(tmp_path))
    train(embedding)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(40, 60)  # some of them new
    expected, rows = embedding.eval()(ids), len(embedding.table)
    model.train()
    embedding.requires_grad_(False)
    optimizer.zero_grad()
    assert not embedding(ids).requires_grad
    model(ids).sum().backward()
    optimizer.step()
    assert torch.equal(embedding(ids), expected) and len(embedding.table) == rows
    embedding.requires_grad_(True)
    model(ids).sum().backward()
    optimizer.step()
    assert not torch.equal(embedding(ids), expected)


@pytest.mark.parametrize("order", ["optimizer first", "load first"])
def test_rows_train_after_a_state_dict_was_assigned(tmp_path, order):
    embedding = make("e", device_mem(tmp_path))
    train(embedding)
    state = embedding.state_dict()
    if order == "optimizer first":
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding.load_state_dict(state, assign=True)
    if order == "load first":
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([1, 2])
    before = embedding(ids).detach().clone()
    embedding(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding.eval()(ids), before - 1.0)
