"""What the updates of Keras do to the rows that have a gradient, in numpy and float64."""

from __future__ import annotations

import numpy as np

# The optimizers of SOK by a name of ours: class in Keras, and its options.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.5}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        "Adagrad",
        {"learning_rate": 0.1, "initial_accumulator_value": 0.2, "epsilon": 1e-3},
    ),
    "adam": ("Adam", {"learning_rate": 0.1, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}),
    "adamax": ("Adamax", {"learning_rate": 0.1, "epsilon": 1e-3}),
    "adadelta": ("Adadelta", {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-4}),
    "ftrl": (
        "Ftrl",
        {
            "learning_rate": 0.3,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.4,
        },
    ),
}

SLOTS = {
    "sgd": (),
    "momentum": ("momentum",),
    "nesterov": ("momentum",),
    "adagrad": ("accumulator",),
    "adam": ("m", "v"),
    "adamax": ("m", "v"),
    "adadelta": ("accum_grad", "accum_var"),
    "ftrl": ("accumulator", "linear"),
}


class LazyTable:
    """Rows, their states and a count of updates; `update` touches the rows of the keys alone.

    Follows the legacy optimizers of Keras, where epsilon of Adagrad is added to the root.
    """

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        self.options = OPTIMIZERS[name][1]
        self.values = values.astype(np.float64)
        first = {"adagrad": self.options.get("initial_accumulator_value"), "ftrl": 0.1}.get(name, 0.0)
        self.states = [np.full_like(self.values, first if i == 0 else 0.0) for i in range(len(SLOTS[name]))]
        self.updates = 0

    def update(self, keys: np.ndarray, gradients: np.ndarray, lr: float | None = None) -> None:
        rows, inverse = np.unique(keys, return_inverse=True)
        g = np.zeros((len(rows), self.values.shape[1]))
        np.add.at(g, inverse, gradients.astype(np.float64))
        self.updates += 1
        old = [state[rows] for state in self.states]
        w, new = self._rule(self.values[rows], old, g, self.options["learning_rate"] if lr is None else lr)
        self.values[rows] = w
        for state, value in zip(self.states, new, strict=True):
            state[rows] = value

    def _rule(self, w, s, g, lr):
        o, t = self.options, self.updates
        if self.name == "sgd":
            return w - lr * g, []
        if self.name in ("momentum", "nesterov"):
            v = o["momentum"] * s[0] - lr * g
            return (w + v if self.name == "momentum" else w + o["momentum"] * v - lr * g), [v]
        if self.name == "adagrad":
            n = s[0] + g * g
            return w - lr * g / (np.sqrt(n) + o["epsilon"]), [n]
        if self.name == "adam":
            b1, b2 = o["beta_1"], o["beta_2"]
            m, v = b1 * s[0] + (1 - b1) * g, b2 * s[1] + (1 - b2) * g * g
            alpha = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
            return w - alpha * m / (np.sqrt(v) + o["epsilon"]), [m, v]
        if self.name == "adamax":
            m, u = 0.9 * s[0] + 0.1 * g, np.maximum(0.999 * s[1], np.abs(g))
            return w - lr / (1 - 0.9**t) * m / (u + o["epsilon"]), [m, u]
        if self.name == "adadelta":
            rho, eps = o["rho"], o["epsilon"]
            n = rho * s[0] + (1 - rho) * g * g
            step = np.sqrt(s[1] + eps) / np.sqrt(n + eps) * g
            return w - lr * step, [n, rho * s[1] + (1 - rho) * step * step]
        assert self.name == "ftrl"
        n = s[0] + g * g
        shrunk = g + 2 * o["l2_shrinkage_regularization_strength"] * w
        z = s[1] + shrunk - (np.sqrt(n) - np.sqrt(s[0])) / lr * w
        l1 = o["l1_regularization_strength"]
        curve = (np.sqrt(n) + o["beta"]) / lr + 2 * o["l2_regularization_strength"]
        return np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / curve, 0.0), [n, z]
