"""Dumps and logs on any fsspec file system: s3://, gs://, file://, memory://.

    s3://bucket/monday/
      3f2a.../model/user_keys        the files of one upload, under a name of their own
      embstore-current.json          names that upload and the checksum of every file; written last

Object stores have no rename, so the small file decides: what it names is complete, and writing it again swaps
the whole folder in one step. A log is a folder of such entries; `Mirror` keeps it and a local folder alike.
`dump`, `load`, `open_dump`, `IncrementLog` and `Reader` take such URLs.

Needs the extra `remote`, pip install 'embstore[remote]', and the package of the file system (s3fs, gcsfs).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from embstore.checkpoint import host_cache
from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import file_crc32, file_size, parse_json, sealed, unsealed
from embstore.checkpoint.log_entries import entries_in, place_of
from embstore.checkpoint.manifest import NAME as MANIFEST
from embstore.distributed.ranks import Ranks

MARKER = "embstore-current.json"
FORMAT = "embstore-remote"
_TRANSFERS = 4


def is_remote(path: object) -> bool:
    """Whether a path is a URL of fsspec."""
    return isinstance(path, str) and "://" in path


def shown_url(path: object) -> str:
    """A path or URL for messages: without user, password and query, which may hold a key.

    >>> shown_url("sftp://ann:secret@host/monday?key=abc")
    'sftp://host/monday'
    """
    text = str(path)
    if not is_remote(text):
        return text
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


class RemoteFolder:
    """One folder of a remote file system that holds a dump, or an entry of a log.

    url              such as "s3://bucket/monday"
    storage_options  passed to fsspec: credentials, endpoint and so on
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(f"{url.split('://')[0]}:// needs: pip install 'embstore[remote]'") from error
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url, **storage_options)
        self._options = storage_options

    def __repr__(self) -> str:
        return shown_url(self.url)

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}", **self._options)

    def names(self) -> list[str]:
        """Names in the folder, [] where it does not exist."""
        self._fs.invalidate_cache()
        try:
            return sorted(PurePosixPath(path).name for path in self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []

    def _at(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    def current(self) -> dict[str, Any] | None:
        """What the marker says; None where nothing is published."""
        self._fs.invalidate_cache()
        try:
            text = self._fs.cat_file(self._at(MARKER))
        except FileNotFoundError:
            return None
        marker = f"{self}/{MARKER}"
        document = unsealed(parse_json(text, marker), marker)
        files = document.get("files")
        if document.get("format") != FORMAT or not isinstance(files, dict):
            raise CheckpointError(f"{marker}: is not a marker of embstore")
        for name in (document.get("folder"), *files):
            if (
                not isinstance(name, str)
                or PurePosixPath(name).is_absolute()
                or ".." in PurePosixPath(name).parts
            ):
                raise CheckpointError(f"{marker}: names a file outside of its folder: {name!r}")
        return document

    def upload(self, local: Path, *, overwrite: bool = False) -> None:
        """Publishes the files of a local folder. Until the last step nothing changes for readers."""
        before = self.current()
        if before is not None and not overwrite:
            raise FileExistsError(f"path should not be there yet but is: {self}")
        paths = sorted(path for path in local.rglob("*") if path.is_file())
        folder = secrets.token_hex(8)

        def put(path: Path) -> tuple[str, dict[str, int]]:
            name = path.relative_to(local).as_posix()
            listed = {"bytes": file_size(path), "crc32": file_crc32(path)}  # refuses links and pipes first
            self._fs.put_file(os.fspath(path), self._at(folder, name))
            return name, listed

        try:
            for parent in {path.parent for path in paths}:
                self._fs.makedirs(self._at(folder, parent.relative_to(local).as_posix()), exist_ok=True)
            with ThreadPoolExecutor(_TRANSFERS) as pool:
                files = dict(pool.map(put, paths))
            document = {"format": FORMAT, "version": 1, "folder": folder, "files": files}
            self._fs.pipe_file(self._at(MARKER), sealed(document).encode())
        except BaseException:
            self._remove(folder)
            raise
        if before is not None:
            self._remove(before["folder"])

    def require_current(self) -> dict[str, Any]:
        """What the marker says. Raises FileNotFoundError when nothing is published."""
        document = self.current()
        if document is None:
            raise FileNotFoundError(f"path should be a dump or a log but is: {self}")
        return document

    def download(self, local: Path, document: dict[str, Any] | None = None) -> None:
        """Copies what is published, or was when the marker said `document`, to a new local folder, which
        appears once every checksum was right.

        Raises FileNotFoundError when nothing is published, CheckpointError when a file is damaged.
        """
        document = document or self.require_current()
        draft = Draft(local)
        with draft.publishing():

            def get(name: str) -> None:
                target = draft.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._fs.get_file(self._at(document["folder"], name), os.fspath(target))
                except FileNotFoundError as error:
                    raise CheckpointError(f"{self}: {name} is missing") from error
                expected = document["files"][name]
                found = {"bytes": target.stat().st_size, "crc32": file_crc32(target)}
                if found != expected:
                    raise CheckpointError(f"{self}: {name} is damaged: expected {expected}, found {found}")
                with open(target, "rb") as file:
                    os.fsync(file.fileno())

            with ThreadPoolExecutor(_TRANSFERS) as pool:
                list(pool.map(get, document["files"]))

    def remove(self) -> None:
        """Unpublishes the folder, then removes its files."""
        document = self.current()
        if document is None:
            return
        self._fs.rm_file(self._at(MARKER))
        self._remove(document["folder"])
        with contextlib.suppress(OSError):  # an object store has no folders
            self._fs.rmdir(self._root)

    def _remove(self, folder: str) -> None:
        if self._fs.exists(self._at(folder)):
            self._fs.rm(self._at(folder), recursive=True)


def key_of(url: str) -> str:
    """Of the entries of a URL in the cache of a host."""
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


@contextlib.contextmanager
def local_copy(
    remote: RemoteFolder, document: dict[str, Any] | None = None, cache: Path | None = None
) -> Iterator[Path]:
    """The files of a remote dump or base on this host. The first process downloads them for all, and removes
    earlier versions. They stay while the block runs; files that are mapped by then, for longer."""
    document = document or remote.require_current()
    cache = cache or host_cache.cache_folder("remote")
    prefix = f"remote-{key_of(remote.url)}-"
    entry = cache / f"{prefix}{document['folder']}"
    host_cache.sweep(cache)
    while True:
        # Whoever sweeps the entry may remove the lock under which another process downloads it.
        with host_cache.locked(entry), contextlib.suppress(FileExistsError):
            if not entry.is_dir():
                remote.download(entry, document)
        with host_cache.locked(entry, shared=True):
            if not entry.is_dir():  # taken for an earlier version in between
                continue
            for lock in cache.glob(f"{prefix}*.lock"):
                if lock.name != f"{entry.name}.lock":
                    host_cache.remove(lock.with_name(lock.name.removesuffix(".lock")))
            yield entry
            return


class Upload:
    """A dump to a URL: all ranks write it to a folder that they share, then rank 0 uploads it.

    The folder is a temporary one of rank 0 (TMPDIR names its place).
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None, overwrite: bool, ranks: Ranks) -> None:
        def prepare() -> str:
            if not overwrite and RemoteFolder(url, **(options or {})).current() is not None:
                raise FileExistsError(f"path should not be there yet but is: {shown_url(url)}")
            return tempfile.mkdtemp(prefix="embstore-")

        self.url = url
        self._options, self._overwrite = dict(options or {}), overwrite
        self._spool = Path(ranks.lead(prepare))
        self.folder = self._spool / "dump"

    def finish(self, ranks: Ranks) -> None:
        """Publishes the folder, once it is complete."""
        ranks.lead(
            lambda: RemoteFolder(self.url, **self._options).upload(self.folder, overwrite=self._overwrite)
        )

    def end(self, ranks: Ranks) -> None:
        if ranks.rank == 0:
            shutil.rmtree(self._spool, ignore_errors=True)


class Mirror:
    """A local increment log and its copy on a remote file system.

    A trainer appends to the local log and pushes; a reader pulls and follows its local log.

        mirror = Mirror("s3://bucket/log", "/data/log")
        mirror.push()       # or mirror.pull()
    """

    def __init__(self, url: str, local: str | os.PathLike[str], **storage_options: Any) -> None:
        self.remote = RemoteFolder(url, **storage_options)
        self.path = Path(local)
        self._same: set[str] = set()  # entries that are known to be the same here and there

    def _is_same(self, name: str) -> bool:
        """Whether the entry is the same one here and there, by what its manifests say."""
        if name in self._same:
            return True
        there = self.remote.child(name).current()
        here = sorted((self.path / name).rglob(MANIFEST))
        if there is None or {
            path.relative_to(self.path / name).as_posix(): file_crc32(path) for path in here
        } != {of: facts["crc32"] for of, facts in there["files"].items() if of.endswith(MANIFEST)}:
            return False
        self._same.add(name)
        return True

    def _local(self) -> dict[str, Path]:
        if not self.path.is_dir():
            return {}
        return {path.name: path for named in entries_in(self.path).values() for path in named.values()}

    def published(self) -> list[str]:
        """Names of the entries of the remote log."""
        names = [name for name in self.remote.names() if place_of(name)]
        return [name for name in names if self.remote.child(name).current() is not None]

    @staticmethod
    def _place(name: str) -> tuple[int, str]:
        place = place_of(name)
        assert place is not None
        return place

    def push(self) -> list[str]:
        """Uploads what the remote log lacks, in order, then removes what no reader needs there."""
        local, published = self._local(), self.published()
        for name in sorted(set(local) & set(published), key=self._place):
            if not self._is_same(name):
                raise CheckpointError(
                    f"{self.remote}: {name} was written by another process; load the log first"
                )
        bases = sorted(n for n, kind in map(self._place, {*local, *published}) if kind == "base")
        kept = bases[-2:][0] if bases else -1

        def is_needed(name: str) -> bool:  # the rule of IncrementLog.clean
            number, kind = self._place(name)
            return number >= kept if kind == "base" else number > kept

        new = sorted((name for name in set(local) - set(published) if is_needed(name)), key=self._place)
        for name in new:
            self.remote.child(name).upload(local[name])
            self._same.add(name)
        for name in published:
            if not is_needed(name):
                self.remote.child(name).remove()
        return new

    def pull(self) -> list[str]:
        """Downloads the newest base and the increments after it as far as they are missing here.

        Raises FileNotFoundError when there is no log.
        """
        with host_cache.locked(self.path):  # one process of a host at a time
            return self._pull()

    def _pull(self) -> list[str]:
        published = sorted(self.published(), key=self._place)
        bases = [name for name in published if name.startswith("base-")]
        if not bases:
            raise FileNotFoundError(f"path should be an increment log but is: {self.remote}")
        first = self._place(bases[-1])[0]
        wanted = [bases[-1], *(n for n in published if self._place(n) > (first, "increment"))]
        local = self._local()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = [name for name in wanted if name not in local or not self._is_same(name)]
        for name in new:
            shutil.rmtree(self.path / name, ignore_errors=True)
            self.remote.child(name).download(self.path / name)
            self._same.add(name)
        for name in set(local) - set(wanted):
            shutil.rmtree(local[name], ignore_errors=True)
        return new
