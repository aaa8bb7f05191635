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
from dynamicemb.types import MemoryType, Storage

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


def test_a_table_takes_none_and_a_tuple_of_one_but_no_compound_yet() -> None:
    assert options(score_strategy=None).engine_strategy == embstore.ScoreStrategy.TIMESTAMP
    assert options(score_strategy=(LFU,)).engine_strategy == embstore.ScoreStrategy.LFU
    with pytest.raises(NotImplementedError, match="use LFU"):
        options(score_strategy=(TIMESTAMP, LFU))


def test_every_table_has_a_score_and_it_is_a_threshold() -> None:
    module = tables(*(options(score_strategy=s) for s in Strategy if s != Strategy.CUSTOMIZED))
    names = [s.name for s in Strategy if s != Strategy.CUSTOMIZED]
    scores = dict(zip(names, (get_score(module) or {})["model"].values(), strict=True))
    assert (scores["STEP"], scores["LFU"]) == (1, 1) and min(
        scores["TIMESTAMP"], scores["NO_EVICTION"]
    ) > 1 << 60
    module(torch.arange(4), torch.arange(5)).sum().backward()
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
    with pytest.raises(NotImplementedError, match="threshold above 255"):
        DynamicEmbTableOptions(admit_strategy=strategy)
    made = DynamicEmbTableOptions(training=False, score_strategy=STEP, dist_type="hash_roundrobin")
    assert made.get_grouped_key() == {
        "training": False,
        "caching": False,
        "external_storage": None,
        "index_type": None,
        "dist_type": "hash_roundrobin",
        "score_strategy": STEP,
        "admit_strategy": None,
    }


def test_a_missing_key_in_eval_reads_the_constant_zero() -> None:
    with pytest.raises(ValueError, match="eval_initializer_args should be"):
        options(eval_initializer_args=DynamicEmbInitializerArgs(Mode.NORMAL))
    with pytest.raises(NotImplementedError, match=r"eval_initializer_args .* 0\.5"):
        options(eval_initializer_args=DynamicEmbInitializerArgs(Mode.CONSTANT, value=0.5))
    module = tables(options(eval_initializer_args=DynamicEmbInitializerArgs(Mode.CONSTANT))).eval()
    assert not module(torch.tensor([5]), torch.tensor([0, 1])).any()


def test_a_storage_class_as_external_storage_is_refused_with_what_to_give() -> None:
    class Rows(Storage):
        pass

    with pytest.raises(NotImplementedError, match=r"a function of .* not: Rows"):
        options(external_storage=Rows)


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


class _Never(AdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies < 0

    def initialize_non_admitted_embeddings(self, buffer: torch.Tensor, indices: torch.Tensor) -> bool:
        return False


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


def test_what_admission_cannot_do_yet_is_said() -> None:
    assert (KVCounter(64).bucket_capacity, KVCounter(64).key_type) == (1024, torch.int64)
    with pytest.raises(NotImplementedError, match="use FrequencyAdmissionStrategy"):
        options(admit_strategy=_Never())
    with pytest.raises(NotImplementedError, match="use KVCounter"):
        options(admission_counter=MultiTableKVCounter([KVCounter(4)]))
    with pytest.raises(ValueError, match="admission_counter should be"):
        options(admission_counter=3)
    other = DynamicEmbInitializerArgs(Mode.CONSTANT, value=0.0)
    with pytest.warns(UserWarning, match="initializer_args of the admit_strategy of table 't0'"):
        tables(options(admit_strategy=FrequencyAdmissionStrategy(2, other)))


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
    assert other.memory_usage(MemoryType.HOST) == 32 and other.memory_usage() == 0
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
