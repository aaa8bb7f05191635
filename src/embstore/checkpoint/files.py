"""Bytes on disk: written at offsets, summed in parts, made durable, published by rename.

.model.partial-3f2a/   ──rename──►   model/          complete or not there at all
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address
from embstore.checkpoint.ranks import CheckpointError

READ_BYTES = 1 << 20
_local = threading.local()
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_at(fd: int, array: npt.NDArray[Any], offset: int) -> None:
    """Writes all bytes of a contiguous array."""
    view = array.data.cast("B") if array.size else memoryview(b"")
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def crc32(array: npt.NDArray[Any], crc: int = 0) -> int:
    """`zlib.crc32` of the bytes of a contiguous array, faster and without the GIL."""
    return _core.crc32(address(array), array.nbytes, crc) if array.nbytes else crc


def combine(pieces: list[tuple[int, int, int]]) -> int:
    """The CRC-32 of a file from (offset, bytes, crc) of pieces that cover it, in any order."""
    whole = end = 0
    for offset, size, crc in sorted(pieces):
        if size == 0:
            continue
        if offset != end:
            raise AssertionError(f"pieces should join but there is a gap at {end}: {offset}")
        whole, end = _core.crc32_combine(whole, crc, size), offset + size
    return whole


def _read_buffer() -> npt.NDArray[np.uint8]:
    """Kept for the thread: pages that are new cost more than the reading."""
    if not hasattr(_local, "buffer"):
        _local.buffer = np.empty(READ_BYTES, np.uint8)
    buffer: npt.NDArray[np.uint8] = _local.buffer
    return buffer


def file_crc32(path: Path, offset: int = 0, size: int | None = None) -> int:
    """The CRC-32 of a file, or of a range of it."""
    size = path.stat().st_size - offset if size is None else size
    buffer = _read_buffer()
    crc = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while size:
            got = file.readinto(buffer.data[: min(size, len(buffer))])
            if not got:
                raise CheckpointError(f"{path}: the file ends {size} bytes too early")
            crc, size = crc32(buffer[:got], crc), size - got
    return crc


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, text: str) -> None:
    """A small text file, written and synced."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sealed(document: dict[str, Any]) -> str:
    """JSON with a checksum of itself under "crc32"."""
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True)
    crc = crc32(np.frombuffer(text.encode(), np.uint8))
    return json.dumps({**document, "crc32": crc}, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """The inverse of `sealed`. Raises CheckpointError when the file was changed or cut off."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is not a JSON document: {error}") from error
    if not isinstance(document, dict) or "crc32" not in document:
        raise CheckpointError(f"{path}: has no checksum of itself")
    expected = document.pop("crc32")
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True)
    if crc32(np.frombuffer(text.encode(), np.uint8)) != expected:
        raise CheckpointError(f"{path}: its checksum is wrong")
    return document


class Draft:
    """A folder that is being written beside its target. `publish` renames it; until then the target is
    as it was. Held by a lock, so that a later draft can remove what a killed process left behind."""

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target = target
        self.overwrite = overwrite
        check_target(target, overwrite=overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        self.path = target.parent / f".{target.name[:100]}.partial-{secrets.token_hex(8)}"
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def publish(self) -> None:
        """Makes the folder durable and gives it its name."""
        for folder, _, _ in os.walk(self.path):
            sync_folder(Path(folder))
        if self.overwrite and self.target.exists():
            exchange(self.path, self.target)
            sync_folder(self.target.parent)
            shutil.rmtree(self.path)
        else:
            check_target(self.target)
            os.rename(self.path, self.target)
        sync_folder(self.target.parent)
        os.close(self._lock)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Publishes at the end of the block, or removes what was written when anything fails."""
        try:
            yield
            self.publish()
        except BaseException:
            self.discard()
            raise


def check_target(target: Path, *, overwrite: bool = False) -> None:
    """Raises unless a dump may be published there."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileExistsError(f"path should be a folder, or not there yet, but is a file: {target}")
    if not overwrite and target.exists() and any(target.iterdir()):
        raise FileExistsError(f"path should be an empty folder, or not there yet, but has files: {target}")


def remove_abandoned(target: Path) -> None:
    """Removes drafts of this target whose writer is gone."""
    for draft in drafts_of(target):
        try:
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # somebody is writing it
        else:
            shutil.rmtree(draft, ignore_errors=True)
        finally:
            os.close(fd)


def drafts_of(target: Path) -> Iterator[Path]:
    """Folders beside the target that are not published."""
    if target.parent.is_dir():
        prefix = f".{target.name[:100]}.partial-"
        yield from (path for path in target.parent.iterdir() if path.name.startswith(prefix))


def exchange(one: Path, other: Path) -> None:
    """Swaps two names in one step, so that there is no moment without either."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done != 0:
        code = ctypes.get_errno()
        reason = "the file system cannot swap folders" if code == errno.EINVAL else os.strerror(code)
        raise OSError(code, f"{reason}, so {other} stays as it was; dump to a new path instead")
