"""Training with plain torch optimizers: rows move when an optimizer that holds the embedding steps.

An embedding has one parameter, its shadow, which stands for all rows. Global hooks of torch.optim look for
shadows in every optimizer that steps, translate the rule and the numbers of its param group, and let embstore
update the rows that have gradients. So learning-rate schedulers and gradient scalers work as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import embstore

if TYPE_CHECKING:
    from one_embedding.embedding import MultiTableMultiColumnEmbedding

Group = dict[str, Any]

_embeddings: weakref.WeakValueDictionary[int, MultiTableMultiColumnEmbedding] = weakref.WeakValueDictionary()


def watch(embedding: MultiTableMultiColumnEmbedding) -> None:
    """From now on optimizers that hold the shadow of this embedding train its rows."""
    _embeddings[id(embedding.shadow)] = embedding


class SmartDecayAdam(torch.optim.Adam):
    """Adam that makes up for the steps in which a row had no gradient: embstore.SmartDecayAdam has the rule.

    Rows need a storage_dim of 3 * embedding_dim + 2, and one more where embedding_dim is odd: a row keeps the
    number of its last step. The steps are counted in the state of this optimizer, so load its state dict with
    a snapshot. Dense parameters, which have a gradient in every step, move as with torch.optim.Adam.
    """


class Ftrl(torch.optim.Optimizer):
    """FTRL-proximal, as OneEmbedding computes it, for embeddings and for dense parameters.

    Mind the sign: the accumulator is raised to `lr_power`, where TensorFlow and the paper raise it to
    -lr_power. With the default of -0.5 a larger accumulator therefore makes larger steps; 0.5 is the rule of
    the paper. Gradients n and z of a row begin at initial_accumulator_value and 0.

        n' = n + g^2                 s = (n'^lr_power - n^lr_power) / lr             z' = z + g - s w
        w' = 0 if |z'| < lambda1 else (sign(z') lambda1 - z') / ((beta + n'^lr_power) / lr + lambda2)
        and weight_decay takes lr * weight_decay * w from it
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        numbers = {
            "lr": lr,
            "weight_decay": weight_decay,
            "lr_power": lr_power,
            "initial_accumulator_value": initial_accumulator_value,
            "lambda1": lambda1,
            "lambda2": lambda2,
            "beta": beta,
        }
        embstore.Ftrl(**numbers)  # checks them
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Rows of embeddings follow in the hook, as with every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in _embeddings:
                    self._step_dense(parameter, group)
        return loss

    def _step_dense(self, w: torch.Tensor, group: Group) -> None:
        state = self.state[w]
        if not state:
            state["accumulator"] = torch.full_like(w, group["initial_accumulator_value"])
            state["z"] = torch.zeros_like(w)
        n, z, g, power = state["accumulator"], state["z"], w.grad, group["lr_power"]
        before = n.pow(power)
        n.addcmul_(g, g)
        after = n.pow(power)
        z.add_(g - (after - before) / group["lr"] * w)
        moved = (z.sign() * group["lambda1"] - z) / ((group["beta"] + after) / group["lr"] + group["lambda2"])
        kept = torch.where(z.abs() < group["lambda1"], torch.zeros_like(w), moved)
        w.copy_(kept - group["lr"] * group["weight_decay"] * w)


# ---- what the numbers of a param group mean to embstore


@dataclass(frozen=True)
class Rule:
    """An update: embstore's optimizer, the factor of the gradients, and the number of the step (from 1)."""

    optimizer: embstore.Optimizer
    scale: float = 1.0
    step: int = 1


def _direction(group: Group) -> float:
    return -1.0 if group.get("maximize") else 1.0


def _sgd(group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    rule = embstore.SGD(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
    )
    return Rule(rule, _direction(group), steps_before + 1)


def _adam(group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    kind = embstore.AdamW if group.get("decoupled_weight_decay") else embstore.Adam
    return _like_adam(kind, group, state, steps_before)


def _smart_decay_adam(group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    if group.get("decoupled_weight_decay"):
        raise NotImplementedError("decoupled_weight_decay of SmartDecayAdam is not supported")
    return _like_adam(embstore.SmartDecayAdam, group, state, steps_before)


def _like_adam(
    kind: type[embstore.Adam | embstore.SmartDecayAdam],
    group: Group,
    state: dict[str, Any],
    steps_before: int,
) -> Rule:
    if group.get("amsgrad"):
        raise NotImplementedError("amsgrad of torch.optim.Adam is not supported by one_embedding")
    rule = kind(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )
    return Rule(rule, _direction(group), max(1, int(state.get("step", steps_before + 1))))


def _adagrad(group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    step = max(1, int(state.get("step", steps_before + 1)))
    rule = embstore.Adagrad(
        lr=float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"])),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        initial_accumulator_value=float(group["initial_accumulator_value"]),
    )
    return Rule(rule, _direction(group), step)


def _ftrl(group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    names = ("weight_decay", "lr_power", "initial_accumulator_value", "lambda1", "lambda2", "beta")
    numbers = {name: float(group[name]) for name in names}
    return Rule(embstore.Ftrl(lr=float(group["lr"]), paper_sign=False, **numbers), 1.0, steps_before + 1)


_RULES: dict[type, Callable[[Group, dict[str, Any], int], Rule]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.Adagrad: _adagrad,
    Ftrl: _ftrl,
    SmartDecayAdam: _smart_decay_adam,
}


def rule_of(optimizer: torch.optim.Optimizer, group: Group, state: dict[str, Any], steps_before: int) -> Rule:
    """The update that this optimizer makes with this group; another type of optimizer raises."""
    # A subclass may do anything: torch's AdamW is one of Adam.
    maker = _RULES.get(type(optimizer))
    if maker is None:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise NotImplementedError(
            f"optimizer of an embedding should be exactly one of {known} but is: {type(optimizer).__name__}"
        )
    return maker(group, state, steps_before)


def _held(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[MultiTableMultiColumnEmbedding, Group]]:
    if not _embeddings:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            embedding = _embeddings.get(id(parameter))
            if embedding is not None and embedding.shadow is parameter:
                yield embedding, group


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Before anything moves: a wrong optimizer must not leave dense parameters a step ahead of the rows.
    for embedding, group in _held(optimizer):
        embedding.check_rule(rule_of(optimizer, group, {}, 0))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for embedding, group in _held(optimizer):
        state = optimizer.state.get(embedding.shadow, {})
        embedding.apply_rule(lambda steps, g=group, s=state: rule_of(optimizer, g, s, steps))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


class Optimizer:
    """Steps an optimizer and embeddings together, for embeddings whose parameters it does not hold.

    Their rows follow the first param group. Embeddings that the optimizer holds need no wrapper.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, embeddings: Sequence[MultiTableMultiColumnEmbedding]
    ) -> None:
        from one_embedding.embedding import MultiTableMultiColumnEmbedding

        rule_of(optimizer, optimizer.param_groups[0], {}, 0)
        for embedding in embeddings:
            if not isinstance(embedding, MultiTableMultiColumnEmbedding):
                raise TypeError(
                    f"embeddings should be of one_embedding but one is: {type(embedding).__name__}"
                )
        self.optimizer = optimizer
        self.embeddings = list(embeddings)

    @property
    def param_groups(self) -> list[Group]:
        return self.optimizer.param_groups

    def _others(self) -> Iterable[MultiTableMultiColumnEmbedding]:
        held = {id(embedding) for embedding, _ in _held(self.optimizer)}
        return [embedding for embedding in self.embeddings if id(embedding) not in held]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer and of all rows that have gradients."""
        group = self.optimizer.param_groups[0]
        others = self._others()
        for embedding in others:
            embedding.check_rule(rule_of(self.optimizer, group, {}, 0))
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        for embedding in others:
            embedding.apply_rule(lambda steps: rule_of(self.optimizer, group, {}, steps))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, those of rows too."""
        self.optimizer.zero_grad(set_to_none)
        for embedding in self._others():
            embedding.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
