"""What an optimizer object of Keras or TensorFlow asks for, in the engine's terms.

    read_rule(tf.keras.optimizers.Adam(0.01))  ->  Rule("Adam", embstore.Adam(...), slots=("m", "v"), ...)

Understood are the classes of Keras 3, of tf_keras (new and legacy) and of tf.compat.v1.train. Options that
the engine does not have are refused by name, unless they are off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import embstore
from embstore import EpsPlacement
from embstore.formats.sok import STATES
from sparse_operation_kit import bridge

KERAS_PACKAGES = ("keras", "tf_keras", "tensorflow")

# Entries of a Keras configuration that say nothing about the update.
NEUTRAL = ("name", "jit_compile", "is_legacy_optimizer", "ema_momentum", "ema_overwrite_frequency")


@dataclass(frozen=True)
class Rule:
    """An optimizer by its name in dumps, the engine's options, the names of its states, and the learning
    rate as a function of the number of updates so far (a scalar tensor)."""

    name: str
    optimizer: embstore.Optimizer
    slots: tuple[str, ...]
    learning_rate: Callable[[tf.Tensor], tf.Tensor]


def read_rule(optimizer: Any) -> Rule:
    """The rule of an optimizer object. Raises NotImplementedError that names what is not supported."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if isinstance(optimizer, tf.compat.v1.train.Optimizer) and kind.__name__ in _V1:
        name, make, rate = _V1[kind.__name__]
        return _rule(name, make(optimizer), lambda _: _number(lambda: getattr(optimizer, rate)))
    if package in KERAS_PACKAGES and kind.__name__ in _KERAS:
        legacy = hasattr(optimizer, "_create_slots")
        if not legacy and bridge.in_session_graph():
            raise TypeError(
                "optimizer should be of tf.compat.v1.train or tf_keras.optimizers.legacy in a graph of "
                f"tf.compat.v1 but is: {kind.__module__}.{kind.__name__}"
            )
        config = dict(optimizer.get_config())
        config.pop("learning_rate", None)
        if legacy:
            config.pop("decay", None)
        for name in NEUTRAL:
            config.pop(name, None)
        made = _KERAS[kind.__name__](config, legacy)
        for name, value in config.items():
            if value is not None and value is not False and value != 0:
                raise NotImplementedError(
                    f"{name}={value!r} of {kind.__name__} is not supported by OptimizerWrapper"
                )
        return _rule(kind.__name__, made, _legacy_rate(optimizer) if legacy else _keras_rate(optimizer))
    if kind.__name__.startswith("LossScaleOptimizer"):
        raise TypeError(
            "optimizer should not be a LossScaleOptimizer: OptimizerWrapper applies gradients as they are. "
            "Wrap its inner optimizer, and train the sok variables without loss scaling"
        )
    known = sorted({*_KERAS, *_V1})
    raise NotImplementedError(
        f"{kind.__module__}.{kind.__name__} is not supported by OptimizerWrapper, "
        f"which takes: {', '.join(known)}"
    )


def sgd_rule(rate: Callable[[], Any]) -> Rule:
    """w -= rate() * g."""
    return _rule("SGD", embstore.SGD(), lambda _: _number(rate))


def _rule(name: str, optimizer: embstore.Optimizer, rate: Callable[[tf.Tensor], tf.Tensor]) -> Rule:
    _, slots = STATES.get(optimizer.engine_name, (name, ()))
    return Rule(name, optimizer, slots, rate)


# ---- learning rates


def _number(read: Callable[[], Any]) -> tf.Tensor:
    """A number that Python code may change between the steps, read at each of them."""
    value = read()
    if callable(value):
        return _number(value)
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        return tf.cast(tf.convert_to_tensor(value), tf.float32)
    (rate,) = bridge.call(lambda: [np.float32(read())], [], [tf.float32])
    rate.set_shape([])
    return rate


