"""Bytes on disk: written at offsets, summed in parts, made durable; read back with suspicion."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address
from embstore.checkpoint.errors import CheckpointError

READ_BYTES = 1 << 20
MOST_JSON_BYTES = 256 << 20
_local = threading.local()


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


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises CheckpointError where there is no regular file: reading a pipe would
    block, reading a device would not end, and a link may lead to a file that is not part of the dump."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointError(f"{path}: is missing") from error
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link; copy the file that it leads to") from error
        if error.errno == errno.ENXIO:  # a socket
            raise CheckpointError(f"{path}: is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: is not a regular file")
    return fd


def file_size(path: Path) -> int:
    """Bytes of a regular file. Raises CheckpointError where there is none."""
    try:
        status = path.lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise CheckpointError(f"{path}: is missing") from error
        raise
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(f"{path}: is a link; copy the file that it leads to")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return status.st_size


def read_into(fd: int, path: Path, offset: int, target: npt.NDArray[np.uint8]) -> None:
    """Fills a contiguous array from a file. Raises CheckpointError where the file ends too early."""
    view = target.data.cast("B") if target.size else memoryview(b"")
    while view:
        got = os.preadv(fd, [view], offset)
        if not got:
            raise CheckpointError(f"{path}: the file ends {len(view)} bytes too early")
        view, offset = view[got:], offset + got


def file_crc32(path: Path, offset: int = 0, size: int | None = None) -> int:
    """The CRC-32 of a file, or of a range of it."""
    buffer = _read_buffer()
    crc = 0
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size - offset if size is None else size
        while size:
            part = buffer[: min(size, len(buffer))]
            read_into(fd, path, offset, part)
            crc, size, offset = crc32(part, crc), size - len(part), offset + len(part)
    finally:
        os.close(fd)
    return crc


def read_json(path: Path) -> Any:
    """A JSON document. Raises CheckpointError where the file is something else."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MOST_JSON_BYTES:
            raise CheckpointError(f"{path}: expected at most {MOST_JSON_BYTES} bytes of JSON, found {size}")
        raw = np.empty(size, np.uint8)
        read_into(fd, path, 0, raw)
    finally:
        os.close(fd)
    return parse_json(raw.tobytes(), path)


def parse_json(text: bytes, name: object) -> Any:
    """A JSON document. Raises CheckpointError naming its file where the text is something else."""
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: is not a JSON document: {error}") from error


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Lets Ctrl-C take effect at the end of the block. For short steps that must not be torn apart."""
    before = signal.getsignal(signal.SIGINT)
    # Python runs handlers in the main thread alone; one that is not Python's cannot be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Makes the bytes of a file durable."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
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
    return unsealed(read_json(path), path)


def unsealed(document: Any, path: object) -> dict[str, Any]:
    """A document without the checksum of itself, which is compared first."""
    if not isinstance(document, dict) or "crc32" not in document:
        raise CheckpointError(f"{path}: has no checksum of itself")
    expected = document.pop("crc32")
    try:
        text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand levels
        raise CheckpointError(f"{path}: is not a document of ours: {error}") from error
    if crc32(np.frombuffer(text.encode(), np.uint8)) != expected:
        raise CheckpointError(f"{path}: its checksum is wrong")
    return document
