"""Persistent tables outside of training: rows of snapshots in and out of directories.

kinds = (torch.int64, torch.float32, storage_dim)  # dtypes of torch or numpy, or their names
with make_persistent_table_reader([old_0, old_1], "epoch-3", *kinds) as reader:
    with make_persistent_table_writer([new_0], "epoch-3", *kinds) as writer:
        for keys, values in reader:
            writer.write(keys, values)  # n directories become m: a reshard
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from embstore import Ownership, owner
from embstore.stores import SsdStore

BLOCK_ROWS = 65536


def as_numpy_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    """The numpy dtype of a dtype of torch or numpy, or of its name."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{name} should be a dtype of torch or numpy, or its name, but is: {dtype!r}"
        ) from None


class _PersistentTable:
    def __init__(
        self,
        paths: str | Sequence[str],
        snapshot_name: str,
        key_type: Any,
        value_type: Any,
        storage_dim: int,
        physical_block_size: int,
        create: bool,
    ) -> None:
        self.key_type = as_numpy_dtype(key_type, "key_type")
        self.value_type = as_numpy_dtype(value_type, "value_type")
        if self.key_type not in (np.dtype(np.int64), np.dtype(np.int32)):
            raise ValueError(f"key_type should be int64 or int32 but is: {self.key_type}")
        if self.value_type != np.dtype(np.float32):
            raise ValueError(f"value_type should be float32 but is: {self.value_type}")
        if isinstance(storage_dim, bool) or not isinstance(storage_dim, int) or storage_dim < 1:
            raise ValueError(f"storage_dim should be an integer of at least 1 but is: {storage_dim!r}")
        paths = [paths] if isinstance(paths, str) else list(paths)
        if not paths:
            raise ValueError("paths should name at least one directory but is empty")
        self.snapshot_name, self.storage_dim = snapshot_name, storage_dim
        self.stores: list[SsdStore] = []
        try:
            for path in paths:
                self.stores.append(
                    SsdStore(
                        path,
                        4 * storage_dim,
                        key_bytes=self.key_type.itemsize,
                        physical_block_bytes=physical_block_size,
                        create=create,
                    )
                )
        except BaseException:
            self._close_stores()
            raise

    def _close_stores(self) -> None:
        stores, self.stores = self.stores, []
        for store in stores:
            store.close()


class PersistentTableReader(_PersistentTable):
    """Iterates over (keys (n), values (n, storage_dim)) with n <= 65536, directory after directory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, create=False)
        try:
            for store in self.stores:
                store.load_snapshot(self.snapshot_name)
        except BaseException:
            self._close_stores()
            raise
        self._blocks = self._read()

    def _read(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.float32]]]:
        for store in self.stores:
            for keys, rows, _ in store.scan(BLOCK_ROWS):
                values = rows.view(np.float32).reshape(len(keys), self.storage_dim)
                for at in range(0, len(keys), BLOCK_ROWS):
                    part = slice(at, at + BLOCK_ROWS)
                    yield keys[part].astype(self.key_type), values[part].copy()

    def __iter__(self) -> PersistentTableReader:
        return self

    def __next__(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        return next(self._blocks)

    def close(self) -> None:
        """Releases the directories."""
        self._blocks.close()  # type: ignore[attr-defined]
        self._close_stores()

    def __enter__(self) -> PersistentTableReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PersistentTableWriter(_PersistentTable):
    """Takes rows and, when it is closed, saves them as a snapshot; each row goes to its owner's directory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, create=True)

    def write(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """keys (n) and values (n, storage_dim), of exactly the types that the writer was made with."""
        if not self.stores:
            raise RuntimeError("the writer is closed")
        if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype != self.key_type:
            raise ValueError(f"keys should be a 1-D array of {self.key_type} but are: {_told(keys)}")
        shape = (len(keys), self.storage_dim)
        if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype != self.value_type:
            raise ValueError(
                f"values should be an array of {self.value_type} of the shape {shape} "
                f"but are: {_told(values)}"
            )
        owners = owner(keys.astype(np.int64), len(self.stores), Ownership.XXH64)
        for rank, store in enumerate(self.stores):
            mine = owners == rank
            if mine.any():
                store.put(keys[mine], values[mine])

    def close(self) -> None:
        """Saves the snapshot and releases the directories."""
        try:
            for store in self.stores:
                store.snapshot(self.snapshot_name)
        finally:
            self._close_stores()

    def __enter__(self) -> PersistentTableWriter:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        # Half of the rows would make a snapshot that looks whole.
        if kind is None:
            self.close()
        else:
            self._close_stores()


def _told(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of the shape {value.shape}"
    return type(value).__name__


def make_persistent_table_reader(
    paths: str | Sequence[str],
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
) -> PersistentTableReader:
    """Reads a snapshot: an iterator of (keys, rows) and a context manager.

    Args:
        paths: the directory of one rank, or those of all.
        snapshot_name: as given to `save_snapshot`.
        key_type: int64 or int32, of torch or numpy or by name.
        value_type: float32.
        storage_dim: floats of a row, optimizer state included.
        physical_block_size: of the files, as they were made.

    Returns:
        A reader of blocks: keys (n) and rows (n, storage_dim) with n at most 65536.

    Raises:
        ValueError: a type or storage_dim does not fit the files.
        FileNotFoundError: a directory or the snapshot is missing.

    Examples:
        >>> import numpy, one_embedding, tempfile
        >>> kinds = ("int64", "float32", 2)
        >>> folder = tempfile.mkdtemp()
        >>> with one_embedding.make_persistent_table_writer(folder, "monday", *kinds) as writer:
        ...     writer.write(numpy.array([7]), numpy.array([[1, 2]], numpy.float32))
        >>> with one_embedding.make_persistent_table_reader(folder, "monday", *kinds) as reader:
        ...     print([(keys.tolist(), rows.tolist()) for keys, rows in reader])
        [([7], [[1.0, 2.0]])]
    """
    return PersistentTableReader(paths, snapshot_name, key_type, value_type, storage_dim, physical_block_size)


def make_persistent_table_writer(
    paths: str | Sequence[str],
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
) -> PersistentTableWriter:
    """Writes a snapshot: a context manager; the snapshot is kept when it ends without an error.

    Args:
        paths: a directory, or one for each rank; every row goes to its owner's.
        snapshot_name: what `load_snapshot` will ask for.
        key_type: int64 or int32, of torch or numpy or by name.
        value_type: float32.
        storage_dim: floats of a row, optimizer state included.
        physical_block_size: of the files, 512 or 4096 bytes.

    Returns:
        A writer; `write(keys, rows)` takes numpy arrays of exactly these types.

    Raises:
        ValueError: a type or storage_dim is not allowed.
        OSError: a directory cannot be written.

    Examples:
        >>> import numpy, one_embedding, tempfile
        >>> kinds = ("int64", "float32", 2)
        >>> with one_embedding.make_persistent_table_writer(tempfile.mkdtemp(), "monday", *kinds) as writer:
        ...     writer.write(numpy.array([7, -1]), numpy.zeros((2, 2), numpy.float32))
    """
    return PersistentTableWriter(paths, snapshot_name, key_type, value_type, storage_dim, physical_block_size)
