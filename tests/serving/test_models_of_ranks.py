"""Serving models of models that were trained by several ranks; they are used after these have parted."""

from __future__ import annotations

from pathlib import Path

import pytest
from faces.dynamicemb import ranks
from serving import model_jobs as jobs

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static beside"])
@pytest.mark.parametrize("kind, weighted", [("ec", False), ("ebc", False), ("ebc", True)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_of_dynamicemb_becomes_a_plain_module_with_its_outputs(
    tmp_path: Path, world: int, kind: str, weighted: bool, static: bool
) -> None:
    # Bags of several ranks are summed owner by owner; a plain TorchRec collection has other kernels.
    bits = kind == "ec" or (world == 1 and not static)
    ranks.run(world, jobs.dynamicemb_model, str(tmp_path), kind, weighted, static, bits, True)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_torch_export_takes_it(tmp_path: Path, kind: str) -> None:
    ranks.run(1, jobs.exported_dynamicemb, str(tmp_path), kind)


def test_half_tables_and_variable_batches_are_served_alike(tmp_path: Path) -> None:
    ranks.run(1, jobs.half_and_variable, str(tmp_path))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_sharded_native_module_under_data_parallel_is_served_to_the_bit(tmp_path: Path, world: int) -> None:
    ranks.run(world, jobs.sharded_model, str(tmp_path))


def test_ids_without_a_row_read_the_shared_row_of_their_owner(tmp_path: Path) -> None:
    ranks.run(2, jobs.sharded_with_shared_rows, str(tmp_path))
