"""Score strategies: a declared list, each with a model of the scores that a sequence of batches leaves
and with its error inputs; then exact evictions of one bucket for each."""

import math
from collections import Counter

import numpy as np
import pytest
from native_tables import as_dict, everything, hash_of, small_table

import embstore
from embstore import ScoreStrategy


class Model:
    """{key: score} after training batches."""

    def __init__(self):
        self.scores, self.batch_number = {}, 0

    def batch(self, table, keys):
        self.batch_number += 1
        self.before(table)
        table.find_or_insert(np.array(keys, dtype=np.int64))
        self.after(table, keys)

    def before(self, table): ...

    def after(self, table, keys):
        raise NotImplementedError


class Step(Model):
    def after(self, table, keys):
        self.scores.update(dict.fromkeys(keys, self.batch_number))


class Customized(Model):
    CYCLE = (7, 3, 9, 1, 2**64 - 1, 5)  # scores may fall

    def before(self, table):
        self.score = self.CYCLE[self.batch_number % len(self.CYCLE)]
        table.score = self.score

    def after(self, table, keys):
        self.scores.update(dict.fromkeys(keys, self.score))


class Lfu(Model):
    def after(self, table, keys):
        for key, count in Counter(keys).items():
            self.scores[key] = self.scores.get(key, 0) + count


class Timestamp(Model):
    """Scores are those of a clock, so the model asks the table and checks what is promised of them."""

    latest = 0

    def before(self, table):
        self.shown = table.score
        assert self.shown > max(self.scores.values(), default=0)

    def after(self, table, keys):
        if not keys:
            return
        (score,) = set(table.read(keys).scores.tolist())
        assert score >= self.shown
        self.scores.update(dict.fromkeys(keys, score))


def aged(amount, half_life=0):
    """The score of an amount: 24 bits of exponent, 40 of fraction."""
    fraction, exponent = math.frexp(amount)
    return ((1 << 20) + half_life + exponent - 1) << 40 | int((2 * fraction - 1) * 2**40)


class AgedLfu(Lfu):
    """Nothing ages in so few batches, but an occurrence counts a little more than one before it."""

    def __init__(self):
        super().__init__()
        self.counts, self.ids = {}, 0

    def after(self, table, keys):
        for key, count in Counter(keys).items():
            self.counts[key] = self.counts.get(key, 0) + count * (1 + self.ids / 32768)
            self.scores[key] = aged(self.counts[key])
        self.ids += len(keys)


class Importance(Model):
    def after(self, table, keys):
        self.scores.update(dict.fromkeys(keys, aged(1e-12)))  # no gradient has come yet


MODELS = {
    ScoreStrategy.TIMESTAMP: Timestamp,
    ScoreStrategy.STEP: Step,
    ScoreStrategy.CUSTOMIZED: Customized,
    ScoreStrategy.LFU: Lfu,
    ScoreStrategy.NO_EVICTION: Timestamp,
    ScoreStrategy.AGED_LFU: AgedLfu,
    ScoreStrategy.IMPORTANCE: Importance,
}
BATCHES = [[1, 2, 3, 3], [2], [], [5, 5, 5, 1], [-1, 2, 2], [3], [2, 1, 2]]
ALL = pytest.mark.parametrize("strategy", list(ScoreStrategy), ids=lambda s: s.name)


def test_every_strategy_has_a_model():
    assert set(MODELS) == set(ScoreStrategy)


@ALL
def test_scores_are_those_of_the_model(strategy):
    table, model = small_table(score_strategy=strategy), MODELS[strategy]()
    for batch in BATCHES:
        model.batch(table, batch)
        assert {k: score for k, (_, _, score) in as_dict(table).items()} == model.scores
    threshold = sorted(model.scores.values())[2]
    assert set(as_dict(table, min_score=threshold)) == {k for k, s in model.scores.items() if s >= threshold}


@ALL
def test_reading_moves_no_score(strategy):
    table, model = small_table(score_strategy=strategy), MODELS[strategy]()
    for batch in BATCHES:
        model.batch(table, batch)
    before = everything(table)
    table.find([1, 2, 99])
    table.contains([1, 99])
    table.read([3])
    table.apply_gradients([1], np.zeros((1, 4)))
    table.optimizer_step = 0
    assert everything(table) == before


