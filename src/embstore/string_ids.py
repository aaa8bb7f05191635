"""Ids of raw features: strings become int64 keys.

    strings   "alice"  "bob"  "alice"          ids_from(strings, field="user")
    ids        45913…  -8379…  45913…

An id is xxh64 of the UTF-8 bytes, so any language with an xxh64 computes the same. No vocabulary is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.arrays import address, as_integer, is_tensor
from embstore.extras import missing

Ids = npt.NDArray[np.int64]


def seed_of(field: str | None = None, salt: int = 0) -> int:
    """The seed of a field's ids: xxh64 of its name with the salt as seed; the salt alone without a field.

    Args:
        field: name of the feature, or None.
        salt: an integer from 0 to 2**64 - 1.

    Returns:
        The seed that xxh64 takes, from 0 to 2**64 - 1.

    Raises:
        TypeError: `field` is not a string.
        ValueError: `salt` is out of range.

    Examples:
        >>> from embstore.string_ids import seed_of
        >>> seed_of("user") == seed_of("item")
        False
    """
    salt = as_integer(salt, 0, (1 << 64) - 1, "salt")
    if field is None:
        return salt
    if not isinstance(field, str):
        raise TypeError(f"field should be a string or None but is: {field!r}")
    return _core.id_of(field, salt) & ((1 << 64) - 1)


def ids_from(strings: Any, field: str | None = None, *, salt: int = 0, null: int | None = None) -> Any:
    """The int64 ids of a column of strings.

    The id of a string is xxh64 of its UTF-8 bytes. The seed is `salt`, or with a `field` xxh64 of the field's
    name with the seed `salt`: the same text in two fields has two ids. Strings and bytes with the same bytes
    have the same id, in every kind of column, process and language.

    Args:
        strings: numpy array (objects, "S", "U" or StringDType), list or tuple, pandas Series, Index or
            Categorical, Arrow array or column (also dictionaries, and whatever else exports Arrow, such as
            polars), or TensorFlow tensor (dense, ragged or sparse; inside of tf.function too). Arrow columns
            and fixed-width arrays are read in place by all threads of the engine.
        field: name of the feature. Features that share a table should share a field too.
        salt: an integer from 0 to 2**64 - 1 that changes all ids.
        null: id of None, NaN, pandas.NA and Arrow nulls. An empty string is not null.

    Returns:
        int64 ids in the shape of `strings`: a TensorFlow tensor for one, else a numpy array, which
        `torch.from_numpy` takes as it is.

    Raises:
        TypeError: `strings` is no column of strings, or holds something else.
        ValueError: a string is null and `null` is not given, or is no valid Unicode.

    Examples:
        >>> import embstore
        >>> embstore.ids_from(["alice", "bob", "alice"], field="user")
        array([4591311096377449260,   -8379787684626074, 4591311096377449260])
        >>> embstore.ids_from(["alice", None], field="user", null=0)
        array([4591311096377449260,                   0])
    """
    seed = seed_of(field, salt)
    if null is not None:
        null = as_integer(null, -(1 << 63), (1 << 63) - 1, "null")
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and _is_tensorflow(tensorflow, strings):
        return _of_tensorflow(tensorflow, strings, lambda array: _of_column(array, seed, null))
    return _of_column(strings, seed, null)


def _of_column(strings: Any, seed: int, null: int | None) -> Ids:
    if isinstance(strings, (str, bytes)) or is_tensor(strings):
        raise TypeError(f"strings should be a column of strings but is: {_short(strings)}")
    categories = getattr(strings, "cat", strings)  # a pandas Series of categories
    if hasattr(categories, "categories") and hasattr(categories, "codes"):
        return _of_dictionary(categories.categories, np.asarray(categories.codes), seed, null)
    if hasattr(strings, "__arrow_c_array__") or hasattr(strings, "__arrow_c_stream__"):
        arrow = _as_arrow(strings)
        if arrow is not None:
            return _of_arrow(arrow, seed, null)
    return _of_numpy(strings, seed, null)


def _of_numpy(strings: Any, seed: int, null: int | None) -> Ids:
    if not isinstance(strings, (np.ndarray, list, tuple)) and not hasattr(strings, "__array__"):
        raise TypeError(f"strings should be a column of strings but is: {_short(strings)}")
    if isinstance(strings, (list, tuple)):
        array = np.empty(len(strings), object)
        array[:] = strings
    else:
        array = np.asarray(strings)
    if array.dtype.kind == "T":
        array = array.astype(object)
    if array.dtype.kind not in "OSU":
        raise TypeError(f"strings should be a column of strings but their dtype is: {array.dtype}")
    ids = np.empty(array.shape, np.int64)
    if array.dtype.kind == "O":
        objects = array.ravel().tolist()
        others = _core.ids_of_objects(objects, seed, address(ids), len(objects))
        for at in others:
            if not _is_null(objects[at]):
                raise TypeError(f"strings should hold strings but strings[{at}] is: {_short(objects[at])}")
        _put_null(ids.reshape(-1), np.array(others, np.int64), null)
        return ids
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if array.dtype.kind == "S":
        _core.ids_of_fixed_bytes(address(array), array.itemsize, True, array.size, seed, address(ids))
    else:
        _core.ids_of_fixed_unicode(address(array), array.itemsize // 4, array.size, seed, address(ids))
    return ids


def _is_null(value: object) -> bool:
    """None, NaN, pandas.NA and pandas.NaT: what does not equal itself."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # the truth of pandas.NA is unknown; that of an array too
        return type(value).__name__ == "NAType"


