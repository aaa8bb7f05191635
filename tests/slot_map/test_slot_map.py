"""SlotMap against a dict and a set of free slots."""

import numpy as np
import pytest

from embstore import SlotMap


class Oracle:
    """Which slot every key has, and when it was last used."""

    def __init__(self, slots):
        self.free = set(range(slots))
        self.slots = {}
        self.used = {}

    def batch(self, keys, time):
        for key in keys:
            self.used[key] = time
        for key in dict.fromkeys(keys):
            if key not in self.slots and self.free:
                self.slots[key] = min(self.free)
                self.free.remove(self.slots[key])
        return [self.slots.get(key, -1) for key in keys]

    def remove(self, key, slot):
        assert self.slots.pop(key) == slot
        self.free.add(slot)


@pytest.mark.parametrize("slots", [1, 7, 64, 97, 1023])
def test_keys_keep_their_slots_and_new_ones_get_the_lowest_free(slots):
    rng = np.random.default_rng(slots)
    window, oracle = SlotMap(slots), Oracle(slots)
    universe = rng.integers(-(2**63), 2**63 - 1, 4 * slots)
    universe[:1] = np.iinfo(np.int64).min
    for time in range(60):
        distinct = rng.choice(universe, rng.integers(0, slots // 3 + 2), replace=False)[:slots]
        keys = rng.choice(distinct, 2 * len(distinct)) if len(distinct) else distinct
        found = window.find(keys, time)
        np.testing.assert_array_equal(found, [oracle.slots.get(int(k), -1) for k in keys])
        need = window.missing - window.free_slots
        pinned_from = max(0, time - 1) if time % 3 else time
        if need > 0:
            victims = window.victims(need, pinned_from)
            if len(victims) < need:
                victims = window.victims(need, time)
                pinned_from = time
            assert len(victims) >= need
            assert all(oracle.used[int(key)] < pinned_from for key, _ in victims)
            window.drop()
            for key, slot in victims.tolist():
                oracle.remove(key, slot)
        expected = oracle.batch([int(k) for k in keys], time)
        window.admit()
        assert found.tolist() == expected and window.missing == 0
        assert len(window) == len(oracle.slots) and window.free_slots == len(oracle.free)
    assert sorted(map(tuple, window.used_since(0).tolist()), key=lambda p: p[1]) == sorted(
        oracle.slots.items(), key=lambda p: p[1]
    )


def test_a_full_map_admits_what_fits_and_keeps_the_rest_missing():
    window = SlotMap(3)
    found = window.find([5, 6, 5, 7, 8, 9, 8], time=0)
    assert window.missing == 5
    assert window.admit().tolist() == [[5, 0], [6, 1], [7, 2]]
    assert found.tolist() == [0, 1, 0, 2, -1, -1, -1] and window.missing == 2
    window.forget([6, 1234])
    assert window.admit().tolist() == [[8, 1]]
    assert found.tolist() == [0, 1, 0, 2, 1, -1, 1]


def test_rarely_used_keys_go_first_and_older_ones_among_equals():
    window = SlotMap(200, min_used_freq_power=1)
    window.find(np.arange(200), time=0)
    window.admit()
    for time in range(
        1, 200
    ):  # keys below 100 are used all the time, the others in the order of their number
        window.find(np.append(np.arange(100), 100 + time // 2), time)
    worst = window.worst(60)[:, 0]
    assert (worst >= 100).all()
    assert len(window.worst(1000)) == 200


def test_eviction_takes_a_margin_but_not_half_of_the_table():
    window = SlotMap(100_000)
    window.find(np.arange(100_000), time=0)
    window.admit()
    victims = window.victims(10, pinned_from=1)
    assert 10 <= len(victims) <= 25_000


def test_choosing_victims_changes_nothing():
    window = SlotMap(50)
    before = window.find(np.arange(50), time=0)
    window.admit()
    window.victims(20, pinned_from=1)
    np.testing.assert_array_equal(window.find(np.arange(50), time=1), before)
    assert len(window) == 50


def test_equal_calls_make_equal_maps():
    def run():
        window, rng = SlotMap(500), np.random.default_rng(3)
        history = []
        for time in range(40):
            found = window.find(rng.integers(0, 3000, 300), time)
            if window.missing > window.free_slots:
                history.append(window.victims(window.missing - window.free_slots, time).tolist())
                window.drop()
            window.admit()
            history.append(found.tolist())
        return history

    assert run() == run()


def test_times_may_be_large_and_far_apart():
    window = SlotMap(8)
    window.find([1, 2], time=0)
    window.admit()
    for time in (2**27 - 1, 2**27 + 5, 2**40, 2**62):
        window.find([1], time)
        assert [key for key, _ in window.used_since(time).tolist()] == [1]
        assert [key for key, _ in window.victims(1, time).tolist()] == [2]


def test_a_mistake_is_named():
    with pytest.raises(ValueError, match="slots should be at least 1 .* but is: 0"):
        SlotMap(0)
    with pytest.raises(ValueError, match="min_used_freq_power should be between 0 and 31 but is: 32"):
        SlotMap(3, 32)
    window = SlotMap(3)
    window.find([1], time=5)
    with pytest.raises(ValueError, match="time should be at least 5 but is: 4"):
        window.find([1], time=4)
    with pytest.raises(TypeError, match="keys should be integers"):
        window.find([0.5], time=6)
