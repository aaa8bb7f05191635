"""Initializers by the names of SparseOperationKit, or as Keras objects, in the engine's terms.

"random", ""   uniform in [-0.05, 0.05)            "normal"    mean 0, standard deviation 1
"uniform"      uniform in [0, 1)                   "zeros", "ones", "0.25": a constant
'random {"stddev": 0.01}'    mean 0, this standard deviation
"""

from __future__ import annotations

import json
import math
from typing import Any

import embstore

NAMED = {
    "": embstore.Uniform(-0.05, 0.05),
    "random": embstore.Uniform(-0.05, 0.05),
    "normal": embstore.Normal(0.0, 1.0),
    "uniform": embstore.Uniform(0.0, 1.0),
    "ones": embstore.Constant(1.0),
    "zeros": embstore.Constant(0.0),
}


def _truncated(config: dict[str, Any]) -> embstore.Initializer:
    mean, deviation = config["mean"], config["stddev"]
    return embstore.TruncatedNormal(mean, deviation, mean - 2 * deviation, mean + 2 * deviation)


KERAS = {
    "Zeros": lambda config: embstore.Constant(0.0),
    "Ones": lambda config: embstore.Constant(1.0),
    "Constant": lambda config: embstore.Constant(float(config["value"])),
    "RandomUniform": lambda config: embstore.Uniform(config["minval"], config["maxval"]),
    "RandomNormal": lambda config: embstore.Normal(config["mean"], config["stddev"]),
    "TruncatedNormal": _truncated,
}


def _deviation(initializer: str) -> float | None:
    """x of 'random {"stddev": x}', None for any other text."""
    head, brace, rest = initializer.partition("{")
    if head.strip() != "random":
        return None
    try:
        options = json.loads(brace + rest)
    except ValueError:
        return None
    value = options.get("stddev") if isinstance(options, dict) and len(options) == 1 else None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value >= 0 else None


def as_initializer(initializer: Any) -> tuple[embstore.Initializer, int, str]:
    """The engine's initializer, its seed, and its name for `initializer_str`."""
    if initializer is None:
        initializer = "random"
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        initializer = str(initializer)
    if isinstance(initializer, str):
        if initializer in NAMED:
            return NAMED[initializer], 0, initializer
        try:
            number = float(initializer)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return embstore.Constant(number), 0, initializer
        deviation = _deviation(initializer)
        if deviation is not None:
            return embstore.Normal(0.0, deviation), 0, initializer
        known = ", ".join(map(repr, NAMED))
        raise ValueError(
            f"initializer should be a number as text, 'random {{\"stddev\": x}}' or one of {known} "
            f"but is: {initializer!r}"
        )
    name = type(initializer).__name__
    if name in KERAS and hasattr(initializer, "get_config"):
        config = initializer.get_config()
        seed = config.get("seed")
        return KERAS[name](config), seed if isinstance(seed, int) else 0, name
    known = ", ".join(KERAS)
    raise ValueError(
        f"initializer should be a string or a Keras initializer ({known}) but is: {initializer!r}"
    )
