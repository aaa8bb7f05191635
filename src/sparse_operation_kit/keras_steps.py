"""The train_step of Keras 3 computes no gradients for sok variables, so a lookup inside it raises."""

from __future__ import annotations

import sys
from typing import Any


def require_trained(variable: Any) -> None:
    """Raises RuntimeError where the train_step of Keras 3 runs, which would leave the rows unchanged."""
    keras = sys.modules.get("keras")
    default = getattr(getattr(keras, "Model", None), "train_step", None)
    code = getattr(default, "__code__", None)
    if code is None or not variable.trainable:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            raise RuntimeError(
                f"{variable.name!r} would not be trained: the train_step of Keras 3 ignores sok variables. "
                "Give the model a train_step that applies their gradients with sok.OptimizerWrapper "
                "(see examples/sok_keras.py), or write the training loop yourself"
            )
        frame = frame.f_back
