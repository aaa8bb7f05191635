"""Random sequences of all table operations against a dict."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from native_tables import hash_of

import embstore

KEY = st.one_of(
    st.integers(-40, 40),
    st.sampled_from([-(2**63), 2**63 - 1, -(2**63) + 1]),
    st.integers(-(2**63), 2**63 - 1),
)
KEYS = st.lists(KEY, max_size=30)
DIM = 3
LIMITS = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def debug_value(key):
    return float(np.float32((key & (2**64 - 1)) % 100000))


class Operations(RuleBasedStateMachine):
    """The model: {key: [value, state, score]} with one float each, since all components are alike."""

    capacity: int  # rows at most
    bucket = 16
    load_factor = 1.0

    @initialize()
    def make(self):
        self.table = embstore.Table(
            "machine", dim=DIM, optimizer=embstore.Adagrad(lr=0.5, eps=0.0, initial_accumulator_value=1.0),
            initializer=embstore.Debug(), score_strategy="step", bucket_capacity=self.bucket,
            init_capacity=self.bucket, max_capacity=self.capacity, max_load_factor=self.load_factor,
            eviction_log="rows",
        )  # fmt: skip
        self.model, self.step, self.log, self.refusals = {}, 1, [], 0

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()

    def make_room(self, batch):
        """Evicts from the model what the table has to; returns the keys of the batch that are refused."""
        raise NotImplementedError

    def train(self, keys):
        refused = self.make_room(keys)
        for key in keys:
            if key not in refused:
                row = self.model.setdefault(key, [debug_value(key), 1.0, 0])
                row[2] = self.step
        self.step += 1
        self.refusals += len(refused)
        return refused

    @rule(keys=KEYS)
    def find_or_insert(self, keys):
        refused = self.train(keys)
        got = self.table.find_or_insert(np.array(keys, np.int64))
        for key, vector in zip(keys, got):
            assert (vector == (0.0 if key in refused else np.float32(self.model[key][0]))).all()

    @rule(keys=KEYS, start=st.integers(-50, 50))
    def insert_or_assign(self, keys, start):
        refused = self.train(keys)
        for i, key in enumerate(keys):
            if key not in refused:
                self.model[key][0] = float(start + i)
        values = np.repeat(np.arange(start, start + len(keys), dtype=np.float32)[:, None], DIM, 1)
        self.table.insert_or_assign(keys, values)

    @rule(keys=KEYS, score=st.integers(1, 50))
    def insert_or_assign_whole_rows(self, keys, score):
        refused = self.make_room(keys)
        self.refusals += len(refused)
        for i, key in enumerate(keys):
            if key not in refused:
                self.model[key] = [float(i), float(2 * i + 1), score + i]
        column = np.arange(len(keys))[:, None]
        self.table.insert_or_assign(
            keys,
            np.repeat(column, DIM, 1),
            states=np.repeat(2 * column + 1, DIM, 1),
            scores=score + column[:, 0],
        )

    @rule(keys=KEYS)
    def erase(self, keys):
        there = {k for k in keys if k in self.model}
        assert self.table.erase(keys) == len(there)
        for key in there:
            del self.model[key]

    @rule(keys=KEYS)
    def apply_gradients(self, keys):
        self.table.apply_gradients(keys, np.ones((len(keys), DIM)))
        for key in set(keys) & set(self.model):
            row = self.model[key]
            g = np.float32(keys.count(key))
            row[1] = float(np.float32(row[1]) + g * g)
            row[0] = float(np.float32(row[0]) - np.float32(0.5) * g / np.sqrt(np.float32(row[1])))

    @rule()
    @precondition(lambda self: len(self.model) > 3)
    def clear(self):
        self.table.clear()
        self.model.clear()

    @rule(rows=st.integers(0, 16))
    def reserve(self, rows):
        self.table.reserve(rows)
        assert self.table.capacity * self.load_factor >= rows or self.table.capacity >= self.capacity

    @rule(keys=KEYS)
    def look_without_touching(self, keys):
        values, found = self.table.find(keys)
        assert found.tolist() == [k in self.model for k in keys] == self.table.contains(keys).tolist()
        rows = self.table.read(keys)
        for i, key in enumerate(keys):
            value, state, score = self.model.get(key, (0.0, 0.0, 0))
            assert (values[i] == np.float32(value)).all() and (rows.states[i] == np.float32(state)).all()
            assert int(rows.scores[i]) == score

    @rule(min_score=st.integers(0, 30), block=st.integers(1, 9))
    def export(self, min_score, block):
        keys = []
        for rows in self.table.export(min_score=min_score, block_rows=block):
            assert len(rows) <= block
            keys += rows.keys.tolist()
        assert sorted(keys) == sorted(k for k, row in self.model.items() if row[2] >= min_score)

    @rule()
    def drain(self):
        rows = self.table.evictions()
        got = [
            (int(k), float(v[0]), float(s[0]), int(c))
            for k, v, s, c in zip(rows.keys, rows.values, rows.states, rows.scores)
        ]
        assert sorted(got) == sorted(self.log)
        self.log = []

    @invariant()
    def the_table_is_the_model(self):
        if not hasattr(self, "table"):
            return
        rows = self.table.rows()
        assert rows.keys.tolist() == sorted(self.model)
        for key, value, state, score in zip(rows.keys.tolist(), rows.values, rows.states, rows.scores):
            expected = self.model[key]
            assert (value == np.float32(expected[0])).all() and (state == np.float32(expected[1])).all()
            assert int(score) == expected[2]
        stats = self.table.stats()
        assert stats.size == len(self.model) == len(self.table) and stats.refusals == self.refusals
        assert stats.size <= stats.capacity <= stats.max_capacity
        assert self.table.score == self.step


class OneBucket(Operations):
    """A table of one bucket: evictions and refusals are predicted exactly."""

    capacity = 16

    def make_room(self, batch):
        wanted = set(batch)
        new = [k for k in dict.fromkeys(batch) if k not in self.model]
        free = self.capacity - len(self.model)
        victims = sorted((row[2], hash_of(k), k) for k, row in self.model.items() if k not in wanted)
        evicted = victims[: max(0, len(new) - free)]
        for _, _, key in evicted:
            value, state, score = self.model.pop(key)
            self.log.append((key, float(np.float32(value)), float(np.float32(state)), score))
        return set(new[free + len(evicted) :])


class Growing(Operations):
    """A table that may always grow: nothing is ever evicted or refused."""

    capacity = 1 << 16
    load_factor = 0.75

    def make_room(self, batch):
        return set()


class Wide(Growing):
    bucket = 48


@pytest.mark.parametrize("machine", [OneBucket, Growing, Wide], ids=lambda m: m.__name__)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_sequence_of_operations_leaves_what_a_dict_holds(machine, threads):
    from hypothesis.stateful import run_state_machine_as_test

    embstore.set_num_threads(threads)
    run_state_machine_as_test(machine, settings=LIMITS)
