"""The gate of a table: which keys without a row get one, by a strategy and a counter.

    missing keys of a batch ──► counter.add ──► strategy.admit ──► row, and the count is forgotten
                                                     └──────────► no row: a vector of the strategy's

It runs where the keys live, so the occurrences of all ranks are counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import embstore
from dynamicemb.embedding_admission import FrequencyAdmissionStrategy, KVCounter, MultiTableKVCounter
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.types import AdmissionStrategy, Counter

FILTER_THRESHOLD = 255  # what the engine's own filter counts up to
_UNBOUNDED = KVCounter(1 << 62)

Array = npt.NDArray[np.int64]


def filter_threshold(options: DynamicEmbTableOptions) -> int | None:
    """The threshold for the engine's own filter, where that does all that is asked for; else None."""
    strategy = options.admit_strategy
    if strategy is None:
        return 0
    if not isinstance(strategy, FrequencyAdmissionStrategy):
        return None
    if strategy.threshold <= 1:
        return 0  # the first occurrence is enough
    plain = strategy.initializer_args in (None, options.initializer_args)
    small = strategy.threshold <= FILTER_THRESHOLD
    return strategy.threshold if small and plain and options.admission_counter is None else None


class Gate:
    """Decides for the missing keys of a training batch.

    table_id  the number of the table in a counter that several tables share
    """

    def __init__(self, options: DynamicEmbTableOptions, table: embstore.Table, table_id: int) -> None:
        assert options.admit_strategy is not None
        self._strategy: AdmissionStrategy = options.admit_strategy
        self._table = table
        given = options.admission_counter
        if isinstance(given, Counter):
            self._counter: Counter = given
            self._id = table_id
        else:
            self._counter, self._id = MultiTableKVCounter([given or _UNBOUNDED]), 0

    def __call__(self, keys: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        places = torch.nonzero(~torch.as_tensor(self._table.contains(keys))).flatten()
        if not places.numel():
            return None, None
        distinct, which, occurrences = torch.unique(keys[places], return_inverse=True, return_counts=True)
        ids = torch.full_like(distinct, self._id)
        admitted = self._admitted(distinct, self._counter.add(distinct, ids, occurrences))
        self._counter.erase(distinct[admitted], ids[admitted])
        verdict = torch.ones(keys.numel(), dtype=torch.uint8)
        verdict[places] = admitted.to(torch.uint8)[which]
        vectors = None if bool(admitted.all()) else self._vectors(distinct, admitted)
        if vectors is None:
            return verdict, None
        initial = torch.empty((keys.numel(), self._table.dim), dtype=torch.float32)
        initial[places] = vectors[which]
        return verdict, initial

    def _admitted(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        mask = self._strategy.admit(keys, torch.as_tensor(frequencies))
        found = torch.as_tensor(mask)
        if found.shape != keys.shape or found.dtype != torch.bool:
            raise ValueError(
                f"admit of {type(self._strategy).__name__} should return a bool for each of the "
                f"{keys.numel()} keys but returned: {tuple(found.shape)} of {found.dtype}"
            )
        return found.to("cpu")

    def _vectors(self, keys: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor | None:
        """What new rows and refused keys start with; None: the table's initializer says it."""
        table, strategy = self._table, self._strategy
        ours = isinstance(strategy, FrequencyAdmissionStrategy)
        if ours and strategy.initializer_args is None:
            return None
        vectors = torch.as_tensor(table.initial_values(keys))
        if not ours:
            refused = torch.nonzero(~admitted).flatten()
            return vectors if strategy.initialize_non_admitted_embeddings(vectors, refused) else None
        # A function of seed and key, as the vectors of rows are.
        made = strategy.initializer_args.to_engine().rows(
            keys[~admitted], table.dim, seed=table.seed, table=table.name
        )
        vectors[~admitted] = torch.from_numpy(made)
        return vectors

    # ---- what a dump keeps

    def counts(self) -> tuple[Array, Array]:
        """Keys without a row, and how often each was seen."""
        if isinstance(self._counter, MultiTableKVCounter):
            return self._counter.counts[self._id].items()
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("keys", "frequencies")]
            self._counter.dump(str(files[0]), str(files[1]), self._id)
            keys, counts = (np.fromfile(file, np.int64) for file in files)
        if len(keys) != len(counts):
            raise ValueError(
                f"dump of {type(self._counter).__name__} should write as many frequencies as keys but wrote: "
                f"{len(counts)} and {len(keys)}"
            )
        return keys, counts

    def replace_counts(self, keys: Array, counts: Array) -> None:
        """Goes on from what `counts` gave."""
        if isinstance(self._counter, MultiTableKVCounter):
            self._counter.counts[self._id].replace(keys, counts)
            return
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("keys", "frequencies")]
            for file, array in zip(files, (keys, counts), strict=True):
                array.astype(np.int64).tofile(file)
            self._counter.load(str(files[0]), str(files[1]), self._id)
