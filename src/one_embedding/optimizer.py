"""Training with plain torch optimizers: rows move when an optimizer that holds the embedding steps.

embstore.nn.row_module tells an embedding when such an optimizer steps. Here the optimizer's rule and the
numbers of its param group become an optimizer of embstore, so learning-rate schedulers work as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import embstore
from embstore.nn.row_module import held_by, is_shadow

if TYPE_CHECKING:
    from one_embedding.embedding import MultiTableMultiColumnEmbedding

Group = dict[str, Any]


class SmartDecayAdam(torch.optim.Adam):
    """Adam that makes up for the steps in which a row had no gradient: embstore.SmartDecayAdam has the rule.

    Rows need a storage_dim of 3 * embedding_dim + 2, and one more where embedding_dim is odd: a row keeps the
    number of its last step. The steps are counted in the state of this optimizer, so load its state dict with
    a snapshot. Dense parameters, which have a gradient in every step, move as with torch.optim.Adam.
    Arguments are those of torch.optim.Adam.

    Raises:
        NotImplementedError: amsgrad or decoupled_weight_decay is asked for; at the first step.
        ValueError: rows have too little room; at the first step.

    Examples:
        >>> import one_embedding, tempfile, torch
        >>> store = one_embedding.make_cached_ssd_store_options(1, tempfile.mkdtemp(), storage_dim=8)
        >>> kinds = (torch.float32, torch.int64)
        >>> rows = one_embedding.MultiTableEmbedding("smart", 2, *kinds, None, store)
        >>> optimizer = one_embedding.SmartDecayAdam(rows.parameters(), lr=0.1)
        >>> rows(torch.tensor([7, 8])).sum().backward()
        >>> optimizer.step()
    """


class Ftrl(torch.optim.Optimizer):
    """FTRL-proximal, as OneEmbedding computes it, for embeddings and for dense parameters.

    Mind the sign: the accumulator is raised to `lr_power`, where TensorFlow and the paper raise it to
    -lr_power. With the default of -0.5 a larger accumulator therefore makes larger steps; 0.5 is the rule of
    the paper. Gradients n and z of a row begin at initial_accumulator_value and 0.

        n' = n + g^2                 s = (n'^lr_power - n^lr_power) / lr             z' = z + g - s w
        w' = 0 if |z'| < lambda1 else (sign(z') lambda1 - z') / ((beta + n'^lr_power) / lr + lambda2)
        and weight_decay takes lr * weight_decay * w from it

    Args:
        params: parameters of embeddings and of the dense part, or groups of them.
        lr: learning rate.
        weight_decay: decoupled, see above.
        lr_power: exponent of the accumulator.
        initial_accumulator_value: of n.
        lambda1: L1 regularization.
        lambda2: L2 regularization.
        beta: added to the accumulator's power.

    Raises:
        ValueError: a number is out of range; the message names it.

    Examples:
        >>> import one_embedding, torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = one_embedding.Ftrl([weight], lr=0.1, lr_power=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
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
                if parameter.grad is not None and not is_shadow(parameter):
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


class Optimizer(torch.optim.Optimizer):
    """An optimizer that trains embeddings too, for embeddings whose parameters it does not hold yet.

    They join its first param group. A GradScaler, clipping and LR schedulers work with it as with the
    optimizer itself. Embeddings that the optimizer holds need no wrapper.

    Args:
        optimizer: torch.optim.SGD, Adam, Adagrad, or `Ftrl` or `SmartDecayAdam`.
        embeddings: of this package.

    Raises:
        NotImplementedError: the optimizer is of another class.
        TypeError: one of the embeddings is something else.

    Examples:
        >>> import one_embedding, tempfile, torch
        >>> store = one_embedding.make_cached_ssd_store_options(1, tempfile.mkdtemp(), size_factor=3)
        >>> kinds = (torch.float32, torch.int64)
        >>> rows = one_embedding.MultiTableEmbedding("wrapped", 2, *kinds, None, store)
        >>> dense = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(dense.parameters(), lr=0.1)
        >>> optimizer = one_embedding.Optimizer(adam, [rows])
        >>> dense(rows(torch.tensor([7, 8]))).sum().backward()
        >>> optimizer.step()
    """

    # The wrapped one does not see what a GradScaler tells this object, so gradients come unscaled.
    _step_supports_amp_scaling = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, embeddings: Sequence[MultiTableMultiColumnEmbedding]
    ) -> None:
        from one_embedding.embedding import MultiTableMultiColumnEmbedding

        # Not super().__init__: params, state and hooks are those of the wrapped optimizer.
        rule_of(optimizer, optimizer.param_groups[0], {}, 0)
        for embedding in embeddings:
            if not isinstance(embedding, MultiTableMultiColumnEmbedding):
                raise TypeError(
                    f"embeddings should be of one_embedding but one is: {type(embedding).__name__}"
                )
        self.optimizer = optimizer
        self.embeddings = list(embeddings)
        held = {id(module) for module, _ in held_by(optimizer)}
        params = optimizer.param_groups[0]["params"]
        params.extend(embedding.shadow for embedding in self.embeddings if id(embedding) not in held)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer and of all rows that have gradients."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, those of rows too."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: Group) -> None:
        self.optimizer.add_param_group(param_group)
