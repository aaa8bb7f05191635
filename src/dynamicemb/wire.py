"""The types in which vectors and gradients travel between ranks: those of TorchRec's quantized communication.

    get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16))

The engine reads and writes these types itself, so no codec runs. Keys and lengths travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.types import CommOp

_KNOWN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Wire:
    """Types of vectors (forward) and gradients (backward) on their way; None: as they are."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as it travels. What float16 cannot hold becomes its largest number, as in TorchRec."""
        if self.backward == torch.float16 and gradient.dtype != torch.float16:
            largest = torch.finfo(torch.float16).max
            gradient = gradient.clamp(-largest, largest)
        return gradient if self.backward is None else gradient.to(self.backward)


def wire_of(registry: Mapping[str, Any] | None, operation: CommOp) -> Wire:
    """What the codecs of a sharder ask for. Raises ValueError for anything but plain 16 or 32 bits."""
    codecs = (registry or {}).get(operation.name)
    if codecs is None:
        return Wire()
    found = {}
    for way in ("forward", "backward"):
        codec = getattr(codecs, way)
        dtype, scale = codec.quantized_dtype, getattr(codec, "_loss_scale", None)
        if callable(dtype):  # of TorchRec's codec that changes nothing
            dtype = dtype()
        if dtype not in _KNOWN or scale not in (None, 1.0):
            raise ValueError(
                f"qcomm_codecs_registry[{operation.name!r}].{way} should send float32, float16 or bfloat16 "
                f"without a loss scale where tables are dynamic but sends: {dtype}, loss scale {scale}"
            )
        found[way] = None if dtype == torch.float32 else dtype
    return Wire(**found)