@pytest.mark.parametrize(
    "strategy", [s for s in ScoreStrategy if s != ScoreStrategy.NO_EVICTION], ids=lambda s: s.name
)
def test_a_full_bucket_gives_up_exactly_its_smallest_scores(strategy):
    table = small_table(score_strategy=strategy, eviction_log="keys")
    model = MODELS[strategy]()
    rng = np.random.default_rng(7)
    for _ in range(12):
        old = list(model.scores)
        hits = rng.choice(old, size=min(len(old), 40)).tolist() if old else []
        batch = hits + rng.integers(-(2**62), 2**62, size=30).tolist()
        new = {k for k in batch if k not in model.scores}
        gone = max(0, len(model.scores) + len(new) - 128)
        candidates = sorted((s, hash_of(k), k) for k, s in model.scores.items() if k not in set(batch))
        expected = {k for _, _, k in candidates[:gone]}
        for key in expected:
            del model.scores[key]
        model.batch(table, batch)
        assert set(table.evictions().keys.tolist()) == expected
        assert set(as_dict(table)) == set(model.scores)
    assert table.stats().evictions > 100 and table.stats().refusals == 0


def test_without_eviction_a_table_grows_and_keeps_everything():
    table = small_table(score_strategy="no_eviction", max_capacity=1 << 14)
    keys = np.arange(5000) * 7919
    for part in np.array_split(keys, 9):
        table.find_or_insert(part)
    assert table.contains(keys).all() and table.stats().evictions == 0 and len(table) == 5000


ERRORS = [
    ("step", 0), ("step", -1), ("step", 1.5), ("step", True), ("step", "7"), ("step", 2**64), ("step", None),
    ("customized", 0), ("customized", -1), ("customized", 2**64), ("customized", 1.0),
    ("timestamp", 5), ("lfu", 5), ("no_eviction", 5), ("aged_lfu", 5), ("importance", 7),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "value"), ERRORS)
def test_a_score_that_cannot_be_set_is_refused(strategy, value):
    table = small_table(score_strategy=strategy)
    with pytest.raises(ValueError, match="score should be"):
        table.score = value


def test_a_customized_score_is_needed_before_training_and_not_for_reading():
    table = small_table(score_strategy="customized")
    for use in (lambda: table.find_or_insert([1]), lambda: table.insert_or_assign([1], np.ones((1, 4)))):
        with pytest.raises(RuntimeError, match="score of table 'small' should be set"):
            use()
    assert len(table) == 0 and table.score == 0
    table.insert_or_assign([1], np.ones((1, 4)), scores=[3])
    assert table.find([1])[1].all()
    table.score = np.int64(9)
    assert table.score == 9
    assert table.read([1]).scores.tolist() == [3]  # setting it touches no row


def test_an_occurrence_counts_half_after_a_half_life():
    table = small_table(score_strategy="lfu", half_life=4)
    assert table.options.score_strategy == ScoreStrategy.AGED_LFU
    for batch in range(9):
        table.find_or_insert([1, 1] if batch == 0 else [2])
    weights = [1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]  # twice as much after four batches
    assert table.read([1, 2]).scores.tolist() == [aged(2.0), aged(sum(weights))]
    assert table.score == aged(1.25, half_life=2)  # two half-lives and a quarter
    other = small_table(score_strategy="lfu", half_life=4)
    other.score = table.score
    assert other.score == table.score


def test_scores_by_importance_are_sums_of_norms_of_gradients():
    table = small_table(score_strategy="importance", optimizer=embstore.SGD(lr=0.0))
    rng, expected = np.random.default_rng(0), dict.fromkeys(range(5), 0.0)
    for batch in range(6):
        keys, weight = rng.integers(0, 5, 9), 1 + 9 * (batch + 1) / 32768
        gradients = rng.standard_normal((9, 4)).astype(np.float32)
        table.find_or_insert(keys)
        table.apply_gradients(keys, gradients)
        for key in set(keys.tolist()):
            expected[key] += weight * np.linalg.norm(gradients[keys == key].sum(0))
    scores = table.read(list(expected)).scores.tolist()
    amounts = [(1 + (s % 2**40) / 2**40) * 2.0 ** ((s >> 40) - (1 << 20)) for s in scores]
    np.testing.assert_allclose(amounts, list(expected.values()), rtol=1e-6)


def test_step_can_be_set_after_a_load():
    table = small_table()
    table.score = 41
    table.find_or_insert([1])
    assert table.score == 42 and table.read([1]).scores.tolist() == [41]


