"""Dump and load of rows and optimizer states, and the rows that changed since a given time.

Rank 0 writes the files (embstore.formats.sok has their format); every rank reads what it owns, so a dump of
any number of ranks loads into any other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import embstore
from embstore.checkpoint.errors import CheckpointError
from embstore.formats.sok import DumpReader, DumpWriter, TableReader, TableWriter
from sparse_operation_kit import bridge
from sparse_operation_kit.communication import Single, agree, tool_or_single
from sparse_operation_kit.dynamic import DynamicVariable
from sparse_operation_kit.interaction import filter_variables
from sparse_operation_kit.kept import arrays_of, facts_of, keeps_more, require_clock, restore, same_scores
from sparse_operation_kit.optimizer import RowOptimizer
from sparse_operation_kit.plain_optimizer import LISTS, PlainOptimizer
from sparse_operation_kit.static import StaticVariable

ROUND_BYTES = 64 << 20  # sent by a rank in one exchange
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def dump(path: str | os.PathLike[str], dump_vars: Any, optimizer: Any = None) -> None:
    """Writes keys, rows and, with an optimizer, its states into a directory. All ranks call it. Eager only.

    The dump appears in one step when it is complete; until then an older one stays what it was.

    Args:
        path: the directory.
        dump_vars: sok variables, or one of them.
        optimizer: an `OptimizerWrapper` or `SGD`. None: rows alone.

    Raises:
        ValueError: dump_vars or optimizer is something else.
        OSError: the files cannot be written; on every rank.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf, tempfile
        >>> sok.init()
        >>> table = sok.DynamicVariable(dimension=2, name="user")
        >>> count = sok.assign(table, tf.constant([7], tf.int64), tf.ones([1, 2]))
        >>> sok.dump(tempfile.mkdtemp() + "/weights", table)
    """
    variables, optimizer = _arguments("sok.dump", dump_vars, "dump_vars", optimizer)
    t = tool_or_single()
    if optimizer is not None:
        optimizer.create_slots(variables)
    output = _Output(path, t)
    agree(output.error)
    for variable in variables:
        output.begin(variable, optimizer)
        for block in _blocks(variable, optimizer, t):
            output.append([t.all_gather(array) for array in block])
        if _keeps_more(variable):
            for kind, array in arrays_of(variable.table, optimizer is not None).items():
                output.add_parts(kind, t.all_gather(array))
    output.finish(t.size, optimizer)
    agree(output.error)


class _Output:
    """The files, on rank 0; nothing on the others.

    Keeps a failure instead of raising it: rank 0 has to stay with the others until all come to the end.
    """

    def __init__(self, path: str | os.PathLike[str], t: Single) -> None:
        self.error: Exception | None = None
        self._writer = DumpWriter(path) if t.rank == 0 else None
        self._table: TableWriter | None = None
        self._do(lambda writer: writer.__enter__())

    def _do(self, action: Callable[[DumpWriter], object]) -> None:
        if self._writer is not None and self.error is None:
            self.error = _attempt(partial(action, self._writer))

    def begin(self, variable: Any, optimizer: RowOptimizer | PlainOptimizer | None) -> None:
        def begin(writer: DumpWriter) -> None:
            slots = () if optimizer is None else optimizer.slots
            name = "" if optimizer is None else optimizer.name
            facts = facts_of(variable.table, optimizer is not None) if _keeps_more(variable) else None
            self._table = writer.table(
                variable.name, _key_dtype(variable), optimizer=name, slots=slots, facts=facts
            )

        self._do(begin)

    def append(self, gathered: list[list[np.ndarray]]) -> None:
        """For each file the parts of all ranks."""

        def append(writer: DumpWriter) -> None:
            for keys, values, *states in zip(*gathered):
                self._table.append(keys, values, states)

        self._do(append)

    def add_parts(self, kind: str, of_ranks: list[np.ndarray]) -> None:
        """A file for each rank."""

        def add(writer: DumpWriter) -> None:
            for rank, array in enumerate(of_ranks):
                self._table.add_part(kind, rank, len(of_ranks), array)

        self._do(add)

    def finish(self, size: int, optimizer: RowOptimizer | PlainOptimizer | None) -> None:
        if self._writer is None:
            return
        self._writer.facts["world_size"] = size
        if optimizer is not None:
            self._writer.facts["optimizer"] = optimizer.name
            self._writer.facts["iterations"] = int(optimizer.iterations.numpy())
        if self.error is None:
            self._do(lambda writer: writer.__exit__(None, None, None))
        else:
            self._writer.__exit__(type(self.error), self.error, None)


def load(path: str | os.PathLike[str], load_vars: Any, optimizer: Any = None) -> None:
    """Reads what `dump` wrote, by any number of ranks. All ranks call it. Eager only.

    Rows of the same key are replaced, others stay. A damaged dump is refused before a row changes.

    Args:
        path: the directory.
        load_vars: sok variables, or one of them; the dump has tables of their names.
        optimizer: with it, its states and its count of updates come back too; where the dump has none, new
            rows get fresh ones.

    Raises:
        embstore.CheckpointError: the dump is damaged, or lacks a variable.
        ValueError: it does not fit a variable; on every rank.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf, tempfile
        >>> sok.init()
        >>> folder = tempfile.mkdtemp() + "/weights"
        >>> table = sok.DynamicVariable(dimension=2, name="user")
        >>> count = sok.assign(table, tf.constant([7], tf.int64), tf.ones([1, 2]))
        >>> sok.dump(folder, table)
        >>> other = sok.DynamicVariable(dimension=2, name="user")
        >>> sok.load(folder, other)
        >>> sok.export(other)[0].numpy().tolist()
        [7]
    """
    variables, optimizer = _arguments("sok.load", load_vars, "load_vars", optimizer)
    tables: list[TableReader] = []
    manifest: dict[str, Any] = {}

    def check() -> None:
        reader = DumpReader(path)
        manifest.update(reader.manifest or {})
        for variable in variables:
            table = reader.table(variable.name, verify=tool_or_single().rank == 0)
            _check_table(table, variable)
            tables.append(table)

    agree(_attempt(check))
    if optimizer is not None:
        optimizer.create_slots(variables)

    def read() -> None:
        for variable, table in zip(variables, tables):
            _load_table(variable, table, optimizer, manifest)
        if optimizer is not None and "iterations" in manifest:
            optimizer.iterations.assign(manifest["iterations"])

    agree(_attempt(read))


def incremental_model_dump(
    sok_vars: Any, time_threshold: Any, sess: Any = None
) -> tuple[list[Any], list[Any]]:
    """Keys and rows of all ranks that were looked up, assigned or updated after a given time.

    Args:
        sok_vars: dynamic variables.
        time_threshold: a datetime with a time zone, or one for each variable.
        sess: of TensorFlow 1; None otherwise.

    Returns:
        (keys, values): for each variable numpy arrays, sorted by key.

    Raises:
        ValueError: a variable is not dynamic or evicts by something else than "kLru", or a time has no time
            zone.

    Examples:
        >>> import sparse_operation_kit as sok, tensorflow as tf
        >>> from datetime import datetime, timezone
        >>> sok.init()
        >>> before = datetime.now(timezone.utc)
        >>> table = sok.DynamicVariable(dimension=2)
        >>> count = sok.assign(table, tf.constant([7], tf.int64), tf.ones([1, 2]))
        >>> keys, values = sok.incremental_model_dump([table], before)
        >>> keys[0].tolist()
        [7]
    """
    variables = list(sok_vars) if isinstance(sok_vars, (list, tuple)) else [sok_vars]
    many = isinstance(time_threshold, (list, tuple))
    moments = list(time_threshold) if many else [time_threshold]
    if len(moments) == 1:
        moments *= len(variables)
    if len(moments) != len(variables):
        raise ValueError(f"time_threshold should have 1 or {len(variables)} items but has: {len(moments)}")
    for variable in variables:
        if not isinstance(variable, DynamicVariable):
            raise ValueError(f"sok_vars should be dynamic variables but one is: {variable!r}")
        require_clock(variable.table)
    least = [_nanoseconds(moment) + 1 for moment in moments]
    t = tool_or_single()
    keys, values = [], []
    for variable, score in zip(variables, least):
        rows = embstore.Rows.concatenate(list(variable.table.export(min_score=score, with_states=False)))
        all_keys = np.concatenate(t.all_gather(rows.keys))
        order = np.argsort(all_keys, kind="stable")
        keys.append(all_keys[order])
        values.append(np.concatenate(t.all_gather(rows.values))[order])
    return keys, values


def _nanoseconds(moment: Any) -> int:
    if not isinstance(moment, datetime):
        raise ValueError(f"time_threshold should be a datetime but is: {moment!r}")
    if moment.utcoffset() is None:
        raise ValueError(f"time_threshold should have a time zone (pytz.utc) but has none: {moment!r}")
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


def _attempt(action: Any) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _arguments(
    function: str, variables: Any, name: str, optimizer: Any
) -> tuple[list[Any], RowOptimizer | PlainOptimizer | None]:
    bridge.require_eager(function)
    variables, optimizer = _variables(variables, name), _optimizer(optimizer)
    used = [v for v in variables if isinstance(v, StaticVariable)]
    if isinstance(optimizer, RowOptimizer):
        used.append(optimizer.iterations)
    for variable in used:
        if not hasattr(variable.handle, "numpy"):
            raise RuntimeError(
                f"{function} needs eager mode: {variable.name!r} belongs to a graph of tf.compat.v1. "
                "Dynamic variables can be dumped and loaded from there, without an optimizer"
            )
    return variables, optimizer


def _variables(value: Any, name: str) -> list[Any]:
    variables = list(value) if isinstance(value, (list, tuple)) else [value]
    _, others = filter_variables(variables)
    if others:
        raise ValueError(f"{name} should be sok variables but one is: {type(others[0]).__name__}")
    return variables


def _optimizer(value: Any) -> RowOptimizer | PlainOptimizer | None:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, RowOptimizer):
        return value
    if PlainOptimizer.accepts(value):
        return PlainOptimizer(value)
    raise ValueError(
        "optimizer should be a sok.OptimizerWrapper, or a Keras optimizer of static variables "
        f"({', '.join(LISTS)}), but is: {type(value).__name__}"
    )


# ---- out


def _keeps_more(variable: Any) -> bool:
    return isinstance(variable, DynamicVariable) and keeps_more(variable.table)


def _key_dtype(variable: Any) -> type[np.generic]:
    if isinstance(variable, DynamicVariable):
        return variable.key_type.as_numpy_dtype
    return np.uint64 if variable.target_gpu >= 0 else np.int64


def _blocks(
    variable: Any, optimizer: RowOptimizer | PlainOptimizer | None, t: Single
) -> Iterator[list[np.ndarray]]:
    """This rank's rows sorted by key, [keys, values, states...], in as many blocks as every other rank."""
    slots = 0 if optimizer is None else len(optimizer.slots)
    dim = variable.dimension
    if isinstance(variable, DynamicVariable):
        table = variable.table
        keys = np.sort(np.concatenate([b.keys for b in table.export(with_values=False, with_states=False)]))

        def read(part: slice) -> list[np.ndarray]:
            rows = table.read(keys[part])
            states = np.split(rows.states, slots, axis=1) if slots else []
            return [rows.values, *states, *([rows.scores] if keeps_more(table) else [])]
    else:
        keys = variable.local_keys()
        arrays = [variable.numpy()]
        if optimizer is not None:
            arrays += [optimizer.get_slot(variable, slot).numpy() for slot in optimizer.slots]

        def read(part: slice) -> list[np.ndarray]:
            return [array[part] for array in arrays]

    rows_a_block = max(1, ROUND_BYTES // (8 + 4 * dim * (1 + slots)))
    most = max(int(n[0]) for n in t.all_gather(np.array([len(keys)])))
    for begin in range(0, most, rows_a_block):
        part = slice(begin, begin + rows_a_block)
        yield [np.ascontiguousarray(array) for array in (keys[part], *read(part))]


# ---- in


def _check_table(table: TableReader, variable: Any) -> None:
    if len(table) and table.dim != variable.dimension:
        raise ValueError(
            f"{variable.name!r} should have the dimension {table.dim} of the dump "
            f"but has: {variable.dimension}"
        )
    if isinstance(variable, StaticVariable) and len(table):
        rows = int(variable.global_shape[0])
        least, most = int(np.min(table.keys)), int(np.max(table.keys))
        if least < 0 or most >= rows:
            raise ValueError(
                f"{variable.name!r} has no row for key {least if least < 0 else most} of the dump: "
                f"it has {rows} rows"
            )
    for name, states in table.states.items():
        if len(table) and states.shape[1] != table.dim:
            raise CheckpointError(
                f"{table.prefix}-{name} should have {table.dim} columns but has: {states.shape[1]}"
            )


def _stored_slots(table: TableReader, optimizer: RowOptimizer | PlainOptimizer | None) -> list[str]:
    """The names of this optimizer's states in the dump, or none where one is missing."""
    if optimizer is None:
        return []
    # The original writes the states of Adamax under the name of Adam.
    for name in (optimizer.name, *(["Adam"] if optimizer.name == "Adamax" else [])):
        stored = [f"{name}-{slot}" for slot in optimizer.slots]
        if all(slot in table.states for slot in stored):
            return stored
    return []


def _load_table(
    variable: Any,
    table: TableReader,
    optimizer: RowOptimizer | PlainOptimizer | None,
    manifest: dict[str, Any],
) -> None:
    t = tool_or_single()
    facts = manifest.get("tables", {}).get(table.prefix, {})
    dynamic = isinstance(variable, DynamicVariable)
    with_scores = dynamic and same_scores(variable.table, facts)
    dropped = -_dropped(variable)
    stored = _stored_slots(table, optimizer)
    rows_a_block = max(1, ROUND_BYTES // (8 + 4 * variable.dimension * (1 + len(stored))))
    for begin in range(0, len(table), rows_a_block):
        keys, values, states = table.block(begin, begin + rows_a_block)
        keys, scores = keys.astype(np.int64), table.scores(begin, begin + rows_a_block)
        if variable.target_gpu >= 0:
            mine = np.full(len(keys), variable.target_gpu == t.rank)
        else:
            mine = embstore.owner(keys, t.size) == t.rank
        if not mine.any():
            continue
        keys, values, parts = keys[mine], values[mine], [states[name][mine] for name in stored]
        if dynamic:
            together = np.concatenate(parts, axis=1) if parts else None
            kept = scores[mine] if with_scores and scores is not None else None
            variable.table.insert_or_assign(keys, values, states=together, scores=kept)
            continue
        rows = variable.key_map(keys)
        variable.scatter_update(tf.IndexedSlices(tf.cast(values, variable.dtype), rows))
        if optimizer is not None:
            for slot, part in zip(optimizer.slots, parts):
                optimizer.get_slot(variable, slot).scatter_update(tf.IndexedSlices(part, rows))
    if dynamic and facts:
        restore(variable.table, table, facts, t.rank, t.size, int(manifest.get("world_size", 1)))
    dropped += _dropped(variable)
    if dropped:
        warnings.warn(
            f"{variable.name!r} dropped {dropped} rows while {len(table)} were loaded: "
            f"max_capacity is {variable.table.stats().max_capacity} on each rank",
            UserWarning,
            stacklevel=2,
        )


def _dropped(variable: Any) -> int:
    """Rows that found no room so far."""
    if not isinstance(variable, DynamicVariable):
        return 0
    stats = variable.table.stats()
    return stats.evictions + stats.refusals
