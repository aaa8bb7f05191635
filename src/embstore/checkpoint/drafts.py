"""Folders that are written beside their target and appear by one rename.

.model.partial-3f2a91c05d7e4b68/   ──rename──►   model/          complete or not there at all
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from embstore.checkpoint.files import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_DRAFT = re.compile(r"\.(?P<target>.+)\.partial-([0-9a-f]{16}|removed)")
# Locks may not reach over a network, so a draft of another target is left alone for a day.
ABANDONED_SECONDS = 24 * 3600

# What this process has renamed into place without coming to the end of `publish`: path -> (device, inode).
# A retry may replace it.
_unconfirmed: dict[Path, tuple[int, int]] = {}


class Draft:
    """A folder that is being written. `publish` gives it its name; until then the target is as it was.

    It holds a lock, so that a later draft can remove what a killed process left behind.
    """

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target = Path(os.path.abspath(target))
        self.overwrite = overwrite or is_unconfirmed(self.target)
        check_target(self.target, overwrite=self.overwrite)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.target)
        self.path, self._lock = _locked_folder(self.target)

    def publish(self) -> None:
        """Makes the folder durable and gives it its name.

        Raises OSError saying so when the folder has its name but may lose it in a power failure; the same
        call may then be made again.
        """
        for folder, _, _ in os.walk(self.path):
            sync_folder(Path(folder))
        _unconfirmed[self.target] = _identity(os.fstat(self._lock))
        if self.overwrite and self.target.exists():
            exchange(self.path, self.target)
        else:
            check_target(self.target)
            os.rename(self.path, self.target)
        try:
            sync_folder(self.target.parent)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.target} is complete and published, but its name may not survive a power failure "
                f"({error.strerror}); the call may be repeated",
            ) from error
        # What it replaced. A leftover costs space only, and the next draft removes it.
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        _unconfirmed.pop(self.target, None)

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        if not is_unconfirmed(self.target):
            _unconfirmed.pop(self.target, None)

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Publishes at the end of the block, or removes what was written when anything fails."""
        try:
            yield
            self.publish()
        except BaseException:
            self.discard()
            raise


def _locked_folder(target: Path) -> tuple[Path, int]:
    while True:
        path = target.parent / f".{target.name[:100]}.partial-{secrets.token_hex(8)}"
        path.mkdir()
        lock = -1
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Whoever looked for abandoned drafts between the two steps has removed it.
            if _identity(path.stat()) == _identity(os.fstat(lock)):
                return path, lock
        if lock >= 0:
            os.close(lock)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def is_unconfirmed(target: Path) -> bool:
    """Whether this process published the folder in a call that then failed."""
    known = _unconfirmed.get(Path(os.path.abspath(target)))
    return known is not None and target.exists() and _identity(target.stat()) == known


def check_target(target: Path, *, overwrite: bool = False) -> None:
    """Raises unless a dump may be published there."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileExistsError(f"path should be a folder, or not there yet, but is a file: {target}")
    if not overwrite and target.exists() and any(target.iterdir()):
        raise FileExistsError(f"path should be an empty folder, or not there yet, but has files: {target}")


def remove_abandoned(target: Path) -> None:
    """Removes drafts whose writer is gone: those of this target, and old ones beside it."""
    mine = f".{target.name[:100]}.partial-"
    for draft in drafts_in(target.parent):
        if draft.name.startswith(mine) or _untouched_seconds(draft) > ABANDONED_SECONDS:
            remove_unlocked(draft)


def remove_unlocked(draft: Path) -> None:
    """Removes a draft unless somebody is writing it."""
    try:
        fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # gone, or not a folder
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(fd)


def _untouched_seconds(draft: Path) -> float:
    newest = 0.0
    for folder, _, files in os.walk(draft):
        for name in ("", *files):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - newest


def drafts_in(folder: Path) -> list[Path]:
    """Folders that are not published, or are being removed."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name)]


def drafts_of(target: Path) -> list[Path]:
    """Drafts of one target."""
    prefix = f".{target.name[:100]}.partial-"
    return [path for path in drafts_in(target.parent) if path.name.startswith(prefix)]


def remove_published(path: Path) -> None:
    """Removes a published folder: first its name, so that nobody takes a half removed one for a whole."""
    hidden = path.with_name(f".{path.name}.partial-removed")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def exchange(one: Path, other: Path) -> None:
    """Swaps two names in one step, so that there is no moment without either."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done != 0:
        code = ctypes.get_errno()
        reason = "the file system cannot swap folders" if code == errno.EINVAL else os.strerror(code)
        raise OSError(code, f"{reason}, so {other} stays as it was; dump to a new path instead")
