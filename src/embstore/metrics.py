"""What an operator watches while tables are trained and served: Prometheus, TensorBoard.

    embstore.metrics.watch({"user": table})            # into prometheus_client's default registry
    embstore.metrics.watch_reader(reader)              # in a process that serves
    prometheus_client.start_http_server(9100)

    timer = embstore.metrics.StepTimer()
    with timer:
        train(batch)

    board = embstore.metrics.TensorBoard(SummaryWriter("runs/1"), {"user": table})
    board.log(step)

Counters are read from the tables when somebody asks, so watching costs a training step nothing; a timer
costs it a few microseconds. docs/grafana.json is a dashboard of all this.
Prometheus needs the extra `metrics`: pip install 'embstore[metrics]'
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from embstore.durations import durations
from embstore.table import Table

if TYPE_CHECKING:
    from embstore.serving.reader import Reader

# Field of Stats -> what it counts. Gauges go up and down, counters only up.
GAUGES = {
    "size": "Rows in memory.",
    "capacity": "Rows that fit before the index grows.",
    "max_capacity": "Rows that fit at most.",
    "bytes": "Bytes of index and rows.",
}
COUNTERS = {
    "hits": "Occurrences in training batches whose key had a row.",
    "inserts": "Rows that were made or came up from the store.",
    "evictions": "Rows that gave way to others.",
    "refusals": "Keys that found no room.",
    "expired": "Rows that were not used for too long.",
    "dropped_gradients": "Rows that were evicted before their gradient came.",
    "unadmitted": "Occurrences of keys that have no row yet.",
    "fetches": "Rows that came up from the store.",
    "write_backs": "Rows that went down to the store.",
}


# Field of Duration -> what it counts, by the label `call`: dump, load, append, compact.
CALL_COUNTERS = {
    "count": ("calls", "Dumps, loads, appends and compactions that ended."),
    "failures": ("call_failures", "Those of them that failed."),
    "seconds": ("call_seconds", "Time that they took."),
}
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class _Tables:
    """Tables by name, held weakly: watching does not keep a table alive."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        for name, table in tables.items():
            if not isinstance(table, Table):
                raise TypeError(f"tables[{name!r}] should be a Table but is: {type(table).__name__}")
        self._tables = {name: weakref.ref(table) for name, table in tables.items()}

    def __iter__(self) -> Iterator[tuple[str, dict[str, int]]]:
        for name, reference in self._tables.items():
            if (table := reference()) is not None:
                yield name, asdict(table.stats())


class TableCollector:
    """A collector of prometheus_client; `watch` registers one."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = _Tables(tables)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = list(self._tables)
        for family, fields in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for field, text in fields.items():
                metric = family(f"embstore_table_{field}", text, labels=["table"])
                for name, of in stats:
                    metric.add_metric([name], float(of[field]))
                yield metric
        calls = durations()
        for field, (name, text) in CALL_COUNTERS.items():
            metric = CounterMetricFamily(f"embstore_{name}", text, labels=["call"])
            for call, duration in calls.items():
                metric.add_metric([call], float(getattr(duration, field)))
            yield metric
        last = GaugeMetricFamily("embstore_call_last_seconds", "Time of the last one.", labels=["call"])
        for call, duration in calls.items():
            last.add_metric([call], duration.last_seconds)
        yield last


class ReaderCollector:
    """A collector of prometheus_client; `watch_reader` registers one."""

    def __init__(self, reader: Reader) -> None:
        self._reader = weakref.ref(reader)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        reader = self._reader()
        if reader is None:
            return
        state = reader.state
        for name, text, value in (
            ("state_number", "Number of the served increment.", state.number),
            ("state_age_seconds", "Age of the served state.", reader.age_seconds),
            ("reader_failing", "1 while the log cannot be followed.", reader.error is not None),
        ):
            yield GaugeMetricFamily(f"embstore_{name}", text, value=float(value))
        rows = GaugeMetricFamily("embstore_rows", "Rows of a table.", labels=["table"])
        for collection, table in state.tables:
            rows.add_metric([f"{collection}/{table}"], float(state.rows(f"{collection}/{table}")))
        yield rows


def _registry(registry: Any) -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError("metrics need: pip install 'embstore[metrics]'") from error
    return registry or prometheus_client.REGISTRY


def watch(tables: Mapping[str, Table], registry: Any = None) -> TableCollector:
    """Lets Prometheus read the counters of tables, and the times of dumps, loads and appends.

    tables    by the name they get in the label `table`
    registry  of prometheus_client; None is its default one. `registry.unregister` ends it

    Raises ImportError when prometheus_client is not installed.
    """
    registry = _registry(registry)
    collector = TableCollector(tables)
    registry.register(collector)
    return collector


def watch_reader(reader: Reader, registry: Any = None) -> ReaderCollector:
    """Lets Prometheus read what a reader serves: number and age of its state, rows, and whether it follows.

    Raises ImportError when prometheus_client is not installed.
    """
    registry = _registry(registry)
    collector = ReaderCollector(reader)
    registry.register(collector)
    return collector


class StepTimer:
    """Times training steps for Prometheus, as the histogram embstore_step_seconds.

    timer = StepTimer()
    with timer:
        train(batch)
    """

    def __init__(self, registry: Any = None) -> None:
        # A Histogram of prometheus_client would do the same, but takes 10 us of each step.
        self._counts = [0] * (len(STEP_BUCKETS) + 1)
        self._begin = self._sum = 0.0
        _registry(registry).register(self)

    def __enter__(self) -> StepTimer:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begin
        self._counts[bisect_left(STEP_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Any]:
        """The histogram, for prometheus_client."""
        from prometheus_client.core import HistogramMetricFamily

        bounds = [*map(str, STEP_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "embstore_step_seconds",
            "Time of a training step.",
            buckets=list(zip(bounds, map(float, accumulate(self._counts)))),
            sum_value=self._sum,
        )


class TensorBoard:
    """Writes the counters of tables to a SummaryWriter, as rates where they only grow.

    board = TensorBoard(writer, {"user": table})
    board.log(step)          # now and then
    """

    def __init__(self, writer: Any, tables: Mapping[str, Table]) -> None:
        self._writer = writer
        self._tables = _Tables(tables)
        self._before: dict[str, dict[str, int]] = {}

    def log(self, step: int) -> None:
        """Adds one point to every curve. `hit_rate` is that since the last call."""
        for name, stats in self._tables:
            before = self._before.get(name, dict.fromkeys(stats, 0))
            for field in GAUGES:
                self._writer.add_scalar(f"{name}/{field}", stats[field], step)
            for field in COUNTERS:
                self._writer.add_scalar(f"{name}/{field}", stats[field] - before[field], step)
            hits = stats["hits"] - before["hits"]
            looked_up = hits + sum(stats[f] - before[f] for f in ("inserts", "refusals", "unadmitted"))
            if looked_up:
                self._writer.add_scalar(f"{name}/hit_rate", hits / looked_up, step)
            self._before[name] = stats
