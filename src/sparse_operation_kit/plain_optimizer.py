"""The states of a plain Keras optimizer for static variables, by the names of Keras 2, for dump and load.

optimizer = tf.keras.optimizers.Adam(0.01)
optimizer.apply_gradients([(gradient, static_variable)])
sok.dump("weights", [static_variable], optimizer)          # ...-Adam-m, ...-Adam-v
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from embstore.formats.sok import STATES
from sparse_operation_kit.rules import KERAS_PACKAGES
from sparse_operation_kit.static import StaticVariable

# By class, where Keras 3 and the new optimizers of tf_keras keep their states, in the order of STATES.
LISTS = {
    "SGD": ("momentums",),
    "Adagrad": ("_accumulators",),
    "Adam": ("_momentums", "_velocities"),
    "Adamax": ("_m", "_u"),
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "Ftrl": ("_accumulators", "_linears"),
}

# Options that give a row states which the files have no place for.
MORE_STATES = ("amsgrad", "use_ema", "gradient_accumulation_steps")


class PlainOptimizer:
    """What `dump` and `load` ask of an optimizer, answered by one of Keras 3 or tf_keras (new or legacy)."""

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        for option in MORE_STATES:
            if getattr(optimizer, option, None):
                raise NotImplementedError(
                    f"{option} of {self.name} is not supported by sok.dump and sok.load: "
                    "its states have no place in the files"
                )
        self._optimizer = optimizer
        self._legacy = hasattr(optimizer, "_create_slots")
        without = self.name == "SGD" and not _momentum(optimizer)
        self.slots = () if without else {name: slots for name, slots in STATES.values()}[self.name]

    @staticmethod
    def accepts(optimizer: Any) -> bool:
        """Whether it is a Keras optimizer whose states the files know."""
        kind = type(optimizer)
        return kind.__module__.partition(".")[0] in KERAS_PACKAGES and kind.__name__ in LISTS

    @property
    def iterations(self) -> Any:
        """The optimizer's own count of updates."""
        return self._optimizer.iterations

    def create_slots(self, vars: Iterable[Any]) -> None:
        """Makes the states where it can be done for one variable after another, else requires them."""
        variables = list(vars)
        dynamic = [var.name for var in variables if not isinstance(var, StaticVariable)]
        if dynamic:
            raise ValueError(
                "optimizer should be a sok.OptimizerWrapper for dynamic variables "
                f"such as {dynamic[0]!r} but is: {self.name}"
            )
        for var in variables:
            if self._legacy:
                self._optimizer._create_all_weights([var])
            elif self._index(var) is None:
                raise ValueError(
                    f"optimizer should know {var.name!r}: call build of the {self.name} first, "
                    "with all variables that it trains"
                )

    def get_slot(self, var: Any, name: str) -> tf.Variable:
        """A state as a variable of the shape of `var`."""
        if self._legacy:
            return self._optimizer.get_slot(var, name)
        states = getattr(self._optimizer, LISTS[self.name][self.slots.index(name)])
        state = states[self._index(var)]
        return state if isinstance(state, tf.Variable) else state.value  # Keras 3 wraps it

    def _index(self, var: Any) -> int | None:
        known = getattr(self._optimizer, "_trainable_variables_indices", None)  # Keras 3
        if known is None:
            known = getattr(self._optimizer, "_index_dict", {})  # tf_keras
        return known.get(self._optimizer._var_key(var))


def _momentum(optimizer: Any) -> bool:
    return bool(optimizer._momentum if hasattr(optimizer, "_create_slots") else optimizer.momentum)
