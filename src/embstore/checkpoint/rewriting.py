"""Dumps and logs into other dumps: what `embstore merge`, `reshard` and `convert` do."""

from __future__ import annotations

import os
from pathlib import Path

from embstore.arrays import as_integer
from embstore.checkpoint import converting
from embstore.checkpoint.converting import OneEmbeddingOptions
from embstore.checkpoint.merging import rewrite
from embstore.checkpoint.reading import is_log
from embstore.checkpoint.replaying import open_verified
from embstore.progress import Wanted, shown

PathLike = str | os.PathLike[str]


def merge(log: PathLike, target: PathLike, *, progress: Wanted = False) -> None:
    """Writes a dump of what a log says: its base and all increments after it.

    Args:
        log: folder of an increment log.
        target: folder to write; not there yet.
        progress: True for a bar of tqdm, or a function of (bytes done, bytes in all).

    Raises:
        ValueError: `log` is no increment log.
        CheckpointError: an entry is damaged or missing.
        FileExistsError: `target` has files.

    Examples:
        >>> import embstore, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> tables = {"model": {"user": embstore.Table("user", dim=2)}}
        >>> log = embstore.IncrementLog.create(f"{folder}/log", tables)
        >>> embstore.merge(f"{folder}/log", f"{folder}/merged")
        >>> embstore.open_dump(f"{folder}/merged")["model"]["user"].rows
        0
    """
    if not is_log(Path(log)):
        raise ValueError(f"log should be the folder of an increment log but is: {log}")
    _rewrite(Path(log), Path(target), None, progress, "merging")


def reshard(path: PathLike, target: PathLike, world: int, *, progress: Wanted = False) -> None:
    """Writes the rows of a dump or log, ordered (v1a) or in files (v2) for another number of ranks.

    Args:
        path: folder of a dump or of an increment log.
        target: folder to write; not there yet.
        world: number of ranks, 1 to 65536.
        progress: True for a bar of tqdm, or a function of (bytes done, bytes in all).

    Raises:
        ValueError: `world` is out of range.
        CheckpointError: the dump is damaged, or `path` is not a dump.
        FileExistsError: `target` has files.

    Examples:
        >>> import embstore, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> embstore.dump(f"{folder}/one", {"model": {"user": embstore.Table("user", dim=2)}})
        >>> embstore.reshard(f"{folder}/one", f"{folder}/three", world=3)
        >>> embstore.open_dump(f"{folder}/three")["model"]["user"].world
        3
    """
    _rewrite(Path(path), Path(target), as_integer(world, 1, 65536, "world"), progress, "resharding")


def _rewrite(path: Path, target: Path, world: int | None, progress: Wanted, what: str) -> None:
    base, *increments = open_verified(path, progress).entries
    with shown(progress, what) as report:
        rewrite(base, increments, target, world=world, progress=report)


def convert(
    path: PathLike,
    target: PathLike,
    to: str,
    *,
    progress: Wanted = False,
    snapshot: str | None = None,
    dim: int | None = None,
    optimizer: str = "SGD",
) -> None:
    """Writes a dump, a log, or files of another tool in another format.

    Args:
        path: folder of a dump, a log, or of files in one of the formats.
        target: folder to write; not there yet.
        to: "v1a", "v2", "safetensors", "parquet", "sok" or "one_embedding".
        progress: True for a bar of tqdm, or a function of (done, in all).
        snapshot: name of a snapshot of OneEmbedding, to be read or written.
        dim: components of a vector in rows of OneEmbedding.
        optimizer: class whose state the rest of such a row is.

    Raises:
        ValueError: `to` is no format, or `dim` and `optimizer` do not fit the rows.
        CheckpointError: what should be read is damaged, or is not a dump.
        FileExistsError: `target` has files.

    Examples:
        >>> import embstore, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> embstore.dump(f"{folder}/dump", {"model": {"user": embstore.Table("user", dim=2)}})
        >>> embstore.convert(f"{folder}/dump", f"{folder}/v2", "v2")
        >>> embstore.open_dump(f"{folder}/v2")["model"]["user"].layout
        'v2'
    """
    options = OneEmbeddingOptions(snapshot, dim, optimizer)
    converting.convert(Path(path), Path(target), to, progress, options)
