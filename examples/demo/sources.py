"""Where the demo's impressions come from: the made-up click stream, or a file.

    names    user                item                   a column of ids for each feature
    ids      -5038101713…        8821730116…            int64 (features, batch)
    numbers                                             float32 (batch, 0; 13 for Criteo)
    clicks   1                                          float32 (batch)

A source can be pickled: it continues with the batch that comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.click_stream import BATCH, Stream

CRITEO_NUMBERS, CRITEO_IDS = 13, 26
RATING_OF_A_CLICK = 4  # of 5 stars
MISSING = -1  # the id of a category that a line leaves empty

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


class Clicks:
    """The stream of examples/click_stream.py, in which users and items come and go."""

    names = ("user", "item")
    width = 0

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.batch_size = steps, BATCH
        self._stream = Stream(seed)
        self.distinct = self._stream.active + int(self._stream.active * self._stream.turnover) * steps
        self.capacity = 32768

    def next(self) -> Batch:
        users, items, clicks = self._stream.batch()
        return np.stack([users, items]), np.empty((len(users), 0), np.float32), clicks.numpy()


@dataclass
class Recorded:
    """Impressions of a file, in its order, each seen once."""

    names: tuple[str, ...]
    ids: np.ndarray
    numbers: np.ndarray
    clicks: np.ndarray
    steps: int
    at: int = 0

    def __post_init__(self) -> None:
        self.batch_size = min(BATCH, max(64, len(self.clicks) // self.steps // 2 * 2))
        self.steps = min(self.steps, len(self.clicks) // self.batch_size)
        if self.steps < 50:
            need = 50 * self.batch_size
            raise SystemExit(f"--data should have at least {need:,} lines but has: {len(self.clicks):,}")
        self.width = self.numbers.shape[1]
        self.distinct = max(len(np.unique(column)) for column in self.ids)
        self.capacity = 1 << max(8, (self.distinct // 4).bit_length())

    def next(self) -> Batch:
        part = slice(self.at, self.at + self.batch_size)
        self.at += self.batch_size
        return self.ids[:, part], self.numbers[part], self.clicks[part]


def _ratings(path: Path, steps: int) -> Recorded:
    """user, item, rating, timestamp: Parquet, or text with tabs, commas or '::' and perhaps a header."""
    if path.read_bytes()[:4] == b"PAR1":
        import pyarrow.parquet as parquet

        columns = [column.to_numpy() for column in parquet.read_table(path).columns[:4]]
    else:
        lines = path.read_text().replace("::", ",").replace("\t", ",").splitlines() or [""]
        lines = lines[not lines[0][:1].isdigit() :]
        columns = list(np.array([line.split(",")[:4] for line in lines if line], np.float64).T)
    users, items, stars, times = columns
    order = np.argsort(times, kind="stable")
    ids = np.stack([users, items]).astype(np.int64)[:, order]
    clicks = (stars[order] >= RATING_OF_A_CLICK).astype(np.float32)
    return Recorded(("user", "item"), ids, np.empty((len(clicks), 0), np.float32), clicks, steps)


def _criteo(path: Path, steps: int) -> Recorded:
    """Tabs between a label, 13 integers and 26 categories in hex, any of them empty."""
    import pyarrow as arrow
    from pyarrow import csv

    names = ["label", *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))]
    types = {name: arrow.string() if name[0] == "c" else arrow.float32() for name in names}
    table = csv.read_csv(
        path,
        read_options=csv.ReadOptions(column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
    ).slice(0, steps * BATCH)

    def ids(name: str) -> np.ndarray:
        column = table[name].combine_chunks().dictionary_encode()
        values = np.array([int(value, 16) for value in column.dictionary.to_pylist()] + [MISSING], np.int64)
        return values[column.indices.fill_null(len(values) - 1).to_numpy()]

    numbers = np.stack([table[name].fill_null(0).to_numpy() for name in names[1:14]], 1)
    numbers = np.log1p(np.maximum(numbers, 0)).astype(np.float32)
    categories = names[14:]
    clicks = table["label"].to_numpy().astype(np.float32)
    return Recorded(tuple(categories), np.stack([ids(name) for name in categories]), numbers, clicks, steps)


def open_source(data: str | None, steps: int, seed: int) -> Clicks | Recorded:
    """The click stream, or the file in MovieLens' or Criteo's format. SystemExit names what is wrong."""
    if data is None:
        return Clicks(steps, seed)
    path = Path(data)
    if not path.is_file():
        raise SystemExit(f"--data should be a file but is: {data}")
    with path.open("rb") as file:
        fields = file.readline().rstrip(b"\r\n").split(b"\t")
    try:
        return (_criteo if len(fields) == 1 + CRITEO_NUMBERS + CRITEO_IDS else _ratings)(path, steps)
    except (ValueError, UnicodeDecodeError) as error:
        raise SystemExit(
            f"--data should hold user, item, rating and timestamp (MovieLens), or a label, 13 numbers and 26 "
            f"hex categories between tabs (Criteo), but in {data}: {error}"
        ) from None
