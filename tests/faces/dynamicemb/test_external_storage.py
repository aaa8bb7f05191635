"""A user's `Storage` class below dynamic tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faces.dynamicemb.small_tables import CPU, QUARTER, options
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2 as Tables
from dynamicemb.types import CopyMode, Storage

made: list[DictStorage] = []


class DictStorage(Storage):
    """Rows by (table id, key), as the demonstration of the original package keeps them."""

    def __init__(self, all_options: list[DynamicEmbTableOptions], optimizer: Any) -> None:
        self.dims = [option.dim or 0 for option in all_options]
        self.widest = max(self.dims)
        self.width = self.widest + max(optimizer.get_state_dim(dim) for dim in self.dims)
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self.inserted: list[tuple[list[int], bool]] = []
        made.append(self)

    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: CopyMode,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        names = list(zip(table_ids.tolist(), unique_keys.tolist(), strict=True))
        found = torch.tensor([name in self.rows for name in names], dtype=torch.bool)
        values = torch.zeros(len(names), self.width)
        scores = torch.zeros(len(names), dtype=torch.int64)
        for place, name in enumerate(names):
            if name in self.rows:
                values[place], scores[place] = self.rows[name][0], self.rows[name][1]
        missing = torch.nonzero(~found).flatten()
        if copy_mode is CopyMode.EMBEDDING:
            values = values[:, : self.widest]
        return (len(missing), unique_keys[missing], missing, table_ids[missing], None, found, scores, values)

    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        self.inserted.append((sorted(keys.tolist()), preserve_existing))
        for place, name in enumerate(zip(table_ids.tolist(), keys.tolist(), strict=True)):
            before = self.rows.get(name, (None, 1))[1]
            score = before if scores is None else int(scores[place])
            self.rows[name] = (values[place].clone(), score)

    def dump(self, table_id: int, *files: Any, **keywords: Any) -> None: ...

    def load(self, table_id: int, *files: Any, **keywords: Any) -> None: ...

    def export_keys_values(self, device: torch.device, batch_size: int = 65536, table_id: int = 0) -> Any:
        mine = {key: row for (table, key), row in self.rows.items() if table == table_id}
        keys = torch.tensor(list(mine), dtype=torch.int64)
        values = torch.stack([v for v, _ in mine.values()]) if mine else torch.zeros(0, self.width)
        scores = torch.tensor([s for _, s in mine.values()], dtype=torch.int64)
        yield keys, values[:, : self.dims[table_id]], values[:, self.widest :], scores


def _modules(**more: Any) -> tuple[Tables, Tables, DictStorage]:
    def build(**extra: Any) -> Tables:
        tables = [options(dim=4, **extra), options(dim=2, **extra)]
        return Tables(tables, optimizer=EmbOptimType.ADAM, learning_rate=0.1)

    stored = build(external_storage=DictStorage, **more)
    return stored, build(), made[-1]


def _train(module: Tables, seed: int, ids: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, ids, (40,), generator=generator)
    out = module(keys, torch.arange(0, 41, 2))
    (out * out.detach().cos()).sum().backward()
    return out.detach()


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
@pytest.mark.parametrize("caching", [False, True])
def test_training_over_a_storage_equals_training_in_memory(caching: bool) -> None:
    stored, plain, storage = _modules(caching=caching)
    for step in range(12):
        assert torch.equal(_train(stored, step, 600), _train(plain, step, 600))
    stored.flush()
    for number, name in enumerate(("t0", "t1")):
        rows = plain.dynamic_tables[name].table.rows()
        assert sorted(key for table, key in storage.rows if table == number) == rows.keys.tolist()
        for key, vector, state in zip(rows.keys.tolist(), rows.values, rows.states, strict=True):
            kept = storage.rows[number, key][0]
            assert kept[: len(vector)].tolist() == vector.tolist()
            assert kept[storage.widest :][: len(state)].tolist() == state.tolist()
    probe = (torch.tensor([1, 599, 10_000, 1]), torch.tensor([0, 2, 4]))
    assert torch.equal(stored.eval()(*probe), plain.eval()(*probe))


def test_without_a_cache_new_keys_and_updates_come_in_their_passes() -> None:
    stored, _, storage = _modules()
    out = stored(torch.tensor([7, 9, 7, 5]), torch.tensor([0, 3, 4]))
    assert storage.inserted == [([7, 9], False), ([5], False)]
    scores = {name: score for name, (_, score) in storage.rows.items()}
    assert storage.rows[0, 7][0][:4].tolist() == [QUARTER.value] * 4
    out.sum().backward()
    assert storage.inserted[2:] == [([7, 9], True), ([5], True)]
    assert storage.rows[0, 7][0][0] != QUARTER.value
    assert {name: score for name, (_, score) in storage.rows.items()} == scores, "scores stay in backward"
    before = len(storage.inserted)
    stored.eval()(torch.tensor([7, 99]), torch.tensor([0, 1, 2]))
    assert len(storage.inserted) == before


def test_one_storage_serves_all_tables_of_a_module_and_knows_the_optimizer() -> None:
    count = len(made)
    _, _, storage = _modules()
    assert len(made) == count + 1 and storage.dims == [4, 2] and storage.width == 4 + 8


def test_rows_of_a_storage_are_dumped_and_loaded(tmp_path: Path) -> None:
    stored, _, _ = _modules()
    for step in range(4):
        _train(stored, step, 300)
    DynamicEmbDump(str(tmp_path / "d"), stored, optim=True, counter=True)
    again, plain, storage = _modules()
    DynamicEmbLoad(str(tmp_path / "d"), again, optim=True, counter=True)
    DynamicEmbLoad(str(tmp_path / "d"), plain, optim=True, counter=True)
    assert torch.equal(_train(again, 9, 300), _train(plain, 9, 300))
    again.flush()
    assert len(storage.rows) == sum(len(table.table) for table in plain.dynamic_tables.values())
    keys, values = again.export_keys_values("t0", CPU)
    assert keys.numel() == len(plain.dynamic_tables["t0"].table) == len(values)


class _Short(DictStorage):
    def find(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        return super().find(*arguments, **keywords)[:7]


def test_a_find_of_seven_results_is_refused() -> None:
    module = Tables([options(external_storage=_Short)])
    with pytest.raises(ValueError, match="find of _Short should return 8 results but returned: 7"):
        _train(Tables([options(dim=4, external_storage=_Short)]), 1, 9)
    assert module.dynamic_tables["t0"].table.store is not None
