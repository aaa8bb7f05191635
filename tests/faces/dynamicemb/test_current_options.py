"""Options of tables as today's clients write them: scores, bytes, training=False, admission."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faces.dynamicemb.small_tables import (
    LFU,
    QUARTER,
    STEP,
    TIMESTAMP,
    Mode,
    Strategy,
    options,
    tables,
    train,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import embstore
from dynamicemb import (
    MAX_BUCKET_CAPACITY,
    AdmissionStrategy,
    Counter,
    DynamicEmbDump,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbLoad,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.dynamicemb_config import (
    get_eviction_score_strategy,
    get_physical_score_order,
    normalize_score_strategy,
    score_dump_permutation,
    score_load_permutation,
    score_strategy_has_timestamp_column,
)
from dynamicemb.embedding_admission import MultiTableKVCounter
from dynamicemb.incremental_dump import get_score, incremental_dump
from dynamicemb.initializer import create_initializer_from_args
from dynamicemb.types import MemoryType

# ---- score strategies


@pytest.mark.parametrize(
    ("given", "normal", "evicts_by", "timed", "dump", "load"),
    [
        (None, None, None, False, [], []),
        (STEP, STEP, STEP, False, [0], [0]),
        ((LFU,), LFU, LFU, False, [0], [0]),
        (TIMESTAMP, TIMESTAMP, TIMESTAMP, True, [0], [0]),
        ((TIMESTAMP, LFU), (TIMESTAMP, LFU), LFU, True, [0, 1], [0, 1]),
        ((LFU, TIMESTAMP), (LFU, TIMESTAMP), LFU, True, [1, 0], [1, 0]),
    ],
)
def test_a_score_strategy_has_one_normal_form(
    given: Any, normal: Any, evicts_by: Any, timed: bool, dump: list[int], load: list[int]
) -> None:
    assert normalize_score_strategy(given) == normal
    assert get_eviction_score_strategy(given) == evicts_by
    assert score_strategy_has_timestamp_column(given) is timed
    assert (score_dump_permutation(given), score_load_permutation(given)) == (dump, load)
    if isinstance(normal, tuple):
        assert get_physical_score_order(given) == (TIMESTAMP, LFU)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((), NotImplementedError),
        ((LFU, LFU), NotImplementedError),
        ((STEP, LFU), NotImplementedError),
        (1, TypeError),
        ("LFU", TypeError),
        ((1, LFU), TypeError),
        ([LFU], TypeError),
    ],
)
def test_other_score_strategies_are_refused(given: Any, error: type[Exception]) -> None:
    for use in (normalize_score_strategy, lambda s: DynamicEmbTableOptions(score_strategy=s)):
        with pytest.raises(error, match="score_strategy"):
            use(given)


def test_a_table_takes_none_a_tuple_of_one_and_a_compound() -> None:
    assert options(score_strategy=None).engine_strategy == embstore.ScoreStrategy.TIMESTAMP
    assert options(score_strategy=(LFU,)).engine_strategy == embstore.ScoreStrategy.LFU
    compound = options(score_strategy=(LFU, TIMESTAMP))
    assert compound.engine_strategy == embstore.ScoreStrategy.TIMESTAMP
    assert compound.evicts_least_used and compound.score_words == ("lfu", "timestamp")


def test_every_table_has_a_score_and_it_is_a_threshold() -> None:
    module = tables(*(options(score_strategy=s) for s in Strategy if s != Strategy.CUSTOMIZED))
    names = [s.name for s in Strategy if s != Strategy.CUSTOMIZED]
    scores = dict(zip(names, (get_score(module) or {})["model"].values(), strict=True))
    assert (scores["STEP"], scores["LFU"]) == (1, 1) and min(
        scores["TIMESTAMP"], scores["NO_EVICTION"]
    ) > 1 << 60
    module(torch.arange(5), torch.arange(6)).sum().backward()
    answer = incremental_dump(module, get_score(module) or {})
    assert answer is not None
    rows, after = answer
    assert rows["model"]["t2"][0].tolist() == [2] and after["model"]["t2"] == 1, "LFU: every row"
    assert rows["model"]["t0"][0].tolist() == [] and after["model"]["t1"] == 2
    assert (get_score(tables(options(score_strategy=LFU))) or {}) == {"model": {"t0": 1}}


# ---- options


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), float("inf"), True, "1", None])
def test_bytes_of_memory_are_finite_numbers(bad: Any) -> None:
    for name in ("global_hbm_for_values", "local_hbm_for_values"):
        with pytest.raises(ValueError, match=f"{name} should be"):
            DynamicEmbTableOptions(**{name: bad})


def test_the_bytes_of_a_rank_are_rounded_up() -> None:
    made = DynamicEmbTableOptions(global_hbm_for_values=7.5)
    planned = made.planned(num_embeddings=97, dim=3, world=2, dtype=torch.float16)
    assert planned.local_hbm_for_values == 4 and planned.embedding_dtype == torch.float16
    exact = DynamicEmbTableOptions(global_hbm_for_values=2**62 + 1)
    assert (
        exact.planned(num_embeddings=1, dim=1, world=1, dtype=torch.float32).local_hbm_for_values == 2**62 + 1
    )


def test_the_grouped_key_has_what_the_original_groups_by() -> None:
    strategy = FrequencyAdmissionStrategy(300, QUARTER)
    made = DynamicEmbTableOptions(
        training=False, score_strategy=STEP, dist_type="hash_roundrobin", admit_strategy=strategy
    )
    assert made.get_grouped_key() == {
        "training": False,
        "caching": False,
        "external_storage": None,
        "index_type": None,
        "dist_type": "hash_roundrobin",
        "score_strategy": STEP,
        "admit_strategy": strategy,
    }


@pytest.mark.parametrize("pooling", [DynamicEmbPoolingMode.SUM, DynamicEmbPoolingMode.NONE])
def test_a_missing_key_in_eval_reads_the_constant_of_its_table(pooling: DynamicEmbPoolingMode) -> None:
    with pytest.raises(ValueError, match="eval_initializer_args should be"):
        options(eval_initializer_args=DynamicEmbInitializerArgs(Mode.NORMAL))
    constants = (0.0, -0.5)
    given = [DynamicEmbInitializerArgs(Mode.CONSTANT, value=value) for value in constants]
    module = tables(*(options(eval_initializer_args=args) for args in given), pooling_mode=pooling)
    ids, bags = torch.tensor([7, 5, 7, 5]), torch.tensor([0, 1, 2, 3, 4])
    module(torch.tensor([7, 7]), torch.tensor([0, 1, 2])).sum().backward()
    read = module.eval()(ids, bags).reshape(-1, 4)
    moved = 0.25 - 0.5
    expected = (
        [moved, 0.0, moved, -0.5] if pooling == DynamicEmbPoolingMode.NONE else [moved, moved, 0.0, -0.5]
    )
    assert read.tolist() == [[value] * 4 for value in expected]
    assert [len(t.table) for t in module.dynamic_tables.values()] == [1, 1]


def test_an_epoch_strategy_has_a_name_only() -> None:
    with pytest.raises(ValueError, match="evict_strategy should be"):
        DynamicEmbTableOptions(evict_strategy=DynamicEmbEvictStrategy.EPOCH_LRU)


def test_a_table_that_is_not_trained_has_no_state_and_is_read_in_eval_only(tmp_path: Path) -> None:
    trained = tables(options(), optimizer=EmbOptimType.ADAM)
    train(trained, 7, 9)
    DynamicEmbDump(str(tmp_path / "d"), trained, optim=True)
    with pytest.warns(UserWarning, match="training=False"):
        serving = tables(options(training=False), optimizer=EmbOptimType.ADAM)
    assert serving.dynamic_tables["t0"].table.state_width == 0
    with pytest.raises(RuntimeError, match=r"training=False.*\['t0'\]"):
        serving(torch.tensor([7]), torch.tensor([0, 1]))
    assert len(serving.dynamic_tables["t0"].table) == 0
    DynamicEmbLoad(str(tmp_path / "d"), serving, optim=False)
    bags = (torch.tensor([7, 9, 11]), torch.tensor([0, 1, 2, 3]))
    assert torch.equal(serving.eval()(*bags), trained.eval()(*bags))


def test_one_bucket_evicts_exactly_the_oldest_keys() -> None:
    module = tables(options(bucket_capacity=MAX_BUCKET_CAPACITY, max_capacity=97, score_strategy=STEP))
    table = module.dynamic_tables["t0"].table
    assert table.options.bucket_capacity == table.options.max_capacity == 112
    generator = np.random.default_rng(3)
    keys = generator.choice(1 << 40, 300, replace=False).tolist()
    for key in keys:
        train(module, key)
    left = table.rows().keys.tolist()
    assert set(left) == set(keys[-len(left) :]) and len(left) >= 0.95 * 112
    with pytest.raises(ValueError, match="MAX_BUCKET_CAPACITY for more than 16384 rows"):
        tables(options(bucket_capacity=MAX_BUCKET_CAPACITY, max_capacity=16385))


# ---- admission


def test_a_frequency_strategy_admits_from_its_threshold_on() -> None:
    strategy = FrequencyAdmissionStrategy(np.uint64(300), QUARTER)
    assert strategy == copy.deepcopy(strategy) and hash(strategy) == hash(copy.deepcopy(strategy))
    assert strategy.admit(torch.arange(3), torch.tensor([299, 300, 301])).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="frequencies should have 3"):
        strategy.admit(torch.arange(3), torch.arange(2))
    buffer = torch.zeros(3, 2)
    assert strategy.initialize_non_admitted_embeddings(buffer, torch.tensor([2, 0]))
    assert buffer.tolist() == [[0.25, 0.25], [0.0, 0.0], [0.25, 0.25]]
    assert not FrequencyAdmissionStrategy(0).initialize_non_admitted_embeddings(buffer, torch.tensor([1]))
    with pytest.raises(ValueError, match="initializer_args should be"):
        FrequencyAdmissionStrategy(1, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("threshold", "batches"), [(0, 1), (1, 1), (3, 3)])
def test_a_table_admits_keys_with_a_counter_beside(threshold: int, batches: int) -> None:
    module = tables(
        options(admit_strategy=FrequencyAdmissionStrategy(threshold), admission_counter=KVCounter(1024))
    )
    table = module.dynamic_tables["t0"].table
    for number in range(1, 5):
        train(module, -7)
        assert len(table) == (number >= batches)


@pytest.mark.parametrize("counter", [None, KVCounter(64)])
def test_a_threshold_above_255_counts_every_occurrence(counter: KVCounter | None) -> None:
    module = tables(
        options(admit_strategy=FrequencyAdmissionStrategy(np.uint64(300)), admission_counter=counter)
    )
    table = module.dynamic_tables["t0"].table
    train(module, *[-7] * 299, 5)
    assert len(table) == 0
    train(module, -7)
    assert table.rows().keys.tolist() == [-7]
    table.erase([-7])
    train(module, -7)
    assert len(table) == 0, "it counts from 0 again"


def test_a_refused_key_reads_the_initializer_of_the_strategy() -> None:
    half = DynamicEmbInitializerArgs(Mode.CONSTANT, value=0.5)
    module = tables(options(admit_strategy=FrequencyAdmissionStrategy(2, half)))
    assert train(module, 7).tolist() == [[0.5] * 4]
    assert train(module, 7, 9).tolist() == [[0.75] * 4], "7 has a row now, which starts at 0.25"
    assert train(module, 7).tolist() == [[-0.25] * 4], "and it moved"


class _OddKeys(AdmissionStrategy):
    """Admits odd keys from their second occurrence on; others read 9."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        self.asked.append((keys.tolist(), frequencies.tolist()))
        return (keys % 2 == 1) & (frequencies >= 2)

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        buffer[indices] = 9.0
        return True


