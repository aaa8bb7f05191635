"""Hooks on a wrapped model that tell which batch is in use, and when it was trained.

    model                      which batches it was given, for collections that get something made of them
      collection               a use of the batch begins
        lookup (TorchRec's)    its output belongs to this use; when backward has passed it, the use ends

A pass without gradients, or in eval mode, ends its use when the collection returns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Variable
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from .containers import jagged_tensors
from .in_flight import Batch, InFlight, Use


class TrainingHooks:
    """`collections` maps paths to the sharded modules that are wrapped."""

    def __init__(
        self,
        module: DistributedModelParallel,
        collections: Mapping[str, torch.nn.Module],
        flight: InFlight,
    ) -> None:
        self._flight = flight
        self._local = threading.local()
        module.register_forward_pre_hook(self._model_begins, with_kwargs=True)
        module.register_forward_hook(self._model_ends, with_kwargs=True, always_call=True)
        for path, collection in collections.items():
            collection.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: self._collection_begins(path, args, kwargs),
                with_kwargs=True,
            )
            collection.register_forward_hook(self._collection_ends, always_call=True)
            for lookup in collection._lookups:
                lookup.register_forward_hook(self._looked_up)

    def _given(self) -> list[list[Batch]]:
        """The batches of the models whose forward pass is running in this thread."""
        if not hasattr(self._local, "given"):
            self._local.given, self._local.uses = [], []
        return self._local.given  # type: ignore[no-any-return]

    def _uses(self) -> list[tuple[Use, list[torch.Tensor]] | None]:
        """The uses of the collections whose forward pass is running in this thread."""
        self._given()
        return self._local.uses  # type: ignore[no-any-return]

    def _model_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batches: list[Batch] = []
        self._given().append(batches)
        for _, kjt in jagged_tensors([args, kwargs]):
            batch = self._flight.of(kjt.values())
            if batch is not None and batch not in batches:
                batches.append(batch)

    def _model_ends(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for batch in self._given().pop():
            self._flight.seen_by_model(batch)

    def _collection_begins(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        uses = self._uses()
        uses.append(None)
        kjt = next((v for v in (*args, *kwargs.values()) if isinstance(v, KeyedJaggedTensor)), None)
        batch = self._flight.of(kjt.values()) if kjt is not None else None
        if batch is None and self._given() and len(self._given()[-1]) == 1:
            [batch] = self._given()[-1]
        if batch is None and kjt is not None:
            batch = self._flight.guess(path, kjt.values().numel())
        if batch is not None:
            uses[-1] = self._flight.begin_use(batch, path), []

    def _looked_up(self, module: Any, args: Any, output: Any) -> None:
        uses = self._uses()
        if uses and uses[-1] is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            uses[-1][1].append(output)

    def _collection_ends(self, module: Any, args: Any, output: Any) -> None:
        current = self._uses().pop()
        if current is None:
            return
        use, outputs = current
        for tensor in outputs:
            tensor.register_hook(_before_backward_of(use))
        if not outputs or not module.training or output is None:  # None: it raised
            use.end()


def _before_backward_of(use: Use) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        use.check()
        Variable._execution_engine.queue_callback(use.end)  # once the whole pass is over

    return hook