def _keras_rate(optimizer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    def rate(updates: tf.Tensor) -> tf.Tensor:
        value = optimizer._learning_rate
        if hasattr(value, "get_config"):  # a schedule
            value = value(updates)
        elif callable(value) and not isinstance(value, tf.Variable) and not hasattr(value, "assign"):
            value = value()
        return tf.cast(tf.convert_to_tensor(value), tf.float32)

    return rate


def _legacy_rate(optimizer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    with tf.init_scope():
        optimizer._create_hypers()  # numbers become variables, so that a tf.function sees their changes

    def rate(updates: tf.Tensor) -> tf.Tensor:
        value = optimizer._get_hyper("learning_rate")
        if hasattr(value, "get_config"):
            value = value(updates)
        value = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if optimizer._initial_decay > 0:
            decay = tf.cast(optimizer._get_hyper("decay"), tf.float32)
            value = value / (1.0 + decay * tf.cast(updates, tf.float32))
        return value

    return rate


# ---- Keras: config -> engine. What is understood is taken out of the config.


def _sgd(config: dict[str, Any], legacy: bool) -> embstore.Optimizer:
    momentum, nesterov = float(config.pop("momentum")), bool(config.pop("nesterov"))
    if not momentum:
        return embstore.SGD()
    return embstore.SGD(momentum=momentum, nesterov=nesterov, velocity=True)


def _adagrad(config: dict[str, Any], legacy: bool) -> embstore.Optimizer:
    return embstore.Adagrad(
        eps=float(config.pop("epsilon")),
        initial_accumulator_value=float(config.pop("initial_accumulator_value")),
        # The legacy kernel adds epsilon to the root, the later ones below it.
        eps_placement=EpsPlacement.TORCH if legacy else EpsPlacement.KERAS,
    )


def _moments(kind: type[embstore.Adam]) -> Callable[[dict[str, Any], bool], embstore.Optimizer]:
    def make(config: dict[str, Any], legacy: bool) -> embstore.Optimizer:
        return kind(
            betas=(float(config.pop("beta_1")), float(config.pop("beta_2"))),
            eps=float(config.pop("epsilon")),
            eps_placement=EpsPlacement.KERAS,
        )

    return make


def _adadelta(config: dict[str, Any], legacy: bool) -> embstore.Optimizer:
    return embstore.Adadelta(rho=float(config.pop("rho")), eps=float(config.pop("epsilon")))


def _ftrl(config: dict[str, Any], legacy: bool) -> embstore.Optimizer:
    return embstore.Ftrl(
        lr_power=float(config.pop("learning_rate_power")),
        initial_accumulator_value=float(config.pop("initial_accumulator_value")),
        lambda1=float(config.pop("l1_regularization_strength")),
        # TensorFlow's penalty is l2 * w^2, without the half.
        lambda2=2.0 * float(config.pop("l2_regularization_strength")),
        l2_shrinkage=float(config.pop("l2_shrinkage_regularization_strength")),
        beta=float(config.pop("beta")),
    )


_KERAS: dict[str, Callable[[dict[str, Any], bool], embstore.Optimizer]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _moments(embstore.Adam),
    "Adamax": _moments(embstore.Adamax),
    "Adadelta": _adadelta,
    "Ftrl": _ftrl,
}


# ---- tf.compat.v1.train: class -> (name, engine's options, attribute of the learning rate)


def _v1_momentum(o: Any) -> embstore.Optimizer:
    if not o._momentum:
        return embstore.SGD()
    return embstore.SGD(momentum=float(o._momentum), nesterov=bool(o._use_nesterov))


def _v1_ftrl(o: Any) -> embstore.Optimizer:
    return embstore.Ftrl(
        lr_power=float(o._learning_rate_power),
        initial_accumulator_value=float(o._initial_accumulator_value),
        lambda1=float(o._l1_regularization_strength),
        lambda2=2.0 * float(o._l2_regularization_strength),
        l2_shrinkage=float(o._l2_shrinkage_regularization_strength),
        beta=float(o._beta or 0.0),
    )


_V1: dict[str, tuple[str, Callable[[Any], embstore.Optimizer], str]] = {
    "GradientDescentOptimizer": ("SGD", lambda o: embstore.SGD(), "_learning_rate"),
    "MomentumOptimizer": ("SGD", _v1_momentum, "_learning_rate"),
    "AdagradOptimizer": (
        "Adagrad",
        lambda o: embstore.Adagrad(eps=0.0, initial_accumulator_value=float(o._initial_accumulator_value)),
        "_learning_rate",
    ),
    "AdamOptimizer": (
        "Adam",
        lambda o: embstore.Adam(
            betas=(float(o._beta1), float(o._beta2)), eps=float(o._epsilon), eps_placement=EpsPlacement.KERAS
        ),
        "_lr",
    ),
    "AdadeltaOptimizer": (
        "Adadelta",
        lambda o: embstore.Adadelta(rho=float(o._rho), eps=float(o._epsilon)),
        "_lr",
    ),
    "FtrlOptimizer": ("Ftrl", _v1_ftrl, "_learning_rate"),
}
