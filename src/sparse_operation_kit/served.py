"""Variables over a reader: a trained model becomes a serving model, without ranks.

model = sok.serving_model(model, "/data/log")      # reads what embstore.dump or an IncrementLog wrote
model(batch)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from embstore.serving import Reader
from sparse_operation_kit import bridge
from sparse_operation_kit.dynamic import DynamicVariable


class ServedVariable:
    """The rows of a table of a reader, for lookups alone. A key without a row reads zeros.

    `sok.lookup_sparse` and `sok.all2all_dense_embedding` take it, whatever `training` says and without
    `sok.init`.

    Args:
        reader: an embstore.serving.Reader.
        name: of the table, with its collection ("model/user") where another has the same name.

    Raises:
        KeyError: the reader has no such table.

    Examples:
        >>> import embstore, sparse_operation_kit as sok, tempfile, tensorflow as tf
        >>> from embstore.serving import Reader
        >>> table = embstore.Table("user", dim=2)
        >>> table.insert_or_assign([7], [[1, 2]])
        >>> folder = tempfile.mkdtemp() + "/dump"
        >>> embstore.dump(folder, {"model": {"user": table}})
        >>> with Reader(folder) as reader:
        ...     rows = sok.ServedVariable(reader, "user")
        ...     print(sok.lookup_sparse(rows, tf.ragged.constant([[7, 8]]), combiners="sum").numpy().tolist())
        [[1.0, 2.0]]
    """

    def __init__(self, reader: Reader, name: str) -> None:
        state = reader.state
        if name not in state.names:
            tables = ", ".join(sorted(n for n in state.names if "/" in n))
            raise KeyError(f"variable {name!r} is not in {reader.path}, which has: {tables}")
        self.reader, self.name, self.trainable, self.dtype = reader, name, False, tf.float32
        self.dimension = int(state.tables[state.names[name]].dim)

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([None, self.dimension])

    def __repr__(self) -> str:
        return f"<sok.ServedVariable {self.name!r} shape=(None, {self.dimension}) of {self.reader.path}>"


def _states(variables: Sequence[ServedVariable]) -> list[Any]:
    """One state of each reader for all of a call."""
    states = {id(v.reader): v.reader.state for v in variables}
    return [states[id(v.reader)] for v in variables]


def read_served(variables: Sequence[ServedVariable], keys: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """keys[i].shape + (dimension,) of variables[i]."""

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        return [s.find(v.name, k)[0] for s, v, k in zip(_states(variables), variables, arrays)]

    rows = bridge.call(run, keys, [tf.float32] * len(variables))
    for row, variable, k in zip(rows, variables, keys):
        row.set_shape(k.shape.concatenate([variable.dimension]))
    return rows


def pool_served(
    variables: Sequence[ServedVariable],
    keys: Sequence[tf.Tensor],
    offsets: Sequence[tf.Tensor],
    combiners: Sequence[str],
) -> list[tf.Tensor]:
    """(samples, dimension) of each request, pooled by the engine."""
    count = len(variables)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        parts = zip(_states(variables), variables, arrays[:count], arrays[count:], combiners)
        return [s.bags(v.name, k, o, mode=c) for s, v, k, o, c in parts]

    pooled = bridge.call(run, [*keys, *offsets], [tf.float32] * count)
    for vectors, variable in zip(pooled, variables):
        vectors.set_shape([None, variable.dimension])
    return pooled


def serving_model(
    model: Any, source: str | os.PathLike[str] | Reader, *, collection: str | None = None, **options: Any
) -> Any:
    """Puts a `ServedVariable` in the place of each DynamicVariable of a model. Static variables stay.

    The model itself is changed: call it in the process that serves.

    Args:
        model: a layer, a Keras model or a tf.Module.
        source: the folder (or URL) of a dump or an increment log, or a Reader.
        collection: of the tables; needed where several have tables of one name.
        **options: for the Reader, such as dtype="int8".

    Returns:
        The model.

    Raises:
        ValueError: it has no DynamicVariable.
        KeyError: the source lacks one; then nothing has changed.

    Examples:
        >>> import embstore, sparse_operation_kit as sok, tempfile, tensorflow as tf
        >>> sok.init()
        >>> model = tf.Module()
        >>> model.rows = sok.DynamicVariable(dimension=2, name="user", initializer="ones")
        >>> vectors = sok.lookup_sparse(model.rows, tf.ragged.constant([[7]]))
        >>> folder = tempfile.mkdtemp() + "/dump"
        >>> embstore.dump(folder, {"sok": {model.rows.name: model.rows.table}})
        >>> served = sok.serving_model(model, folder)
        >>> sok.lookup_sparse(served.rows, tf.ragged.constant([[7]])).numpy().tolist()
        [[1.0, 1.0]]
    """
    reader = source if isinstance(source, Reader) else Reader(source, **options)
    served: dict[int, ServedVariable] = {}
    places: list[tuple[Any, Any, ServedVariable]] = []

    def stand_in(variable: DynamicVariable) -> ServedVariable:
        if id(variable) not in served:
            name = variable.name if collection is None else f"{collection}/{variable.name}"
            served[id(variable)] = ServedVariable(reader, name)
        return served[id(variable)]

    def visit(value: Any, seen: set[int], top: bool = False) -> None:
        if id(value) in seen:
            return
        if isinstance(value, dict):
            inside: list[tuple[Any, Any]] = list(value.items())
        elif isinstance(value, list):
            inside = list(enumerate(value))
        elif hasattr(value, "__dict__") and (top or hasattr(type(value), "trainable_variables")):
            inside = list(vars(value).items())
        else:
            return
        seen.add(id(value))
        for key, item in inside:
            if isinstance(item, DynamicVariable):
                places.append((value, key, stand_in(item)))
            elif isinstance(item, tuple) and any(isinstance(part, DynamicVariable) for part in item):
                parts = [stand_in(p) if isinstance(p, DynamicVariable) else p for p in item]
                places.append((value, key, tuple(parts)))  # type: ignore[arg-type]
            else:
                visit(item, seen)

    visit(model, set(), top=True)
    if not places:
        raise ValueError("model should have a DynamicVariable but has none")
    for holder, key, stand in places:
        if isinstance(holder, (dict, list)):
            holder[key] = stand
        else:
            setattr(holder, key, stand)
    return model
