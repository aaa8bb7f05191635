"""What an operator watches while tables are trained: Prometheus, TensorBoard.

    embstore.metrics.watch({"user": table})            # into prometheus_client's default registry
    prometheus_client.start_http_server(9100)

    board = embstore.metrics.TensorBoard(SummaryWriter("runs/1"), {"user": table})
    board.log(step)

Counters are read from the tables when somebody asks, so watching costs a training step nothing.
Prometheus needs the extra `metrics`: pip install 'embstore[metrics]'
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from embstore.table import Table

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


def watch(tables: Mapping[str, Table], registry: Any = None) -> TableCollector:
    """Lets Prometheus read the counters of tables.

    tables    by the name they get in the label `table`
    registry  of prometheus_client; None is its default one. `registry.unregister` ends it

    Raises ImportError when prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError("metrics need: pip install 'embstore[metrics]'") from error
    collector = TableCollector(tables)
    (registry or prometheus_client.REGISTRY).register(collector)
    return collector


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