def test_timestamps_are_nanoseconds_of_the_clock_and_rise_above_scores_that_were_assigned():
    import time

    table = small_table(score_strategy="timestamp")
    now = time.time_ns()
    table.find_or_insert([1])
    assert abs(int(table.read([1]).scores[0]) - now) < 60e9
    ahead = now + 3600 * 10**9
    table.insert_or_assign([2], np.ones((1, 4)), scores=np.array([ahead], np.uint64))
    assert table.score > ahead
    table.find_or_insert([3])
    assert int(table.read([3]).scores[0]) > ahead


def test_a_mixed_collection_scores_each_table_by_its_own_strategy():
    import torch

    options = [
        embstore.TableOptions(name=s.name, dim=2, score_strategy=s)
        for s in (ScoreStrategy.STEP, ScoreStrategy.LFU)
    ]
    collection = embstore.EmbeddingCollection(options)
    for _ in range(3):
        collection({"STEP": torch.tensor([5, 5]), "LFU": torch.tensor([5, 5])})
    assert collection.tables["STEP"].read([5]).scores.tolist() == [3]
    assert collection.tables["LFU"].read([5]).scores.tolist() == [6]


def test_a_gradient_renews_the_scores_of_its_rows_when_asked_to():
    table = small_table(2, score_strategy="timestamp")
    table.find_or_insert([1, 2, 3])
    before = table.read([1, 2, 3]).scores
    table.apply_gradients([2, 9], np.ones((2, 2), np.float32))
    assert (table.read([1, 2, 3]).scores == before).all()
    table.apply_gradients([2, 9], np.ones((2, 2), np.float32), renew_scores=True)
    after = table.read([1, 2, 3]).scores
    assert after[1] > before[1] and (after[[0, 2]] == before[[0, 2]]).all()
    assert not table.contains([9])[0]


def test_the_eviction_log_can_be_switched_on_for_a_while():
    table = small_table(2, max_capacity=128, bucket_capacity=128, score_strategy="timestamp")
    table.find_or_insert(np.arange(128))
    table.find_or_insert(np.arange(200, 210))  # not logged
    table.set_eviction_log(embstore.EvictionLog.ROWS)
    table.find_or_insert(np.arange(300, 305))
    gone = table.evictions()
    assert len(gone) == 5 and (gone.keys < 128).all() and gone.values.shape == (5, 2)
    table.set_eviction_log(embstore.EvictionLog.OFF)
    table.find_or_insert(np.arange(400, 405))
    assert len(table.evictions()) == 0


@pytest.mark.parametrize("strategy", ["timestamp", "step", "customized", "lfu"])
def test_the_least_used_key_goes_first_whatever_its_score(strategy):
    """Against a dict that counts: with one bucket the order of eviction is exact."""
    table = embstore.Table(
        "t",
        dim=1,
        score_strategy=strategy,
        evict_least_used=True,
        init_capacity=16,
        max_capacity=16,
        bucket_capacity=16,
    )
    counts: dict[int, int] = {}
    rng = np.random.default_rng(3)
    for step in range(1, 60):
        if strategy == "customized":
            table.score = 1000 - step  # the other way round
        keys = rng.zipf(1.3, 8) % 40
        new = [k for k in dict.fromkeys(keys.tolist()) if k not in counts]
        table.find_or_insert(keys)
        for key in keys.tolist():
            if key in counts:
                counts[key] += 1
        old = dict(counts)
        for key in new:
            counts[key] = keys.tolist().count(key)
        present = {k for k in counts if table.contains([k])[0]}
        gone = set(counts) - present
        assert set(new) <= present and len(present) <= 16
        kept = [old[k] for k in old if k in present and k not in keys.tolist()]
        assert not gone or not kept or max(old[k] for k in gone) <= min(kept), (gone, kept)
        counts = {k: counts[k] for k in present}
    assert table.stats().evictions > 0
    if strategy == "step":
        assert (table.rows().scores <= 59).all()  # scores stay what the strategy makes them


def test_counts_of_keys_survive_growth_and_threads_give_the_same_victims():
    def kept(threads):
        embstore.set_num_threads(threads)
        table = embstore.Table(
            "t", dim=2, evict_least_used=True, score_strategy="step", init_capacity=128, max_capacity=4096
        )
        rng = np.random.default_rng(7)
        for _ in range(40):
            table.find_or_insert(rng.zipf(1.2, 2000) % 20_000)
        return table.rows()

    before = embstore.get_num_threads()
    try:
        one, four = kept(1), kept(4)
    finally:
        embstore.set_num_threads(before)
    np.testing.assert_array_equal(one.keys, four.keys)
    np.testing.assert_array_equal(one.values, four.values)
