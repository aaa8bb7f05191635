"""The gate of a table: which keys without a row get one, by a strategy and a counter.

    missing keys of a batch ──► counter.add ──► strategy.admit ──► row, and the count is forgotten
                                                     └──────────► no row: a vector of the strategy's

It runs where the keys live, so the occurrences of all ranks are counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

import embstore
from dynamicemb.embedding_admission import FrequencyAdmissionStrategy, KVCounter, MultiTableKVCounter
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.types import AdmissionStrategy, Counter
from embstore.exact_counts import Array, Counts, changes_between, counts_of

FILTER_THRESHOLD = 255  # what the engine's own filter counts up to
_UNBOUNDED = KVCounter(1 << 62)


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
        # Dumps and logs of the table carry it from now on.
        known = isinstance(self._counter, MultiTableKVCounter)
        table.exact_counts = (
            self._counter.counts[self._id] if known else CountsOfCounter(self._counter, self._id)
        )

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


class CountsOfCounter:
    """What a user's own Counter has for one table, as embstore.ExactCounts. It does not tell what changed, so
    everything is compared with what it had before."""

    def __init__(self, counter: Counter, table_id: int) -> None:
        self._counter, self._id = counter, table_id
        self._before: Counts | None = None
        self._returned: Array = np.empty(0, np.int64)

    def items(self) -> Counts:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("keys", "frequencies")]
            self._counter.dump(str(files[0]), str(files[1]), self._id)
            keys, counts = (np.fromfile(file, np.int64) for file in files)
        if len(keys) != len(counts):
            raise ValueError(
                f"dump of {type(self._counter).__name__} should write as many frequencies as keys but wrote: "
                f"{len(counts)} and {len(keys)}"
            )
        order = np.argsort(keys, kind="stable")
        return keys[order], counts[order]

    def replace(self, keys: Array, counts: Array) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("keys", "frequencies")]
            for file, array in zip(files, (keys, counts), strict=True):
                array.astype(np.int64).tofile(file)
            self._counter.load(str(files[0]), str(files[1]), self._id)

    def track_changes(self, on: bool) -> None:
        self._before, self._returned = self.items() if on else None, np.empty(0, np.int64)

    def take_changes(self) -> Counts:
        if self._before is None:
            raise RuntimeError("changes should be taken after track_changes(True)")
        now = self.items()
        keys = np.union1d(changes_between(self._before, now)[0], self._returned)
        self._before, self._returned = now, np.empty(0, np.int64)
        return keys, counts_of(now, keys)

    def return_changes(self, keys: Array) -> None:
        self._returned = np.union1d(self._returned, keys)

    def apply_changes(self, keys: Array, counts: Array) -> None:
        changed, now = torch.from_numpy(keys), torch.from_numpy(counts)
        ids, there = torch.full_like(changed, self._id), now > 0
        self._counter.erase(changed, ids)
        self._counter.add(changed[there], ids[there], now[there])
