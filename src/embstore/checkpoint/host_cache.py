"""Folders that the processes of a host share: copies of remote dumps, indexes of readers.

    ~/.cache/embstore/serving/
      3f2a...-float32/          an entry
      3f2a...-float32.lock      locked while it is made (alone) or opened (together); its time says when

An entry appears by rename. One that nobody has opened for a week is removed; whoever has mapped its files
keeps them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

UNUSED_SECONDS = 7 * 24 * 3600


def cache_folder(kind: str) -> Path:
    """Where entries of this kind are unless somebody names another folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "embstore" / kind


def private_folder(kind: str) -> Path:
    """The same, made for this user alone where it is not there yet."""
    folder = cache_folder(kind)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextlib.contextmanager
def locked(entry: Path, *, shared: bool = False) -> Iterator[None]:
    """Holds the lock of an entry, which need not be there yet, and notes that it is in use."""
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = _lock_of(entry)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        os.utime(fd)
        yield
    finally:
        os.close(fd)


def remove(entry: Path) -> None:
    """Removes an entry unless somebody is making or opening it."""
    try:
        fd = os.open(_lock_of(entry), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry, ignore_errors=True)
        _lock_of(entry).unlink(missing_ok=True)
    except OSError:
        return  # in use
    finally:
        os.close(fd)


def sweep(cache: Path, unused_seconds: float = UNUSED_SECONDS) -> None:
    """Removes what nobody has opened for so long."""
    for lock in cache.glob("*.lock"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > unused_seconds:
                remove(lock.with_name(lock.name.removesuffix(".lock")))


def _lock_of(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.lock")
