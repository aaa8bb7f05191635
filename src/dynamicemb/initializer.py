"""Initializers as callables that fill rows of a tensor.

    fill = create_initializer_from_args(DynamicEmbInitializerArgs(DynamicEmbInitializerMode.DEBUG))
    fill(buffer, indices, keys)

Random modes draw from torch's generator. A table does not use these: its rows are a function of seed and key.
"""

from __future__ import annotations

import abc

import torch

from dynamicemb.enumerations import (
    DEBUG_EMB_INITIALIZER_MOD,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)


class BaseDynamicEmbInitializer(abc.ABC):
    """Fills the rows `indices` of `buffer` (None: all); `keys` are those of the indices."""

    def __init__(self, args: DynamicEmbInitializerArgs) -> None:
        args.to_engine()  # raises for numbers that make no sense
        self._args = args.copy()

    def __call__(
        self, buffer: torch.Tensor, indices: torch.Tensor | None = None, keys: torch.Tensor | None = None
    ) -> None:
        rows = torch.arange(buffer.shape[0]) if indices is None else indices
        made = torch.empty(rows.numel(), buffer.shape[1], dtype=torch.float32)
        self._fill(made, keys)
        buffer[rows.to(buffer.device)] = made.to(device=buffer.device, dtype=buffer.dtype)

    @property
    def _bounds(self) -> tuple[float, float]:
        lower, upper = self._args.lower, self._args.upper
        return 0.0 if lower is None else lower, 1.0 if upper is None else upper

    @abc.abstractmethod
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        """Writes the rows."""


class NormalInitializer(BaseDynamicEmbInitializer):
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        rows.normal_(self._args.mean, self._args.std_dev)


class TruncatedNormalInitializer(BaseDynamicEmbInitializer):
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        torch.nn.init.trunc_normal_(rows, self._args.mean, self._args.std_dev, *self._bounds)


class UniformInitializer(BaseDynamicEmbInitializer):
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        rows.uniform_(*self._bounds)


class ConstantInitializer(BaseDynamicEmbInitializer):
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        rows.fill_(self._args.value)


class DebugInitializer(BaseDynamicEmbInitializer):
    def _fill(self, rows: torch.Tensor, keys: torch.Tensor | None) -> None:
        if keys is None or keys.numel() != rows.shape[0]:
            raise ValueError(f"keys should be {rows.shape[0]} keys for the mode DEBUG but is: {keys!r}")
        numbers = [int(key) % (1 << 64) % DEBUG_EMB_INITIALIZER_MOD for key in keys.tolist()]
        rows.copy_(torch.tensor(numbers, dtype=torch.float32)[:, None].expand_as(rows))


_CLASSES = {
    DynamicEmbInitializerMode.NORMAL: NormalInitializer,
    DynamicEmbInitializerMode.TRUNCATED_NORMAL: TruncatedNormalInitializer,
    DynamicEmbInitializerMode.UNIFORM: UniformInitializer,
    DynamicEmbInitializerMode.CONSTANT: ConstantInitializer,
    DynamicEmbInitializerMode.DEBUG: DebugInitializer,
}


def create_initializer_from_args(args: DynamicEmbInitializerArgs) -> BaseDynamicEmbInitializer:
    """The initializer of this mode. Raises ValueError for another mode or bad numbers."""
    if args.mode not in _CLASSES:
        raise ValueError(f"mode should be a DynamicEmbInitializerMode but is: {args.mode!r}")
    return _CLASSES[args.mode](args)
