"""Counters of tables reach Prometheus and TensorBoard."""

import gc
import json
import re
import time
from pathlib import Path

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


def test_times_of_dumps_and_appends_are_counted_with_their_failures(tmp_path):
    user = table()
    registry = prometheus_client.CollectorRegistry()
    metrics.watch({"user": user}, registry)

    def value(name, call):
        return registry.get_sample_value(f"embstore_{name}", {"call": call})

    before = {name: value(name, "dump") for name in ("calls_total", "call_failures_total")}
    embstore.dump(tmp_path / "d", {"m": {"user": user}})
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileExistsError):
        embstore.dump(tmp_path / "file", {"m": {"user": user}})
    embstore.dump(tmp_path / "e", {"m": {"user": user}}, async_=True).wait()
    assert value("calls_total", "dump") == before["calls_total"] + 2  # the other never began
    assert value("call_failures_total", "dump") == before["call_failures_total"]
    appended = value("calls_total", "append")
    log = embstore.IncrementLog.create(tmp_path / "log", {"m": {"user": user}})
    log.append({"m": {"user": user}})
    assert value("calls_total", "append") == appended + 1
    assert 0 < value("call_last_seconds", "append") <= value("call_seconds_total", "append")


def test_a_reader_tells_its_state_and_age_and_is_not_kept_alive(tmp_path):
    user = table()
    user.find_or_insert([1, 2, 3])
    log = embstore.IncrementLog.create(tmp_path / "log", {"m": {"user": user}})
    log.append({"m": {"user": user}})
    reader = embstore.serving.Reader(tmp_path / "log", cache=tmp_path / "cache")
    registry = prometheus_client.CollectorRegistry()
    metrics.watch_reader(reader, registry)
    found = text(registry)
    assert "embstore_state_number 1.0" in found and 'embstore_rows{table="m/user"} 3.0' in found
    assert 0 <= registry.get_sample_value("embstore_state_age_seconds") < 100
    assert registry.get_sample_value("embstore_reader_failing") == 0
    del reader
    gc.collect()
    assert "embstore" not in text(registry)


def test_a_timer_counts_steps():
    registry = prometheus_client.CollectorRegistry()
    timer = metrics.StepTimer(registry)
    for _ in range(3):
        with timer:
            pass
    with timer:
        time.sleep(0.0101)
    assert registry.get_sample_value("embstore_step_seconds_count") == 4
    below = [
        registry.get_sample_value("embstore_step_seconds_bucket", {"le": le})
        for le in ("0.001", "0.01", "+Inf")
    ]
    assert below[0] <= 3 and below[1] <= 3 and below[2] == 4
    assert registry.get_sample_value("embstore_step_seconds_sum") > 0.0101


def test_every_panel_of_the_dashboard_asks_for_metrics_that_exist(tmp_path):
    pytest.importorskip("fastapi")
    from embstore.serving.server import ServerMetrics

    user = table()
    embstore.dump(tmp_path / "d", {"m": {"user": user}})
    reader = embstore.serving.Reader(tmp_path / "d", cache=tmp_path / "cache")
    registry = prometheus_client.CollectorRegistry()
    metrics.watch({"user": user}, registry)
    metrics.StepTimer(registry)
    server = ServerMetrics(reader)
    server.requests.labels("/", "200").inc(0)
    server.ids.labels("user").inc(0)
    server.missing.labels("user").inc(0)
    exposed = {
        sample.name
        for of in (registry, server.registry)
        for family in of.collect()
        for sample in family.samples
    }
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = set(re.findall(r"embstore_\w+", target["expr"]))
            assert asked and asked <= exposed, (panel["title"], asked - exposed)
    shown = re.findall(r"embstore_table_(\w+?)(?:_total)?\b", json.dumps(dashboard))
    assert set(shown) == {*metrics.GAUGES, *metrics.COUNTERS}
