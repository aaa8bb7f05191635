"""What a file of columns says about its table.

Files written from a dump describe their table in the metadata "embstore"; in others, the names of the
optimizer states tell the optimizer.
"""

from __future__ import annotations

import json
import warnings
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import file_size
from embstore.checkpoint.names import name_of
from embstore.checkpoint.shared import read_records
from embstore.checkpoint.spec import TableSpec
from embstore.formats.columns import DESCRIPTION, SHARED
from embstore.optimizers import OPTIMIZERS, SGD, Optimizer
from embstore.rows import Rows
from embstore.table import Table

Array = npt.NDArray[Any]


@dataclass
class DescribedTable:
    """The columns of one file, and its metadata: JSON of a `TableSpec` and the shared rows, or nothing."""

    keys: Array
    values: Array
    scores: Array | None
    states: dict[str, Array] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def spec_and_rows(self, file: Path) -> tuple[TableSpec, Rows]:
        """What the table is, and its rows. Raises CheckpointError where columns do not fit together."""
        keys, values = self.keys, self.values
        scores = np.ones(keys.shape) if self.scores is None else self.scores
        self._require_fitting(file, scores)
        widths = {name: state.shape[1] for name, state in self.states.items()}
        spec = self._spec(file, widths)
        names = [name for name, _, _ in spec.file_states()] if self.states else []
        states = [self.states[name] for name in names]
        joined = np.concatenate(states, axis=1) if states else np.empty((len(keys), 0))
        left_out = sorted(set(self.states) - set(names))
        if left_out:
            warnings.warn(
                f"{file}: {', '.join(left_out)} are not states of a known optimizer and are left out",
                stacklevel=2,
            )
        as_float = (np.asarray(values, np.float32), np.asarray(joined, np.float32))
        return spec, Rows(
            keys.astype(np.int64), *as_float, np.maximum(scores.astype(np.uint64), np.uint64(1))
        )

    def _require_fitting(self, file: Path, scores: Array) -> None:
        keys, rows = self.keys, {"vectors": self.values, **self.states}
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            raise CheckpointError(f"{file}: expected integer keys (n), found {keys.dtype} {keys.shape}")
        for name, column in rows.items():
            if column.ndim != 2 or column.dtype.kind != "f":
                raise CheckpointError(
                    f"{file}: expected {name} (n, width) of floats, found {column.dtype} {column.shape}"
                )
        if scores.ndim != 1 or scores.dtype.kind not in "iuf" or not ((scores >= 0) & (scores < 2**64)).all():
            raise CheckpointError(f"{file}: expected scores (n) from 0 to 2^64 - 1")
        for name, column in {**rows, "scores": scores}.items():
            if len(column) != len(keys):
                raise CheckpointError(
                    f"{file}: expected {len(keys)} {name}, one for each key, found {len(column)}"
                )

    def shared(self, file: Path, spec: TableSpec) -> Rows | None:
        """The shared rows; None where the table has none. Raises CheckpointError where they do not fit."""
        if not spec.shared_rows:
            return None
        try:
            data = np.frombuffer(b64decode(self.metadata.get(SHARED, ""), validate=True), np.uint8)
        except ValueError as error:
            raise CheckpointError(f"{file}: its shared rows cannot be read: {error}") from error
        return read_records(data, spec, spec.state_width if self.states else 0, file)

    def _spec(self, file: Path, widths: dict[str, int]) -> TableSpec:
        dim = self.values.shape[1]
        description = self.metadata.get(DESCRIPTION)
        if not description:
            return inferred_spec(name_of(file.stem), dim, widths, {})
        try:
            spec = TableSpec.from_dict(json.loads(description))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: its description is not that of a table: {error}") from error
        expected = {name: width for name, _, width in spec.file_states()} if widths else {}
        if (spec.dim, expected) != (dim, widths):
            raise CheckpointError(
                f"{file}: expected vectors of {spec.dim} components and states {expected} by its "
                f"description, found {dim} and {widths}"
            )
        return spec


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns whatever a library raises for a damaged file into a CheckpointError that names the file."""
    file_size(file)  # a pipe would block
    try:
        yield
    except (CheckpointError, ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many kinds for damaged files, OSError among them
        raise CheckpointError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def require_columns(file: Path, kind: str, needed: set[str], found: set[str]) -> None:
    if needed - found:
        raise CheckpointError(f"{file}: has no {kind} {', '.join(sorted(needed - found))}")


def plain_spec(name: str, dim: int, optimizer: Optimizer | None = None) -> TableSpec:
    """A table of which nothing is known but its rows: float32, scores as customized ones."""
    table = Table(name, dim=dim, optimizer=optimizer or SGD(), score_strategy="customized", init_capacity=128)
    try:
        return TableSpec.of(table)
    finally:
        table.close()


def inferred_spec(name: str, dim: int, widths: dict[str, int], arguments: dict[str, Any]) -> TableSpec:
    """A table whose states have these names and widths, with the numbers of its opt_args.json, if it has one.

    Raises ValueError where such a number is none.
    """
    candidates: list[Optimizer] = [SGD(), SGD(momentum=0.9), *(kind() for kind in OPTIMIZERS)]
    for optimizer in candidates if widths else []:
        spec = plain_spec(name, dim, optimizer)
        if {n: width for n, _, width in spec.file_states()} == widths:
            break
    else:
        spec = plain_spec(name, dim)
    numbers = dict(spec.optimizer)
    if "betas" in numbers and "beta1" in arguments:
        numbers["betas"] = (arguments["beta1"], arguments.get("beta2"))
    for known in ("eps", "weight_decay", "initial_accumulator_value"):
        if known in numbers and known in arguments:
            numbers[known] = arguments[known]
    strategy = {"KLru": "timestamp", "KLfu": "lfu"}.get(
        str(arguments.get("evict_strategy")).rpartition(".")[2]
    )
    score = arguments.get("step_score", 0)
    if strategy is None and score:
        strategy = "step"
    spec = replace(
        spec,
        optimizer=numbers,
        learning_rate=arguments.get("lr", spec.learning_rate),
        optimizer_step=arguments.get("iters", 0),
        score_strategy=strategy or spec.score_strategy,
        score=score if strategy == "step" else 0,
    )
    return TableSpec.from_dict(spec.to_dict())
