"""Rows that lie in pieces in several tensors, as one array of bytes and back.

weight[slot]  [ 4 floats ]                       pieces = RowPieces([weight, momentum])
momentum[slot] [ 1 float ]                       pieces.gather(slots)   (n, 20) bytes: [weight | momentum]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from embstore import _core
from embstore.arrays import address

Slots = npt.NDArray[np.int64]


class RowPieces:
    """Tensors (rows, columns) of any dtype on one device; row i of all of them together is a row."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def rows(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def tensor_bytes(self) -> list[int]:
        """Bytes of each piece of a row."""
        return [tensor.shape[1] * tensor.element_size() for tensor in self.tensors]

    def gather(self, slots: Slots) -> npt.NDArray[np.uint8]:
        """The rows (n, bytes) of these slots."""
        out = _core.empty_bytes(len(slots) * sum(self.tensor_bytes)).reshape(len(slots), -1)
        tensors = self.tensors
        if tensors[0].device.type != "cpu":
            tensors = [t.index_select(0, torch.from_numpy(slots).to(t.device)).cpu() for t in tensors]
            slots = np.arange(len(slots))
        _core.gather_pieces(_addresses(tensors), address(slots), len(slots), address(out))
        return out

    def scatter(self, slots: Slots, rows: npt.NDArray[np.uint8]) -> None:
        """Writes rows (n, bytes) to these slots."""
        if self.tensors[0].device.type == "cpu":
            _core.scatter_pieces(_addresses(self.tensors), address(slots), len(slots), address(rows))
            return
        begin = 0
        for tensor, size in zip(self.tensors, self.tensor_bytes):
            part = torch.from_numpy(np.ascontiguousarray(rows[:, begin : begin + size])).view(tensor.dtype)
            tensor.index_copy_(0, torch.from_numpy(slots).to(tensor.device), part.to(tensor.device))
            begin += size


def _addresses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    return [(t.data_ptr(), t.stride(0) * t.element_size(), t.shape[1] * t.element_size()) for t in tensors]
