"""Dumps to and from other kinds of files.

v1a, v2       the layouts of dumps; also from dumps of the original package that have no manifest
safetensors   {collection}/{table}.safetensors with keys, values, scores and state.*
parquet       {collection}/{table}.parquet with columns key, vector, score and one for each state
sok           files of SparseOperationKit, {table}_0-key and so on, for a variable named {table}; they keep
              no scores
one_embedding  snapshots of OneEmbedding's persistent tables, {table}/0-1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import embstore.checkpoint.merging as merging
import embstore.checkpoint.one_embedding_files as one_embedding_files
from embstore.checkpoint.drafts import Draft, check_target
from embstore.checkpoint.dumping import start
from embstore.checkpoint.layouts import WRITTEN
from embstore.checkpoint.names import file_stem, name_of
from embstore.checkpoint.ranks import CheckpointError, Ranks
from embstore.checkpoint.reading import Dump, open_dump
from embstore.checkpoint.sources import Source, block_source
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.writing import Order, Progress
from embstore.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, Ftrl, Optimizer, from_dict
from embstore.sok_files import STATES, DumpReader, DumpWriter
from embstore.table import Rows

FORMATS = (*WRITTEN, "safetensors", "parquet", "sok", "one_embedding")
# The names of SOK's optimizers say which rule it was, but not its numbers.
_SOK_OPTIMIZERS: tuple[Optimizer, ...] = (
    SGD(),
    SGD(momentum=0.9, velocity=True),
    Adagrad(),
    Adam(),
    Adamax(),
    Adadelta(),
    Ftrl(),
)


@dataclass(frozen=True)
class OneEmbeddingOptions:
    """What files of OneEmbedding do not say.

    snapshot   its name; to be read: the only one when None, to be written: "converted" when None
    dim        floats of the vector, the first of a row; None: the whole row
    optimizer  the class whose state the rest of a row is
    """

    snapshot: str | None = None
    dim: int | None = None
    optimizer: str = "SGD"


def convert(
    path: Path,
    target: Path,
    to: str,
    progress: Progress | None = None,
    one_embedding: OneEmbeddingOptions | None = None,
) -> None:
    """Writes `target` in the format `to` from a dump, or from a folder that this made earlier."""
    one_embedding = one_embedding or OneEmbeddingOptions()
    if to not in FORMATS:
        raise ValueError(f"--to should be one of {', '.join(FORMATS)} but is: {to!r}")
    if to in WRITTEN:
        files = sorted(p for p in path.rglob("*") if p.suffix in (".safetensors", ".parquet"))
        if files:
            return _write(target, to, [_source(file, name_of(file.parent.name)) for file in files], progress)
        if any(path.glob("*-key")):
            return _write(target, to, _sok_sources(path), progress, optim=True)
        stored = one_embedding_files.tables_in(path)
        if stored:
            with ExitStack() as stack:
                sources = [
                    _one_embedding_source(name, found, one_embedding, stack) for name, found in stored.items()
                ]
                return _write(target, to, sources, progress, optim=True)
        dump = open_dump(path)
        dump.verify()
        if dump.manifest is not None:
            merging.rewrite(dump, [], target, layout=to, progress=progress)
            return None
        sources = [
            block_source(t.collection, _plain_spec(t.name, t.dim), t.rows, t.blocks()) for t in dump.tables
        ]
        return _write(target, to, sources, progress)
    dump = open_dump(path)
    dump.verify()
    if to == "sok":
        return _write_sok(target, dump, progress)
    if to == "one_embedding":
        return one_embedding_files.write(target, dump, one_embedding.snapshot or "converted", progress)
    draft = Draft(target)
    with draft.publishing():
        for number, table in enumerate(dump.tables):
            folder = draft.path / file_stem(table.collection)
            folder.mkdir(exist_ok=True)
            file = folder / f"{file_stem(table.name)}.{to}"
            if to == "parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(table.to_arrow(), file)
            else:
                from safetensors.numpy import save_file

                arrays = {name: np.ascontiguousarray(array) for name, array in table.tensors().items()}
                save_file(arrays, file)
            if progress:
                progress(number + 1, len(dump.tables))
    return None


def _plain_spec(name: str, dim: int, optimizer: Optimizer | None = None) -> TableSpec:
    """A table of which nothing is known but its rows: float32, scores as customized ones."""
    from embstore.table import Table

    optimizer = optimizer or SGD()
    table = Table(name, dim=dim, optimizer=optimizer, score_strategy="customized", init_capacity=128)
    try:
        return TableSpec.of(table)
    finally:
        table.close()


def _source(file: Path, collection: str) -> Source:
    keys, values, scores = _arrays(file)
    if values.ndim != 2 or len(values) != len(keys) or len(scores) != len(keys):
        raise CheckpointError(f"{file}: keys, values and scores should have as many rows")

    def blocks() -> Iterator[Rows]:
        states = np.empty((len(keys), 0), np.float32)
        yield Rows(keys, values, states, np.maximum(scores, np.uint64(1)))

    return block_source(collection, _plain_spec(name_of(file.stem), values.shape[1]), len(keys), blocks())


def _arrays(file: Path) -> tuple[Any, Any, Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file).combine_chunks()
        missing = {"key", "vector"} - set(table.column_names)
        if missing:
            raise CheckpointError(f"{file}: has no column {', '.join(sorted(missing))}")
        vectors = table["vector"].chunk(0) if table.num_rows else None
        dim = table.schema.field("vector").type.list_size
        values = np.asarray(vectors.flatten(), np.float32).reshape(-1, dim) if vectors else np.empty((0, dim))
        keys = table["key"].to_numpy().astype(np.int64)
        scores = table["score"].to_numpy() if "score" in table.column_names else np.ones(len(keys))
        return keys, values.astype(np.float32), scores.astype(np.uint64)
    from safetensors.numpy import load_file

    arrays = load_file(file)
    missing = {"keys", "values"} - set(arrays)
    if missing:
        raise CheckpointError(f"{file}: has no tensor {', '.join(sorted(missing))}")
    keys = arrays["keys"].astype(np.int64)
    scores = arrays.get("scores", np.ones(len(keys)))
    return keys, arrays["values"].astype(np.float32), scores.astype(np.uint64)


def _sok_sources(path: Path) -> list[Source]:
    reader, sources = DumpReader(path), []
    for prefix in reader.tables():
        table = reader.table(prefix)
        engine_name, states = table.engine_states()
        optimizer = next(o for o in _SOK_OPTIMIZERS if o.engine_name == engine_name)
        spec = _plain_spec(prefix.removesuffix("_0"), max(table.dim, 1), optimizer)
        steps = int((reader.manifest or {}).get("iterations", 0))
        if states is None:
            states = np.empty((len(table), 0), np.float32)
        rows = Rows(
            table.keys.astype(np.int64),
            np.asarray(table.values, np.float32).reshape(len(table), spec.dim),
            np.asarray(states, np.float32).reshape(len(table), spec.state_width),
            np.ones(len(table), np.uint64),
        )
        sources.append(block_source("sok", replace(spec, optimizer_step=steps), len(table), iter([rows])))
    return sources


def _one_embedding_source(
    name: str, directories: list[Path], options: OneEmbeddingOptions, stack: ExitStack
) -> Source:
    table = one_embedding_files.StoredTable(directories, options.snapshot, stack)
    optimizer = from_dict({"name": options.optimizer})
    spec = _plain_spec(name, table.width if options.dim is None else options.dim, optimizer)
    if spec.dim + spec.state_width != table.width:
        raise ValueError(
            f"--dim and --optimizer should make rows of {table.width} floats, as table {name!r} has, but "
            f"are {spec.dim} and {options.optimizer}, which make: {spec.dim + spec.state_width}"
        )
    return block_source("one_embedding", spec, len(table), table.blocks(spec.dim))


def _write_sok(target: Path, dump: Dump, progress: Progress | None) -> None:
    check_target(target)
    with DumpWriter(target) as writer:
        writer.facts["world_size"] = 1
        for number, table in enumerate(dump.tables):
            optimizer, slots = STATES.get(table.spec.engine_optimizer if table.spec else "", ("", ()))
            if len(table.state_names) != len(slots):
                slots = ()  # dumped without states, or they have no name in SOK
            # TensorFlow adds ":0" to the name of a variable.
            output = writer.table(f"{table.name}:0", np.int64, optimizer=optimizer, slots=slots)
            for rows in table.blocks():
                states = np.split(rows.states, len(slots), axis=1) if slots else []
                output.append(rows.keys, rows.values, states)
            if progress:
                progress(number + 1, len(dump.tables))


def _write(
    target: Path, layout: str, sources: list[Source], progress: Progress | None, optim: bool = False
) -> None:
    ranks = Ranks()
    start(target, {0: sources}, 1, Order(layout, optim=optim), ranks).run(ranks, progress=progress)
