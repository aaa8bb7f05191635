"""What `make bench` says about the limits of the machine."""

import torch

from benchmarks.machine import Limits, measure, row_lines
from benchmarks.registry import Run, Sizes
from benchmarks.static_tables import traffic
from benchmarks.tables import embedding
from embstore import SGD, RowwiseAdagrad


def test_a_share_is_the_least_time_for_the_traffic_over_the_time_that_was_taken() -> None:
    run = Run((1,), Sizes(), {1: Limits(copied_bytes_per_second=1e9, random_lines_per_second=1e8)})
    assert run.share(1, seconds=0.02, lines=1e6, copied_bytes=5e6) == (0.01 + 0.005) / 0.02
    assert run.share(2, seconds=0.02, lines=1e6) is None  # not measured with two threads


def test_the_traffic_of_a_step_counts_distinct_rows_and_all_outputs() -> None:
    ids = [torch.tensor([7, 7, 7, -1]), torch.tensor([1, 2, 3, 4])]  # 3 distinct ids a batch on average
    plain = embedding(32, SGD(lr=0.1), 97)
    assert traffic(plain, ids, train=False) == {"lines": 3 * (1 + 2), "copied_bytes": 4 * 128}
    stateful = embedding(32, RowwiseAdagrad(lr=0.1), 97)
    assert traffic(stateful, ids, train=True) == {"lines": 3 * (1 + 3), "copied_bytes": 1.5 * 4 * 128}
    assert [row_lines(n) for n in (1, 64, 65)] == [1, 1, 2]


def test_the_limits_of_this_machine_are_measured_for_each_number_of_threads() -> None:
    limits = measure((1, 2), size=1 << 20)
    assert list(limits) == [1, 2]
    for limit in limits.values():
        assert 1e6 < limit.random_lines_per_second < 1e11
        assert 1e7 < limit.copied_bytes_per_second < 1e13
