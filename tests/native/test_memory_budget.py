"""`memory_budget` of a collection: tables share it, and it moves to where rows find most ids."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import embstore  # noqa: E402
from embstore.nn.memory_budget import MemoryBudget, _concave, split_equally  # noqa: E402


def options(name, **keywords):
    return embstore.TableOptions(
        name=name, dim=8, seed=1, bucket_capacity=16, score_strategy="step", **keywords
    )


def bytes_of(collection):
    return sum(table.stats().bytes for table in collection.tables.values())


def collection_of(budget=200_000, every=10, **keywords):
    collection = embstore.EmbeddingCollection(
        [options("user"), options("item")], memory_budget=budget, **keywords
    )
    collection.budget.every = every
    return collection


def train(collection, batches, users, items, seed=0):
    """Ids with a long tail, of so many users and items."""
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids = {
            name: torch.from_numpy((n ** rng.random(200)).astype(np.int64))
            for name, n in (("user", users), ("item", items))
        }
        out = collection(ids)
        (out["user"].sum() + out["item"].sum()).backward()


def test_tables_begin_with_equal_shares_that_fill_the_budget():
    collection = collection_of()
    users, items = (table.options.max_capacity for table in collection.tables.values())
    assert users == items
    assert 0.9 * 200_000 < collection.budget.needed_bytes() <= 200_000


def test_a_table_that_wants_less_leaves_the_rest_to_the_others():
    small, large = split_equally([options("a", max_capacity=64), options("b")], 200_000)
    assert small.max_capacity == 64
    rest = 200_000 - small.full_bytes(64)
    assert large.full_bytes(large.max_capacity) <= rest < large.full_bytes(large.max_capacity + 16)


def test_rows_move_to_the_table_that_finds_more_with_them():
    collection = collection_of()
    train(collection, 100, users=100, items=20_000)
    users, items = (table.options.max_capacity for table in collection.tables.values())
    assert users < 250 < 900 < items
    assert collection.budget.needed_bytes() <= 200_000


def test_they_move_back_when_the_stream_drifts():
    collection = collection_of()
    train(collection, 100, users=100, items=20_000)
    train(collection, 200, users=20_000, items=100, seed=1)
    users, items = (table.options.max_capacity for table in collection.tables.values())
    assert items < 250 < 900 < users


def test_the_memory_of_the_tables_never_exceeds_the_budget():
    collection = collection_of(every=3)
    for step in range(60):
        train(collection, 1, *((50, 30_000) if step // 20 % 2 else (30_000, 50)), seed=step)
        assert bytes_of(collection) <= 200_000


def test_a_shared_budget_finds_more_than_equal_shares():
    def found(every):
        collection = collection_of(every=every)
        train(collection, 150, users=100, items=20_000)
        before = [table.stats().hits for table in collection.tables.values()]
        train(collection, 50, users=100, items=20_000, seed=9)
        return sum(t.stats().hits - b for t, b in zip(collection.tables.values(), before))

    assert found(every=10) > 1.03 * found(every=10**9)


def test_the_same_stream_gives_the_same_shares_for_any_number_of_threads():
    def shares(threads):
        embstore.set_num_threads(threads)
        collection = collection_of()
        train(collection, 60, users=500, items=20_000)
        return [(t.options.max_capacity, t.rows().values.tobytes()) for t in collection.tables.values()]

    before = embstore.get_num_threads()
    try:
        assert shares(1) == shares(4)
    finally:
        embstore.set_num_threads(before)


def test_nothing_moves_while_every_table_has_room():
    collection = collection_of(budget=2_000_000)
    before = [table.options.max_capacity for table in collection.tables.values()]
    train(collection, 50, users=100, items=500)
    assert [table.options.max_capacity for table in collection.tables.values()] == before


def test_a_limit_of_its_own_is_kept():
    collection = embstore.EmbeddingCollection(
        [options("user"), options("item", max_capacity=512)], memory_budget=200_000
    )
    collection.budget.every = 5
    train(collection, 100, users=100, items=20_000)
    assert collection.tables["item"].options.max_capacity <= 512


def test_evaluation_moves_nothing():
    collection = collection_of(every=1)
    train(collection, 30, users=100, items=20_000)
    before = [table.options.max_capacity for table in collection.tables.values()]
    collection.eval()
    for _ in range(20):
        collection({"user": torch.arange(100), "item": torch.arange(1000)})
    assert [table.options.max_capacity for table in collection.tables.values()] == before


def test_bags_share_a_budget_too():
    collection = embstore.EmbeddingBagCollection([options("user"), options("item")], memory_budget=200_000)
    collection.budget.every = 5
    rng = np.random.default_rng(0)
    for _ in range(60):
        out = collection(
            {
                "user": (torch.from_numpy(rng.integers(0, 50, 64)), torch.arange(0, 64, 2)),
                "item": (
                    torch.from_numpy((20_000 ** rng.random(300)).astype(np.int64)),
                    torch.arange(0, 300, 5),
                ),
            }
        )
        (out["user"].sum() + out["item"].sum()).backward()
    assert collection.tables["user"].options.max_capacity < collection.tables["item"].options.max_capacity


def test_a_state_of_other_shares_is_loaded():
    trained, fresh = collection_of(), collection_of()
    train(trained, 100, users=100, items=20_000)
    fresh.load_state_dict(trained.state_dict())
    for name, table in trained.tables.items():
        assert np.array_equal(fresh.tables[name].rows().values, table.rows().values)
    assert fresh.budget.needed_bytes() <= 200_000


def test_copies_and_loads_go_on_moving(tmp_path):
    trained = collection_of()
    train(trained, 60, users=100, items=20_000)
    copied = copy.deepcopy(trained)
    embstore.dump(tmp_path / "dump", {"model": dict(trained.tables)})
    embstore.load(tmp_path / "dump", {"model": dict(trained.tables)})
    for collection in (copied, trained):
        train(collection, 250, users=20_000, items=100, seed=1)
        users, items = (table.options.max_capacity for table in collection.tables.values())
        assert items < 400 < 800 < users
        assert collection.budget.needed_bytes() <= 200_000


@pytest.mark.parametrize("budget", [0, -1, 100, 1.5, "1GB", True])
def test_budgets_that_hold_nothing_are_refused(budget):
    with pytest.raises(ValueError, match="memory_budget"):
        collection_of(budget=budget)


def test_a_budget_needs_tables_that_it_may_limit():
    with pytest.raises(ValueError, match="memory_budget"):
        embstore.EmbeddingCollection([embstore.Table("t", dim=8)], memory_budget=10**6)
    with pytest.raises(ValueError, match="memory_budget"):
        collection_of(device_rows=64)
    forever = embstore.TableOptions(name="t", dim=8, score_strategy="no_eviction")
    with pytest.raises(ValueError, match="memory_budget.*'t'"):
        embstore.EmbeddingCollection([forever], memory_budget=10**6)


def test_a_plateau_does_not_hide_the_rise_behind_it():
    curve = np.array([0.0, 5, 5, 5, 11, 12, 12])
    assert np.allclose(_concave(curve), [0, 5, 7, 9, 11, 12, 12])


def test_one_table_alone_gets_everything():
    collection = embstore.EmbeddingCollection([options("user")], memory_budget=100_000)
    collection.budget.every = 5
    rng = np.random.default_rng(0)
    for _ in range(30):
        collection({"user": torch.from_numpy(rng.integers(0, 5000, 300))})["user"].sum().backward()
    assert 0.85 * 100_000 < collection.budget.needed_bytes() <= 100_000
    assert isinstance(collection.budget, MemoryBudget)