def _put_null(ids: Ids, at: npt.NDArray[Any], null: int | None) -> None:
    if len(at) == 0:
        return
    if null is None:
        raise ValueError(f"strings[{at[0]}] is null: pass null=<id> for strings that are missing")
    ids[at] = null


def _as_arrow(strings: Any) -> Any:
    """An Arrow array or its chunks; None for what numpy reads better: pandas columns of Python objects."""
    if hasattr(strings, "to_numpy") and str(getattr(strings, "dtype", "")) == "object":
        return None
    try:
        import pyarrow as pa
    except ImportError as error:
        if hasattr(strings, "to_numpy"):
            return None
        raise missing("ids_from of an Arrow column", "files", error) from error
    if isinstance(strings, (pa.Array, pa.ChunkedArray)):
        return strings
    if hasattr(strings, "__arrow_c_stream__"):
        return pa.chunked_array(strings)
    return pa.array(strings)


def _of_arrow(column: Any, seed: int, null: int | None) -> Ids:
    import pyarrow as pa

    types = pa.types
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    kind = column.type
    if types.is_dictionary(kind):
        parts = []
        for chunk in chunks:
            codes = chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            parts.append(_of_dictionary(chunk.dictionary, codes, seed, null))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    for view, plain in (("is_string_view", "large_string"), ("is_binary_view", "large_binary")):
        if getattr(types, view, lambda _: False)(kind):
            return _of_arrow(column.cast(getattr(pa, plain)()), seed, null)
    if types.is_null(kind):
        return _of_numpy([None] * len(column), seed, null)
    wide = types.is_large_string(kind) or types.is_large_binary(kind)
    fixed = types.is_fixed_size_binary(kind)
    if not (wide or fixed or types.is_string(kind) or types.is_binary(kind)):
        raise TypeError(f"strings should be a column of strings but their type is: {kind}")
    ids = np.empty(len(column), np.int64)
    start = 0
    for chunk in chunks:
        n = len(chunk)
        to = address(ids[start : start + n])
        if n and fixed:
            data = chunk.buffers()[1]
            from_ = data.address + chunk.offset * kind.byte_width
            _core.ids_of_fixed_bytes(from_, kind.byte_width, False, n, seed, to)
        elif n:
            _, offsets, data = chunk.buffers()
            hash_slices = _core.ids_of_slices64 if wide else _core.ids_of_slices32
            begin = offsets.address + chunk.offset * (8 if wide else 4)
            hash_slices(data.address if data else 0, data.size if data else 0, begin, n, seed, to)
        if chunk.null_count:
            at = np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False)) + start
            _put_null(ids, at, null)
        start += n
    return ids


def _of_dictionary(strings: Any, codes: npt.NDArray[Any], seed: int, null: int | None) -> Ids:
    """Hashes each distinct string once. A negative code is null."""
    known = np.append(_of_column(strings, seed, null), 0)  # the last is for codes below 0
    ids: Ids = known[codes]
    _put_null(ids, np.flatnonzero(codes < 0), null)
    return ids


# ---- TensorFlow


def _is_tensorflow(tensorflow: Any, strings: object) -> bool:
    kinds = ("Tensor", "RaggedTensor", "SparseTensor", "Variable")
    # A module that another thread is still importing may lack its names.
    return isinstance(
        strings, tuple(getattr(tensorflow, kind) for kind in kinds if hasattr(tensorflow, kind))
    )


def _of_tensorflow(tensorflow: Any, strings: Any, hashed: Callable[[Any], Ids]) -> Any:
    if strings.dtype != tensorflow.string:
        raise TypeError(f"strings should be a column of strings but their dtype is: {strings.dtype}")
    if isinstance(strings, tensorflow.RaggedTensor):
        return strings.with_flat_values(_of_tensorflow(tensorflow, strings.flat_values, hashed))
    if isinstance(strings, tensorflow.SparseTensor):
        return tensorflow.SparseTensor(
            strings.indices, _of_tensorflow(tensorflow, strings.values, hashed), strings.dense_shape
        )
    if tensorflow.executing_eagerly():
        return tensorflow.constant(hashed(np.asarray(strings.numpy(), object)), tensorflow.int64)
    # Of a graph: runs when the graph does.
    ids = tensorflow.numpy_function(
        lambda array: hashed(np.asarray(array, object)), [strings], tensorflow.int64, stateful=False
    )
    ids.set_shape(strings.shape)
    return ids


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
