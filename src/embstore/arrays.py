"""Arrays at the border of the engine: numpy or torch in, the same kind out, without copies.

The engine takes addresses, so everything is checked here: dtype, shape, order in memory and device.
torch is used when the caller passes tensors, and never imported otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embstore import _core
from embstore.options import DType

if TYPE_CHECKING:
    import torch

Array = Any  # numpy.ndarray or torch.Tensor
_INT64 = np.dtype(np.int64)  # numpy compares two of these faster than one with a type


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    # A module that another thread is still importing is there already, but may lack its names.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def address(array: npt.NDArray[Any]) -> int:
    """Where the data of a numpy array begins."""
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys as the engine wants them, and what is needed to answer in kind."""

    array: Array  # int64, contiguous, in host memory; keeps the address valid
    address: int
    n: int
    shape: tuple[int, ...]
    device: torch.device | None  # None: numpy

    def numpy(self) -> npt.NDArray[np.int64]:
        """The keys as numpy, in the memory of `array`. `np.array` of a tensor warns: torch's `__array__`
        does not take the argument `copy` that numpy 2 passes."""
        numpy: npt.NDArray[np.int64] = self.array if self.device is None else self.array.numpy()
        return numpy

    def like(self, array: npt.NDArray[Any]) -> Array:
        """A result of the engine as numpy or as a tensor on the device of the keys."""
        if self.device is None:
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def as_keys(keys: object, name: str = "keys") -> Keys:
    """Accepts integers of any width in a tensor, an array or a sequence; a shape is kept."""
    if type(keys) is np.ndarray and keys.ndim and keys.dtype == _INT64 and keys.flags.c_contiguous:
        return Keys(keys, address(keys), keys.size, keys.shape, None)
    if is_tensor(keys):
        return _tensor_keys(keys, name)
    array = np.asarray(keys)
    if array.size == 0 and not isinstance(keys, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        hint = "" if array.dtype.kind in "fcb" else "; embstore.ids_from makes ids of strings"
        raise TypeError(f"{name} should be integers but their dtype is: {array.dtype}{hint}")
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    flat = np.ascontiguousarray(array, dtype=np.int64)
    return Keys(flat, address(flat), flat.size, tuple(array.shape), None)


def _tensor_keys(keys: Any, name: str) -> Keys:
    import torch

    if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        raise TypeError(f"{name} should be integers but their dtype is: {keys.dtype}")
    if keys.layout != torch.strided:
        raise TypeError(f"{name} should be a dense tensor but its layout is: {keys.layout}")
    if keys.device.type == "meta":
        raise ValueError(f"{name} should have data but its device is: meta")
    array = keys.view(torch.int64) if keys.dtype == torch.uint64 else keys
    flat = array.to(device="cpu", dtype=torch.int64).contiguous()
    return Keys(flat, flat.data_ptr(), flat.numel(), tuple(keys.shape), keys.device)


def as_floats(values: object, shape: tuple[int, ...], name: str) -> npt.NDArray[np.float32]:
    """float32, contiguous, of exactly this shape."""
    if is_tensor(values):
        import torch

        values = values.detach().to(device="cpu", dtype=torch.float32).numpy()  # type: ignore[attr-defined]
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} should be numbers but their dtype is: {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} should have the shape {shape} but has: {tuple(array.shape)}")
    return np.ascontiguousarray(array, dtype=np.float32)


def as_integer(value: object, low: int, high: int, name: str) -> int:
    """An integer of any kind (not a bool) between low and high, both included."""
    index = None if isinstance(value, bool) else getattr(value, "__index__", None)
    if index is None or not low <= index() <= high:
        raise ValueError(f"{name} should be an integer between {low} and {high} but is: {value!r}")
    return int(index())


def as_scores(scores: object, n: int, name: str = "scores") -> npt.NDArray[np.uint64]:
    """uint64, contiguous, one for each key."""
    if is_tensor(scores):
        scores = scores.detach().cpu().numpy()  # type: ignore[attr-defined]
    array = np.asarray(scores)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} should be integers but their dtype is: {array.dtype}")
    if array.shape != (n,):
        raise ValueError(f"{name} should have the shape {(n,)} but has: {tuple(array.shape)}")
    if array.dtype.kind == "i" and n and array.min() < 0:
        raise ValueError(f"{name} should be at least 1 but the smallest is: {array.min()}")
    return np.ascontiguousarray(array).astype(np.uint64, copy=False)


def empty_floats(rows: int, columns: int) -> npt.NDArray[np.float32]:
    """A float32 array from the engine's pool of recycled outputs, not initialised."""
    return _core.empty_floats(rows, columns)


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch name of an element type."""
    import torch

    return {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}[dtype]


@cache
def engine_dtype(dtype: torch.dtype) -> DType | None:
    """The engine's name of a torch dtype, None where it has no such."""
    import torch

    known = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
    return known.get(dtype)


_SMALL_BYTES = 1 << 16  # what malloc gives without asking the kernel for pages


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is not initialised; a large one is from the engine's pool of recycled outputs."""
    import torch

    count = 1
    for size in shape:
        count *= size
    if count * dtype.itemsize <= _SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_core.empty_bytes(count * dtype.itemsize)).view(dtype).view(shape)
