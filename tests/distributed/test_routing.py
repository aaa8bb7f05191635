"""Routing of a batch: the torch face of it. The rule itself is tested in core/tests/routing_test.cpp."""

from __future__ import annotations

import pytest
import torch

import embstore
from embstore.distributed.routing import route_keys, sum_rows


def test_a_route_brings_every_occurrence_back() -> None:
    keys = torch.randint(-30, 30, (1023,))
    offsets = torch.tensor([0, 97, 97, 600, 1023])
    for world in (1, 2, 7):
        for unique in (None, [True, False, True, False]):
            route = route_keys(keys, offsets, world, embstore.Ownership.HASH_ROUNDROBIN, unique=unique)
            assert torch.equal(route.keys[route.index], keys)
            owners = embstore.owner(route.keys, world, embstore.Ownership.HASH_ROUNDROBIN)
            assert torch.equal(owners, owners.sort().values)
            assert route.counts.shape == (world, 4) and int(route.counts.sum()) == len(route.keys)
            if unique is None:
                assert len(route.keys) == len(keys)
            sums = sum_rows(torch.ones(1023, 3), route.index, len(route.keys))
            assert int(sums.sum()) == 3 * 1023


def test_empty_batches_have_a_route() -> None:
    route = route_keys(torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), 3)
    assert route.keys.numel() == 0 and route.counts.tolist() == [[0] * 5] * 3
    assert sum_rows(torch.empty(0, 4), route.index, 0).shape == (0, 4)


def test_bad_arguments_are_named() -> None:
    keys, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="keys should be int64"):
        route_keys(keys.int(), offsets, 2)
    with pytest.raises(ValueError, match="world should be"):
        route_keys(keys, offsets, 0)
    with pytest.raises(ValueError, match="offsets should"):
        route_keys(keys, torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match="unique should have 1 elements"):
        route_keys(keys, offsets, 2, unique=[True, True])
    with pytest.raises(ValueError, match="vectors should have 2 rows"):
        sum_rows(torch.ones(3, 1), torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match="index should be between"):
        sum_rows(torch.ones(2, 1), torch.tensor([0, 2]), 2)


def test_admission_stores_a_key_when_it_comes_often_enough() -> None:
    table = embstore.Table("t", dim=3, initializer=embstore.Constant(0.5), admission_threshold=2)
    first = table.find_or_insert([7, 8, 8])
    assert (first == 0.5).all() and table.contains([7, 8]).tolist() == [False, True]
    assert table.stats().unadmitted == 1
    table.insert_or_assign([9], [[1.0, 1.0, 1.0]])  # writing a row needs no admission
    table.find_or_insert([7])
    assert len(table) == 3
    with pytest.raises(ValueError, match="admission_threshold should be between 0 and 255"):
        embstore.Table("t", dim=3, admission_threshold=300)
