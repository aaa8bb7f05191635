"""Dumps to and from other kinds of files.

v1a, v2       the layouts of dumps; also from dumps of the original package that have no manifest
safetensors   {collection}/{table}.safetensors with keys, values, scores and state.*
parquet       {collection}/{table}.parquet with columns key, vector, score and one for each state
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import embstore.checkpoint.merging as merging
from embstore.checkpoint.dumping import start
from embstore.checkpoint.files import Draft
from embstore.checkpoint.layouts import WRITTEN
from embstore.checkpoint.names import file_stem, name_of
from embstore.checkpoint.ranks import CheckpointError, Ranks
from embstore.checkpoint.reading import open_dump
from embstore.checkpoint.sources import Source, block_source
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.writing import Order, Progress
from embstore.optimizers import SGD
from embstore.table import Rows

FORMATS = (*WRITTEN, "safetensors", "parquet")


def convert(path: Path, target: Path, to: str, progress: Progress | None = None) -> None:
    """Writes `target` in the format `to` from a dump, or from a folder that this made earlier."""
    if to not in FORMATS:
        raise ValueError(f"--to should be one of {', '.join(FORMATS)} but is: {to!r}")
    if to in WRITTEN:
        files = sorted(p for p in path.rglob("*") if p.suffix in (".safetensors", ".parquet"))
        if files:
            return _write(target, to, [_source(file, name_of(file.parent.name)) for file in files], progress)
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
    draft = Draft(target)
    try:
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
        draft.publish()
    except BaseException:
        draft.discard()
        raise
    return None


def _plain_spec(name: str, dim: int) -> TableSpec:
    """A table of which nothing is known but its rows: float32, scores as customized ones."""
    from embstore.table import Table

    table = Table(name, dim=dim, optimizer=SGD(), score_strategy="customized", init_capacity=128)
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


def _write(target: Path, layout: str, sources: list[Source], progress: Progress | None) -> None:
    ranks = Ranks()
    start(target, {0: sources}, 1, Order(layout, optim=False), ranks).run(ranks, progress=progress)
