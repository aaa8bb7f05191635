"""Dumps to and from other kinds of files.

v1a, v2       the layouts of dumps; also from dumps of the original package that have no manifest
safetensors   {collection}/{table}.safetensors with keys, values, scores and state.*
parquet       {collection}/{table}.parquet with columns key, vector, score and one for each state
sok           files of SparseOperationKit, {table}_0-key and so on, for a variable named {table}; they keep
              no scores
one_embedding  snapshots of OneEmbedding's persistent tables, {table}/0-1
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from embstore.checkpoint import merging
from embstore.checkpoint.drafts import Draft, check_target
from embstore.checkpoint.dumping import start
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.names import file_stem, name_of
from embstore.checkpoint.reading import DumpTable
from embstore.checkpoint.replaying import open_verified
from embstore.checkpoint.sources import Source, block_source
from embstore.checkpoint.spec import TableSpec
from embstore.checkpoint.writing import DumpOptions
from embstore.distributed.ranks import Ranks
from embstore.formats import described, parquet, safetensors
from embstore.formats import one_embedding as one_embedding_files
from embstore.formats.columns import Columns
from embstore.formats.dynamicemb import WRITTEN
from embstore.formats.sok import STATES, DumpReader, DumpWriter, is_sok_dump
from embstore.optimizers import SGD, Adadelta, Adagrad, Adam, Adamax, Ftrl, Optimizer, from_dict
from embstore.ownership import Ownership
from embstore.progress import Progress, Wanted, shown
from embstore.rows import Rows

_COLUMN_FORMATS = {module.SUFFIX: module for module in (safetensors, parquet)}
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
class _Given:
    """A table to be written, and whether its rows come with the states of its optimizer."""

    source: Source
    has_states: bool


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
    progress: Wanted = None,
    one_embedding: OneEmbeddingOptions | None = None,
) -> None:
    """Writes `target` in the format `to` from a dump, or from a folder that this made earlier."""
    one_embedding = one_embedding or OneEmbeddingOptions()
    if to not in FORMATS:
        raise ValueError(f"--to should be one of {', '.join(FORMATS)} but is: {to!r}")
    if not path.is_dir():
        raise FileNotFoundError(f"path should be a folder but is: {path}")
    if to in WRITTEN:
        return _to_dump(path, target, to, progress, one_embedding)
    stored = open_verified(path, progress)
    for table in stored.tables if to in ("sok", "one_embedding") else []:
        if table.shared is not None:
            warnings.warn(f"files of {to} have no place for the shared rows of {table.label}", stacklevel=2)
    with shown(progress, "converting", unit=" tables") as report:
        if to == "sok":
            _write_sok(target, stored.tables, report)
        elif to == "one_embedding":
            name = one_embedding.snapshot or "converted"
            one_embedding_files.write(target, stored.tables, name, report)
        else:
            _write_columns(target, stored.tables, to, report)


def _write_columns(target: Path, tables: Sequence[Columns], to: str, progress: Progress | None) -> None:
    draft = Draft(target)
    with draft.publishing():
        for number, table in enumerate(tables):
            folder = draft.path / file_stem(table.collection)
            folder.mkdir(exist_ok=True)
            _COLUMN_FORMATS[f".{to}"].write(folder / f"{file_stem(table.name)}.{to}", table)
            if progress:
                progress(number + 1, len(tables))


def _to_dump(path: Path, target: Path, layout: str, progress: Wanted, options: OneEmbeddingOptions) -> None:
    files = sorted(p for p in path.rglob("*") if p.suffix in _COLUMN_FORMATS)
    if files:
        return _write(target, layout, _foreign_sources(files), progress)
    if is_sok_dump(path):
        return _write(target, layout, _sok_sources(path), progress)
    found = one_embedding_files.tables_in(path)
    if found:
        with ExitStack() as stack:
            sources = [_one_embedding_source(name, of, options, stack) for name, of in found.items()]
            return _write(target, layout, sources, progress)
    base, *increments = open_verified(path, progress).entries
    if base.manifest is not None:
        with shown(progress, "converting") as report:
            merging.rewrite(base, increments, target, layout=layout, progress=report)
        return None
    return _write(target, layout, [_original_source(table) for table in base.tables], progress)


def _foreign_sources(files: list[Path]) -> list[_Given]:
    found = []
    for file in files:
        table = _COLUMN_FORMATS[file.suffix].read(file)
        spec, rows = table.spec_and_rows(file)
        found.append(_given(name_of(file.parent.name), spec, rows, table.shared(file, spec)))
    return found


def _given(collection: str, spec: TableSpec, rows: Rows, shared: Rows | None = None) -> _Given:
    source = block_source(collection, spec, len(rows), [rows], shared=shared)
    return _Given(source, rows.states.shape[1] == spec.state_width)


def _original_source(table: DumpTable) -> _Given:
    """A table of a dump of the original package, which has no manifest."""
    part = table.found.parts[0]
    arguments = table.found.arguments
    widths = {name: part.states[name].width for name in table.state_names}
    try:
        spec = described.inferred_spec(table.name, table.dim, widths, arguments)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{table.folder / table.name}_opt_args.json: {error}") from error
    by = str(arguments.get("dist_type")).upper()
    ownership = Ownership[by] if by in Ownership.__members__ else Ownership.ROUNDROBIN
    source = block_source(table.collection, spec, table.rows, _with_scores(table), ownership=ownership)
    return _Given(source, sum(widths.values()) == spec.state_width)


def _with_scores(table: DumpTable) -> Iterator[Rows]:
    for rows in table.blocks():
        yield replace(rows, scores=np.maximum(rows.scores, np.uint64(1)))


def _sok_sources(path: Path) -> list[_Given]:
    reader, sources = DumpReader(path), []
    for prefix in reader.tables():
        table = reader.table(prefix)
        engine_name, names = table.engine_states()
        optimizer = next(o for o in _SOK_OPTIMIZERS if o.engine_name == engine_name)
        spec = described.plain_spec(prefix.removesuffix("_0"), max(table.dim, 1), optimizer)
        steps = int((reader.manifest or {}).get("iterations", 0))
        keys, values, states = table.block(0, len(table))
        joined = np.concatenate([np.empty((len(table), 0)), *(states[name] for name in names)], axis=1)
        if len(table) and joined.shape[1] != spec.state_width:
            raise CheckpointError(
                f"{path / prefix}-{names[0]}: expected states of {spec.state_width} components in all, "
                f"found {joined.shape[1]}"
            )
        rows = Rows(
            keys.astype(np.int64),
            np.asarray(values, np.float32).reshape(len(table), spec.dim),
            np.asarray(joined, np.float32).reshape(len(table), spec.state_width),
            np.ones(len(table), np.uint64),
        )
        sources.append(_given("sok", replace(spec, optimizer_step=steps), rows))
    return sources


def _one_embedding_source(
    name: str, directories: list[Path], options: OneEmbeddingOptions, stack: ExitStack
) -> _Given:
    table = one_embedding_files.StoredTable(directories, options.snapshot, stack)
    optimizer = from_dict({"name": options.optimizer})
    spec = described.plain_spec(name, table.width if options.dim is None else options.dim, optimizer)
    if spec.dim + spec.state_width != table.width:
        raise ValueError(
            f"--dim and --optimizer should make rows of {table.width} floats, as table {name!r} has, but "
            f"are {spec.dim} and {options.optimizer}, which make: {spec.dim + spec.state_width}"
        )
    return _Given(block_source("one_embedding", spec, len(table), table.blocks(spec.dim)), True)


def _write_sok(target: Path, tables: Sequence[Columns], progress: Progress | None) -> None:
    check_target(target)
    with DumpWriter(target) as writer:
        writer.facts["world_size"] = 1
        for number, table in enumerate(tables):
            optimizer, slots = STATES.get(table.spec.engine_optimizer if table.spec else "", ("", ()))
            if len(table.state_names) != len(slots):
                slots = ()  # dumped without states, or they have no name in SOK
            # TensorFlow adds ":0" to the name of a variable.
            output = writer.table(f"{table.name}:0", np.int64, optimizer=optimizer, slots=slots)
            for rows in table.blocks():
                states = np.split(rows.states, len(slots), axis=1) if slots else []
                output.append(rows.keys, rows.values, states)
            if progress:
                progress(number + 1, len(tables))


def _write(target: Path, layout: str, tables: list[_Given], progress: Wanted) -> None:
    """Writes a dump, with optimizer states where the tables have them."""
    with_states = [given for given in tables if given.source.spec.state_width]
    optim = any(given.has_states for given in with_states)
    for given in with_states:
        if optim and not given.has_states:
            raise CheckpointError(f"table {given.source.spec.name!r} has no optimizer states but others have")
    ranks, sources = Ranks(), [given.source for given in tables]
    with shown(progress, "converting") as report:
        start(target, {0: sources}, 1, DumpOptions(layout, optim=optim), ranks).run(ranks, progress=report)
