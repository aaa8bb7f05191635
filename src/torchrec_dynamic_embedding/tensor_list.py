"""A list of tensors that share their memory with the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class TensorList:
    """What `IDTransformer.transform` reads and writes; `tensor_list` is the plain list.

    >>> len(TensorList([torch.tensor([7, 9])]))
    1
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensors should be torch.Tensor but one is: {type(tensor).__name__}")
        self.tensor_list = [tensor.data for tensor in tensors]

    def __len__(self) -> int:
        return len(self.tensor_list)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor_list[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor_list)
