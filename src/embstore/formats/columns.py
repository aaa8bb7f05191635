"""A table of a dump or of a log as plain arrays, and what can be asked of them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.shared import as_records
from embstore.checkpoint.spec import TableSpec
from embstore.extras import missing
from embstore.rows import Rows
from embstore.table import Table

if TYPE_CHECKING:
    import pandas
    import pyarrow

Array = npt.NDArray[Any]
# Keys in the metadata of foreign files: the description of a table, and its shared rows as records in base64.
DESCRIPTION, SHARED = "embstore", "embstore_shared"


class Columns(ABC):
    """Keys, vectors, scores and optimizer states; row i of each belongs to key i."""

    name: str
    collection: str
    spec: TableSpec | None

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many keys there are."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Components of a vector."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """Of its files."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Of all files of the table."""

    @property
    @abstractmethod
    def world(self) -> int:
        """How many ranks wrote it; 0 where the files do not say."""

    @property
    @abstractmethod
    def has_scores(self) -> bool:
        """Whether the files have scores."""

    @property
    @abstractmethod
    def state_names(self) -> list[str]:
        """Optimizer states by their names in files, in the order of a row."""

    @property
    @abstractmethod
    def keys(self) -> npt.NDArray[np.int64]:
        """(n)"""

    @property
    @abstractmethod
    def values(self) -> npt.NDArray[np.float32]:
        """(n, dim)"""

    @property
    @abstractmethod
    def scores(self) -> npt.NDArray[np.uint64]:
        """(n); 0 where there are no scores."""

    @abstractmethod
    def _state(self, i: int) -> npt.NDArray[np.float32]:
        """(n, width of the state)"""

    @abstractmethod
    def blocks(self, block_rows: int = 65536) -> Iterator[Rows]:
        """All rows with states and scores."""

    @property
    @abstractmethod
    def shared(self) -> Rows | None:
        """Shared rows by number; None where the table has none."""

    @property
    def label(self) -> str:
        return f"{self.collection}/{self.name}"

    def state(self, name: str) -> npt.NDArray[np.float32]:
        """An optimizer state by its name in files, such as "m"."""
        if name not in self.state_names:
            raise KeyError(f"state should be one of {', '.join(self.state_names) or 'none'} but is: {name!r}")
        return self._state(self.state_names.index(name))

    @cached_property
    def _order(self) -> Array:
        return np.argsort(self.keys, kind="stable")

    def locate(self, keys: object) -> Array:
        """The row number of each key, -1 where it is not there. The first call sorts the keys."""
        wanted = np.asarray(keys, np.int64)
        if self.rows == 0:
            return np.full(wanted.shape, -1)
        at = np.searchsorted(self.keys, wanted, sorter=self._order)
        at = self._order[np.minimum(at, self.rows - 1)]
        return np.where(self.keys[at] == wanted, at, -1)

    def find(self, keys: object) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Vectors of the keys and which of them are there; others read 0.0."""
        at = self.locate(keys)
        found = at >= 0
        vectors = np.zeros((*at.shape, self.dim), np.float32)
        vectors[found] = self.values[at[found]]
        return vectors, found

    def description(self) -> dict[str, str]:
        """What the table is, with its shared rows, as metadata of a foreign file; empty where that is not
        known."""
        return _description(self.spec, self.shared, bool(self.state_names)) if self.spec else {}

    def to_arrow(self) -> pyarrow.Table:
        """Columns key, vector (a list of fixed size), score, and one for each optimizer state."""
        states = {name: self.state(name) for name in self.state_names}
        return _arrow(self.keys, self.values, self.scores, states, self.description())

    def tensors(self) -> dict[str, Array]:
        """keys, values, scores and states by name: what goes into a safetensors file."""
        arrays: dict[str, Array] = {"keys": self.keys, "values": self.values, "scores": self.scores}
        return arrays | {f"state.{name}": self.state(name) for name in self.state_names}

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, rows={self.rows}, dim={self.dim}, layout={self.layout!r})"


def _description(spec: TableSpec, shared: Rows | None, states: bool) -> dict[str, str]:
    found = {DESCRIPTION: json.dumps(spec.to_dict(), sort_keys=True)}
    if shared is not None:
        found[SHARED] = b64encode(as_records(shared, optim=states).tobytes()).decode()
    return found


def _arrow(
    keys: Array, values: Array, scores: Array, states: dict[str, Array], metadata: dict[str, str]
) -> pyarrow.Table:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing("an Arrow table", "files", error) from error

    def vectors(array: Array) -> Any:
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])

    columns = {"key": pa.array(keys), "vector": vectors(values), "score": pa.array(scores)}
    columns |= {name: vectors(state) for name, state in states.items()}
    return pa.table(columns).replace_schema_metadata(metadata or None)


def _rows_and_states(table: Table, states: bool) -> tuple[Rows, dict[str, Array]]:
    rows = table.rows()
    spec = TableSpec.of(table)
    named = {name: rows.states[:, at : at + width] for name, at, width in spec.file_states()}
    return rows, named if states else {}


def arrow_of_table(table: Table, states: bool) -> pyarrow.Table:
    """The rows of a live table as `Columns.to_arrow` has those of a stored one."""
    rows, named = _rows_and_states(table, states)
    shared = table.shared_rows() if table.options.shared_rows else None
    described = _description(TableSpec.of(table), shared, states)
    return _arrow(rows.keys, rows.values, rows.scores, named, described)


def pandas_of_table(table: Table, states: bool) -> pandas.DataFrame:
    """The rows of a live table, a column for each component."""
    try:
        import pandas as pd
    except ImportError as error:
        raise missing("a DataFrame", "pandas", error) from error
    rows, named = _rows_and_states(table, states)
    parts = [pd.DataFrame({"score": rows.scores})]
    for name, array in {"vector": rows.values, **named}.items():
        parts.append(pd.DataFrame(array, columns=[f"{name}_{i}" for i in range(array.shape[1])]))
    return pd.concat(parts, axis=1).set_index(pd.Index(rows.keys, name="key"))