class _DictCounter(Counter):
    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def add(self, keys: torch.Tensor, table_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        names = list(zip(table_ids.tolist(), keys.tolist(), strict=True))
        for name, more in zip(names, frequencies.tolist(), strict=True):
            self.counts[name] = self.counts.get(name, 0) + more
        return torch.tensor([self.counts[name] for name in names])

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for name in zip(table_ids.tolist(), keys.tolist(), strict=True):
            self.counts.pop(name, None)

    def memory_usage(self, mem_type: MemoryType = MemoryType.DEVICE) -> int:
        return 0

    def load(self, key_file: str, counter_file: str, table_id: int) -> None:
        for key, count in zip(np.fromfile(key_file, np.int64), np.fromfile(counter_file, np.int64)):
            self.counts[table_id, int(key)] = int(count)

    def dump(self, key_file: str, counter_file: str, table_id: int) -> None:
        mine = {key: count for (table, key), count in self.counts.items() if table == table_id}
        np.array(list(mine), np.int64).tofile(key_file)
        np.array(list(mine.values()), np.int64).tofile(counter_file)


def test_a_strategy_and_a_counter_of_the_users_own_decide(tmp_path: Path) -> None:
    def build() -> tuple[Any, _OddKeys, _DictCounter]:
        strategy, counter = _OddKeys(), _DictCounter()
        option = options(admit_strategy=strategy, admission_counter=counter)
        return tables(option, option), strategy, counter

    module, strategy, counter = build()
    ids = torch.tensor([7, 7, 3, 8, 8, 7])  # table 0: 7 7 3, table 1: 8 8 7
    out = module(ids, torch.arange(7))
    assert out[:, 0].tolist() == [0.25, 0.25, 9.0] and out[:, 4].tolist() == [9.0, 9.0, 9.0]
    assert strategy.asked == [([3, 7], [1, 2]), ([7, 8], [1, 2])]
    assert counter.counts == {(0, 3): 1, (1, 7): 1, (1, 8): 2}, "those who get a row are forgotten"
    out.sum().backward()
    assert [t.table.rows().keys.tolist() for t in module.dynamic_tables.values()] == [[7], []]
    DynamicEmbDump(str(tmp_path / "d"), module, counter=True)
    again, _, restored = build()
    DynamicEmbLoad(str(tmp_path / "d"), again, counter=True)
    assert restored.counts == counter.counts
    module.eval()(ids, torch.arange(7))
    assert restored.counts == counter.counts, "evaluation counts nothing"


class _WrongLength(_OddKeys):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return torch.ones(keys.numel() + 1, dtype=torch.bool)


def test_a_mask_of_another_length_is_refused() -> None:
    module = tables(options(admit_strategy=_WrongLength()))
    with pytest.raises(
        ValueError, match=r"admit of _WrongLength should return a bool for each of the 2 keys"
    ):
        train(module, 7, 8)
    assert len(module.dynamic_tables["t0"].table) == 0
    with pytest.raises(ValueError, match="admission_counter should be"):
        options(admission_counter=3)


def test_counts_of_keys_without_a_row_survive_a_dump_unless_told_otherwise(tmp_path: Path) -> None:
    def build() -> Any:
        strategy = FrequencyAdmissionStrategy(3)
        return tables(options(admit_strategy=strategy, admission_counter=KVCounter(64)))

    module = build()
    train(module, 7, 7, 9)
    DynamicEmbDump(str(tmp_path / "with"), module, counter=True)
    DynamicEmbDump(str(tmp_path / "without"), module, counter=False)
    for name, admitted in (("with", [7]), ("without", [])):
        again = build()
        train(again, 9)  # what it counted so far is replaced
        DynamicEmbLoad(str(tmp_path / name), again, counter=True)
        train(again, 7)
        assert again.dynamic_tables["t0"].table.rows().keys.tolist() == admitted
    files = {path.name for path in (tmp_path / "with" / "model").iterdir()}
    tail = ".rank_0.world_size_1"
    assert {f"t0_counter_keys{tail}", f"t0_counter_frequencies{tail}"} <= files
    counted = np.fromfile(tmp_path / "with" / "model" / f"t0_counter_frequencies{tail}", np.int64)
    assert counted.tolist() == [2, 1]


def test_a_counter_keeps_the_largest_counts_and_survives_files(tmp_path: Path) -> None:
    counter = MultiTableKVCounter([KVCounter(2), KVCounter(8)])
    assert isinstance(counter, Counter)
    keys, ids = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 0, 0, 1])
    assert counter.add(keys, ids, torch.tensor([5, 1, 3, 1])).tolist() == [5, 1, 3, 1]
    assert counter.add(keys[:3], ids[:3], torch.tensor([1, 1, 1])).tolist() == [6, 1, 4]
    counter.erase(torch.tensor([3, 99]), torch.tensor([0, 0]))
    files = (str(tmp_path / "keys"), str(tmp_path / "counts"))
    counter.dump(*files, 0)
    other = MultiTableKVCounter([KVCounter(8)])
    other.load(*files, 0)
    assert other.add(torch.tensor([1, 3]), torch.tensor([0, 0]), torch.tensor([1, 1])).tolist() == [7, 1]
    assert other.memory_usage(MemoryType.HOST) > 0 and other.memory_usage() == 0
    (tmp_path / "counts").write_bytes(b"")
    with pytest.raises(ValueError, match="expected 1 counts"):
        other.load(*files, 0)
    with pytest.raises(ValueError, match="kv_counters"):
        MultiTableKVCounter([])


@pytest.mark.parametrize("mode", Mode)
def test_an_initializer_fills_the_rows_it_is_given(mode: Any) -> None:
    args = DynamicEmbInitializerArgs(mode, lower=-0.5, upper=0.5, value=3.0)
    buffer = torch.full((5, 7), 9.0)
    create_initializer_from_args(args)(buffer, torch.tensor([4, 1]), torch.tensor([100_003, -1]))
    assert (buffer[[0, 2, 3]] == 9.0).all() and (buffer[[1, 4]] != 9.0).all()
    if mode in (Mode.UNIFORM, Mode.TRUNCATED_NORMAL):
        assert buffer[[1, 4]].abs().max() <= 0.5
    if mode is Mode.DEBUG:
        assert buffer[[4, 1], 0].tolist() == [3.0, float((2**64 - 1) % 100_000)]
