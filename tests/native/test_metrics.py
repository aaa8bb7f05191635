"""Counters of tables reach Prometheus and TensorBoard."""

import gc

import prometheus_client
import pytest

import embstore
from embstore import metrics


def table(name="user", **options):
    return embstore.Table(name, dim=4, optimizer=embstore.SGD(lr=0.5), **options)


def text(registry):
    return prometheus_client.generate_latest(registry).decode()


def test_prometheus_reads_the_counters_of_the_moment():
    user, item = table(), table("item")
    registry = prometheus_client.CollectorRegistry()
    metrics.watch({"m/user": user, "m/item": item}, registry)
    user.find_or_insert([1, 2, 3])
    user.find_or_insert([1, 2])
    found = text(registry)
    assert 'embstore_table_size{table="m/user"} 3.0' in found
    assert 'embstore_table_hits_total{table="m/user"} 2.0' in found
    assert 'embstore_table_inserts_total{table="m/item"} 0.0' in found
    user.erase([1])
    assert 'embstore_table_size{table="m/user"} 2.0' in text(registry)


def test_watching_does_not_keep_a_table_alive():
    user = table()
    registry = prometheus_client.CollectorRegistry()
    metrics.watch({"user": user}, registry)
    del user
    gc.collect()
    assert "table=" not in text(registry)


def test_every_field_of_the_stats_is_shown_or_left_out_on_purpose():
    fields = set(embstore.Stats.__dataclass_fields__)
    assert fields - set(metrics.GAUGES) - set(metrics.COUNTERS) == {"log_dropped"}


def test_what_is_no_table_is_refused():
    with pytest.raises(TypeError, match="tables\\['x'\\] should be a Table but is: str"):
        metrics.watch({"x": "y"}, prometheus_client.CollectorRegistry())


def test_tensorboard_gets_rates_between_two_calls(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    user = table()
    with SummaryWriter(tmp_path) as writer:
        board = metrics.TensorBoard(writer, {"user": user})
        user.find_or_insert([1, 2, 3])
        board.log(1)
        user.find_or_insert([1, 2, 3, 4])
        board.log(2)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    points = {name: [event.value for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert points["user/hit_rate"] == [0.0, 0.75]
    assert points["user/inserts"] == [3.0, 1.0]
    assert points["user/size"] == [3.0, 4.0]
