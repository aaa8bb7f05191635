"""Dumps and logs on any fsspec file system: s3://, gs://, file://, memory://.

    s3://bucket/monday/
      3f2a.../model/user_keys        the files of one upload, under a name of their own
      embstore-current.json          names that upload and the checksum of every file; written last

Object stores have no rename, so the small file decides: what it names is complete, and writing it again swaps
the whole folder in one step. A log is a folder of such entries; `Mirror` keeps it and a local folder alike.

Needs the extra `remote`, pip install 'embstore[remote]', and the package of the file system (s3fs, gcsfs).
"""

from __future__ import annotations

import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from embstore.checkpoint.drafts import Draft
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import file_crc32, parse_json, sealed, unsealed
from embstore.checkpoint.increments import IncrementLog

MARKER = "embstore-current.json"
FORMAT = "embstore-remote"
_TRANSFERS = 4


def is_remote(path: object) -> bool:
    """Whether a path is a URL of fsspec."""
    return isinstance(path, str) and "://" in path


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
        marker = f"{self.url}/{MARKER}"
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
            raise FileExistsError(f"path should not be there yet but is: {self.url}")
        paths = sorted(path for path in local.rglob("*") if path.is_file())
        folder = secrets.token_hex(8)

        def put(path: Path) -> tuple[str, dict[str, int]]:
            name = path.relative_to(local).as_posix()
            self._fs.put_file(os.fspath(path), self._at(folder, name))
            return name, {"bytes": path.stat().st_size, "crc32": file_crc32(path)}

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

    def download(self, local: Path) -> None:
        """Copies what is published to a new local folder, which appears once every checksum was right.

        Raises FileNotFoundError when nothing is published, CheckpointError when a file is damaged.
        """
        document = self.current()
        if document is None:
            raise FileNotFoundError(f"path should be a dump or a log but is: {self.url}")
        draft = Draft(local)
        with draft.publishing():

            def get(name: str) -> None:
                target = draft.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._fs.get_file(self._at(document["folder"], name), os.fspath(target))
                except FileNotFoundError as error:
                    raise CheckpointError(f"{self.url}: {name} is missing") from error
                expected = document["files"][name]
                found = {"bytes": target.stat().st_size, "crc32": file_crc32(target)}
                if found != expected:
                    raise CheckpointError(
                        f"{self.url}: {name} is damaged: expected {expected}, found {found}"
                    )
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

    def _remove(self, folder: str) -> None:
        if self._fs.exists(self._at(folder)):
            self._fs.rm(self._at(folder), recursive=True)


class Mirror:
    """A local increment log and its copy on a remote file system.

    A trainer appends to the local log and pushes; a reader pulls and follows its local log.

        mirror = Mirror("s3://bucket/log", "/data/log")
        mirror.push()       # or mirror.pull()
    """

    def __init__(self, url: str, local: str | os.PathLike[str], **storage_options: Any) -> None:
        self.remote = RemoteFolder(url, **storage_options)
        self.log = IncrementLog(local)

    def _local(self) -> dict[str, Path]:
        if not self.log.path.is_dir():
            return {}
        return {path.name: path for named in self.log.entries().values() for path in named.values()}

    def _published(self) -> list[str]:
        names = [name for name in self.remote.names() if IncrementLog.place_of(name)]
        return [name for name in names if self.remote.child(name).current() is not None]

    @staticmethod
    def _place(name: str) -> tuple[int, str]:
        place = IncrementLog.place_of(name)
        assert place is not None
        return place

    def push(self) -> list[str]:
        """Uploads the entries that the remote log lacks, in order, then removes there what is gone here."""
        local, published = self._local(), self._published()
        new = sorted(set(local) - set(published), key=self._place)
        for name in new:
            self.remote.child(name).upload(local[name])
        for name in set(published) - set(local) if local else ():
            self.remote.child(name).remove()
        return new

    def pull(self) -> list[str]:
        """Downloads the newest base and the increments after it as far as they are missing here."""
        published = sorted(self._published(), key=self._place)
        bases = [name for name in published if name.startswith("base-")]
        if not bases:
            raise FileNotFoundError(f"path should be an increment log but is: {self.remote.url}")
        first = self._place(bases[-1])[0]
        wanted = [bases[-1], *(n for n in published if self._place(n) > (first, "increment"))]
        local = self._local()
        self.log.path.mkdir(parents=True, exist_ok=True)
        new = [name for name in wanted if name not in local]
        for name in new:
            self.remote.child(name).download(self.log.path / name)
        for name in set(local) - set(wanted):
            shutil.rmtree(local[name], ignore_errors=True)
        return new
