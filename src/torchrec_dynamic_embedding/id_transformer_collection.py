"""One embedding collection: the ids of its features become slots of its tables."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from .distributed import Peers
from .id_transformer import slot_map
from .ps import FetchHandle, PSCollection, uniform
from .windows import Ids, Window, Windows


class IDTransformerCollection:
    """The tables of one EmbeddingCollection or EmbeddingBagCollection, given by their configs.

    Without a `ps_collection` nothing is evicted, and a table that is full raises.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
        ps_collection: PSCollection | None = None,
    ) -> None:
        self.windows: list[Window] = []
        self._table_of: dict[str, int] = {}
        for number, config in enumerate(tables):
            if any(window.name == config.name for window in self.windows):
                raise ValueError(f"Duplicate table name {config.name}")
            if not config.feature_names:
                config.feature_names = [config.name]
            for feature in config.feature_names:
                if feature in self._table_of:
                    raise ValueError(f"a feature should belong to one table but two share: {feature}")
                self._table_of[feature] = number
            window = Window(config.name, slot_map(config.num_embeddings, eviction_config, transform_config))
            if ps_collection is not None:
                window.ps = ps_collection[config.name]
                window.initial = uniform(
                    window.ps,
                    config.get_weight_init_min(),
                    config.get_weight_init_max(),
                    ps_collection.seed,
                    config.embedding_dim,
                )
            self.windows.append(window)
        self._own: Windows | None = None

    def ids(self, kjt: KeyedJaggedTensor) -> list[Ids]:
        """The ids of each table, feature after feature."""
        values = kjt.values()
        if values.is_floating_point() or values.dtype == torch.bool:
            raise TypeError(
                f"the values of a KeyedJaggedTensor should be ids but their dtype is: {values.dtype}"
            )
        host = values.detach().to("cpu", torch.int64).contiguous().numpy()
        parts: list[list[Ids]] = [[] for _ in self.windows]
        for table, begin, end in self._ranges(kjt):
            parts[table].append(host[begin:end])
        return [p[0] if len(p) == 1 else np.concatenate([*p, np.empty(0, np.int64)]) for p in parts]

    def replaced(self, kjt: KeyedJaggedTensor, slots: Sequence[Ids]) -> KeyedJaggedTensor:
        """The same jagged tensor with slots in place of ids; features of no table keep their values."""
        values = kjt.values().detach().to("cpu", copy=True)
        taken = [0] * len(self.windows)
        for table, begin, end in self._ranges(kjt):
            part = slots[table][taken[table] : taken[table] + end - begin]
            values[begin:end] = torch.from_numpy(part)
            taken[table] += end - begin
        result = copy.copy(kjt)
        result._values = values.to(kjt.values().device)
        result._jt_dict = None  # a cache of the old values
        return result

    def _ranges(self, kjt: KeyedJaggedTensor) -> list[tuple[int, int, int]]:
        offsets = kjt.offset_per_key()
        return [
            (self._table_of[feature], offsets[i], offsets[i + 1])
            for i, feature in enumerate(kjt.keys())
            if feature in self._table_of
        ]

    def transform(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[FetchHandle]]:
        """Slots for the ids of a batch on their own; earlier batches count as trained."""
        if self._own is None:
            self._own = Windows(self.windows, Peers())
        prepared = self._own.prepare(self.ids(kjt))
        assert prepared is not None, "a rank with a batch is not at its end"
        time, slots = prepared
        self._own.in_flight.remove([time])
        return self.replaced(kjt, slots), [FetchHandle()]

    def save(self) -> None:
        """Pushes what was used since the last save."""
        if self._own is not None:
            self._own.save(self._own.peers)
