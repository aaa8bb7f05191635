"""`BatchedDynamicEmbeddingTablesV2` and what it offers beside its forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faces.dynamicemb.small_tables import CPU, LFU, QUARTER, STEP, Strategy, options, tables, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

import embstore
from dynamicemb import DynamicEmbDump, DynamicEmbPoolingMode, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2 as Tables
from dynamicemb.dump_load import get_dynamic_emb_module
from dynamicemb.optimizer import AdamDynamicEmbeddingOptimizer
from dynamicemb.types import Cache, CopyMode, Storage
from embstore.stores import MemoryStore, row_bytes

NONE = DynamicEmbPoolingMode.NONE


def _rows(module: Any, name: str = "t0") -> embstore.Rows:
    return module.dynamic_tables[name].table.rows()


def _bags(*keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(keys), torch.arange(len(keys) + 1)


def test_positions_are_those_of_the_current_package() -> None:
    module = Tables(
        [options()],
        ["user"],
        [0],
        False,
        True,
        NONE,
        torch.float32,
        None,
        False,
        None,
        EmbOptimType.ADAM,
        True,
        False,
        1.0,
        0.0,
        0.5,
        1e-6,
    )
    assert module.enable_prefetch and module.pooling_mode == NONE and module.table_names == ["user"]
    assert isinstance(module.optimizer, AdamDynamicEmbeddingOptimizer)
    args = module.optimizer.get_opt_args()
    assert (args["lr"], args["eps"], args["opt_type"]) == (0.5, 1e-6, "adam")
    assert (module.optimizer.get_state_dim(4), module.optimizer.get_ckpt_state_dim(4)) == (8, 8)
    module.set_learning_rate(0.25)
    assert module.optimizer.get_opt_args()["lr"] == 0.25
    with pytest.raises(TypeError, match="given twice: ..learning_rate"):
        Tables([options()], *[None] * 3, False, NONE, torch.float32, None, False, None, EmbOptimType.SGD,
               True, False, 1.0, 0.0, 0.5, learning_rate=1.0)  # fmt: skip
    Tables([options()], weight_decay_mode=WeightDecayMode.NONE)
    with pytest.raises(ValueError, match="weight_decay_mode"):
        Tables([options()], weight_decay_mode=WeightDecayMode.L2)


def test_counts_of_occurrences_reach_scores_and_admission() -> None:
    strategy = FrequencyAdmissionStrategy(3)
    module = Tables(
        [options(score_strategy=LFU), options(admit_strategy=strategy, admission_counter=KVCounter(64))],
        pooling_mode=NONE,
        learning_rate=0.5,
    )
    out = module(torch.tensor([7, 9, 7, 9]), torch.tensor([0, 2, 4]), torch.tensor([2.0, 1.0, 3.0, 2.0]))
    assert out.shape == (4, 4)
    out.sum().backward()
    assert _rows(module).scores.tolist() == [2, 1] and _rows(module, "t1").keys.tolist() == [7]
    assert _rows(module).values[:, 0].tolist() == [-0.25, -0.25], (
        "one gradient each, however often it occurred"
    )


def test_a_frozen_table_makes_rows_that_never_move() -> None:
    module = Tables([options()], learning_rate=0.0)
    for _ in range(3):
        train(module, 7, -1)
    assert _rows(module).keys.tolist() == [-1, 7] and (_rows(module).values == 0.25).all()


# ---- files and rows


def test_a_folder_of_its_own_is_written_and_read_without_torch_distributed(tmp_path: Path) -> None:
    def build() -> Tables:
        admitted = FrequencyAdmissionStrategy(2)
        return Tables(
            [options(score_strategy=STEP), options(admit_strategy=admitted, admission_counter=KVCounter(64))],
            optimizer=EmbOptimType.ADAM,
        )

    module = build()
    module(torch.tensor([7, 9, 5]), torch.tensor([0, 2, 3])).sum().backward()
    folder = tmp_path / "here"
    module.dump(str(folder), optim=True, counter=True)
    tail = ".rank_0.world_size_1"
    names = {path.name for path in folder.iterdir()}
    assert {f"t0_emb_keys{tail}", f"t1_counter_keys{tail}", f"t0_emb_opt_values{tail}"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    again = build()
    again.load(str(folder), optim=True, counter=True)
    for twin in (module, again):
        twin(torch.tensor([7, 5]), torch.tensor([0, 1, 2])).sum().backward()
    for name in ("t0", "t1"):
        assert _rows(again, name).values.tobytes() == _rows(module, name).values.tobytes()
    assert _rows(again, "t1").keys.tolist() == [5] and again.get_score()["t0"] == 3
    with pytest.raises(ValueError, match="save_dir should be a new or an empty folder"):
        module.dump(str(folder))
    with pytest.raises(ValueError, match="some are not: ..nobody"):
        module.load(str(folder), table_names=["nobody"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        module.load(str(tmp_path / "nowhere"))


def test_serving_reads_the_folder_of_a_collection_in_a_dump(tmp_path: Path) -> None:
    trained = tables(options(), options(), optimizer=EmbOptimType.ADAM)
    trained(torch.tensor([7, 9]), torch.tensor([0, 1, 2])).sum().backward()
    DynamicEmbDump(str(tmp_path / "d"), torch.nn.ModuleDict({"ec": trained}), optim=True, counter=True)
    serving = Tables([options(training=False)], ["t1"], pooling_mode=NONE).eval()
    serving.load(str(tmp_path / "d" / "model.ec"), optim=False, table_names=["t1"])
    assert serving(*_bags(9, 7)).tolist() == [_rows(trained, "t1").values[0].tolist(), [0.0] * 4]


def test_rows_are_exported_inserted_and_filled() -> None:
    module = Tables([options(), options(dim=4, max_capacity=256)], optimizer=EmbOptimType.EXACT_ADAGRAD)
    keys, values = module.export_keys_values("t0", CPU)
    assert keys.shape == (0,) and values.shape == (0, 4), "an empty table can be concatenated"
    storage = module.tables
    assert isinstance(storage, Storage) and storage.embedding_dims() == [4, 4] and storage.all_dims_vec4()
    rows = torch.arange(16.0).reshape(2, 8)
    storage.insert(torch.tensor([7, 9]), torch.tensor([0, 1]), rows, torch.tensor([5, 6]))
    found = storage.find(torch.tensor([7, 9]), torch.tensor([0, 1]), CopyMode.VALUE)
    assert found[0] == 0 and found[6].tolist() == [5, 6] and torch.equal(found[7], rows)
    storage.insert(torch.tensor([7]), torch.tensor([0]), rows[:1] + 1, preserve_existing=True)
    again = storage.find(torch.tensor([7]), torch.tensor([0]), CopyMode.VALUE)
    assert again[6].tolist() == [5] and torch.equal(again[7], rows[:1] + 1), "the score stays"
    with pytest.raises(ValueError, match="values should be"):
        storage.insert(torch.tensor([7]), torch.tensor([0]), rows[:, :3])
    keys, values = module.export_keys_values("t0", CPU)
    assert keys.tolist() == [7] and values.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    module.fill_tables(load_factor=7.0)
    for table in module.dynamic_tables.values():
        full = len(table.table) / table.options.max_capacity
        assert 0.94 < full <= 1.0 and (table.table.rows().keys >= 0).all()
    assert (_rows(module, "t1").values[1:] == 0.25).sum() > 200, "with their initial vectors"
    with pytest.raises(ValueError, match="load_factor"):
        module.fill_tables(-0.1)


def test_a_storage_writes_and_reads_the_files_of_one_table(tmp_path: Path) -> None:
    module = Tables([options(score_strategy=STEP)], optimizer=EmbOptimType.EXACT_ADAGRAD)
    train(module, 7, 9)
    files = [str(tmp_path / name) for name in ("meta", "keys", "values", "scores", "opt")]
    module.tables.dump(0, *files, include_optim=True, include_meta=True, current_score=41, timestamp=0)
    other = Tables([options(score_strategy=STEP)], optimizer=EmbOptimType.EXACT_ADAGRAD)
    assert other.tables.load(0, *files, include_optim=True, timestamp=0) == 41
    for field in ("keys", "values", "states", "scores"):
        assert getattr(_rows(other), field).tobytes() == getattr(_rows(module), field).tobytes()


def test_increments_are_flat_by_table() -> None:
    module = Tables([options(score_strategy=STEP), options(score_strategy=LFU)])
    module(torch.tensor([7, 9]), torch.tensor([0, 1, 2])).sum().backward()
    with pytest.warns(UserWarning, match="no table 'other'"):
        rows, scores = module.incremental_dump({"t0": 1, "other": 0})
    assert list(rows) == ["t0"] and rows["t0"][0].tolist() == [7] and scores == {"t0": 2}
    rows, _ = module.incremental_dump(scores)
    assert rows["t0"][1].shape == (0, 4)
    assert module.get_score() == {"t0": 2, "t1": 1}


def test_the_view_of_a_module_is_the_module_itself() -> None:
    module = Tables([options(score_strategy=Strategy.CUSTOMIZED)])
    assert get_dynamic_emb_module(torch.nn.Sequential(module))[0] is module
    module.set_score({"t0": 5})
    assert module.get_score() == {"t0": 5}
    with pytest.raises(ValueError, match="some are not: ..t1"):
        module.set_score({"t1": 5})


# ---- prefetch


@pytest.mark.parametrize("pooling", list(DynamicEmbPoolingMode))
@pytest.mark.parametrize("strategy", [STEP, LFU])
def test_a_prefetched_training_equals_one_without(pooling: DynamicEmbPoolingMode, strategy: Any) -> None:
    def build(ahead: bool) -> Tables:
        admitted = options(
            score_strategy=strategy, admit_strategy=FrequencyAdmissionStrategy(2), initializer_args=QUARTER
        )
        return Tables(
            [options(score_strategy=strategy), admitted],
            pooling_mode=pooling,
            prefetch_pipeline=ahead,
            learning_rate=0.5,
        )

    plain, ahead = build(False), build(True)
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(6):
        lengths = torch.randint(0, 4, (2 * 5,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        batches.append((torch.randint(0, 9, (int(offsets[-1]),), generator=generator), offsets))
    ahead.prefetch(*batches[0])
    for number, batch in enumerate(batches):
        if number + 1 < len(batches):
            ahead.prefetch(*batches[number + 1])
        outs = [module(*batch) for module in (plain, ahead)]
        for out in outs:
            (out * out.detach().cos()).sum().backward()
        if number == 0:  # later ones count one batch earlier, so a key may get its row earlier
            assert torch.equal(*outs)
    assert _rows(ahead).values.tobytes() == _rows(plain).values.tobytes()
    assert _rows(ahead).scores.tolist() == _rows(plain).scores.tolist()
    assert _rows(ahead, "t1").keys.tolist() == _rows(plain, "t1").keys.tolist()
    assert ahead.get_score() == plain.get_score()


def test_a_forward_of_another_batch_than_the_oldest_is_refused() -> None:
    module = Tables([options()], prefetch_pipeline=True)
    module.prefetch(*_bags(7))
    assert _rows(module).keys.tolist() == [7], "it is inserted now"
    with pytest.raises(ValueError, match="indices should be those of the oldest prefetch"):
        module(*_bags(9))
    assert _rows(module).keys.tolist() == [7]
    module.eval()(*_bags(9))
    module.prefetch(*_bags(11))
    assert _rows(module).keys.tolist() == [7], "in eval it does nothing"
    module.train()(*_bags(7)).sum().backward()
    module.enable_prefetch = False
    module.prefetch(*_bags(13))
    module(*_bags(15)).sum().backward()
    assert _rows(module).keys.tolist() == [7, 15]


def test_rows_in_flight_are_not_evicted() -> None:
    module = Tables([options(max_capacity=128)], prefetch_pipeline=True, learning_rate=0.5)
    first = torch.arange(64)
    module.prefetch(first, torch.arange(65))
    for start in range(1000, 2000, 50):
        module.prefetch(torch.arange(start, start + 50), torch.arange(51))
        module._queue.pop()  # as if its forward had come
    module(first, torch.arange(65)).sum().backward()
    rows = _rows(module)
    kept = {key: row for key, row in zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True)}
    assert all(kept[key] == -0.25 for key in range(64))


# ---- a cache over a store


def test_a_cache_counts_keys_hits_insertions_and_evictions() -> None:
    def store(made: embstore.TableOptions, rank: int) -> MemoryStore:
        return MemoryStore(row_bytes(made.dim, made.optimizer, made.dtype))

    budget = 128 * 4 * 4
    module = Tables(
        [options(caching=True, external_storage=store, local_hbm_for_values=budget)], learning_rate=0.5
    )
    assert isinstance(module.cache, Cache) and module.cache.cache_metrics is None
    module.set_record_cache_metrics(True)
    generator = np.random.default_rng(3)
    known: set[int] = set()
    for _ in range(20):
        keys = generator.integers(0, 400, 60)
        module(torch.from_numpy(keys), torch.arange(61)).sum().backward()
        metrics = module.cache.cache_metrics
        assert metrics is not None and metrics.shape == (10,) and metrics.dtype == torch.int64
        distinct, hits, inserted, _ = metrics[:4].tolist()
        assert distinct == len(set(keys.tolist())) == hits + inserted
        if not known:
            assert hits == 0
        known |= set(keys.tolist())
    assert int(metrics[3]) > 0, "more keys than the cache holds"
    with pytest.raises(TypeError, match="in a store"):
        module.fill_tables()
    module.set_record_cache_metrics(False)
    assert module.cache.cache_metrics is None
    assert Tables([options()]).cache is None


def test_keys_without_a_row_train_and_read_a_shared_row() -> None:
    module = tables(options(max_capacity=128, score_strategy=LFU, admission="frequency", shared_rows=1))
    train(module, *range(128), *range(128))
    train(module, *range(1000, 1010))
    (dynamic,) = module.dynamic_tables.values()
    table = dynamic.table
    assert len(table) == 128 and len(table.shared_rows()) == 1
    module.eval()
    (expected,) = table.shared_rows().values
    keys = torch.tensor([5000, 5001])
    vectors = module(keys, torch.tensor([0, 1, 2]))
    assert vectors.tolist() == [expected.tolist()] * 2
