"""One embedding collection: the ids of its features become slots of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec import KeyedJaggedTensor

from .distributed import Peers
from .id_transformer import slot_map
from .jagged_ids import ids_of, with_slots
from .ps import FetchHandle, PSCollection, uniform
from .windows import Window, Windows


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

    @property
    def features(self) -> dict[str, int]:
        """Feature to the number of its table."""
        return self._table_of

    def transform(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[FetchHandle]]:
        """Slots for the ids of a batch on their own; earlier batches count as trained."""
        if self._own is None:
            self._own = Windows(self.windows, Peers())
        part = (kjt, self._table_of)
        prepared = self._own.prepare(ids_of([part], len(self.windows)))
        assert prepared is not None, "a rank with a batch is not at its end"
        time, slots = prepared
        self._own.in_flight.remove([time])
        return with_slots([part], slots)[0], [FetchHandle()]

    def save(self) -> None:
        """Pushes what was used since the last save."""
        if self._own is not None:
            self._own.save(self._own.peers)
