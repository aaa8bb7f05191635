"""Files of SparseOperationKit from a dump of embstore and back, by the command line."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import embstore
from embstore.cli.commands import app
from embstore.formats.sok import DumpReader

OPTIMIZERS = (
    embstore.SGD(),
    embstore.SGD(momentum=0.9, velocity=True),
    embstore.Adagrad(),
    embstore.Adam(),
    embstore.Adamax(),
    embstore.Adadelta(),
    embstore.Ftrl(),
)


def convert(*arguments: object) -> None:
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.engine_name)
def test_rows_and_states_survive_the_way_to_sok_and_back(
    tmp_path: Path, optimizer: embstore.Optimizer
) -> None:
    table = embstore.Table("user", dim=5, optimizer=optimizer)
    keys = np.array([-(2**63), -7, 0, 3, 2**63 - 1])
    table.find_or_insert(keys)
    table.apply_gradients(keys[1:], np.ones((4, 5), np.float32))
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    convert(tmp_path / "dump", tmp_path / "sok", "--to", "sok")
    rows = table.rows()
    stored = DumpReader(tmp_path / "sok").table("user:0")
    order = np.argsort(stored.keys)
    np.testing.assert_array_equal(stored.keys[order], rows.keys)
    np.testing.assert_array_equal(stored.values[order], rows.values)
    assert stored.engine_states()[0] == optimizer.engine_name
    convert(tmp_path / "sok", tmp_path / "back", "--to", "v1a")
    twin = embstore.Table("user", dim=5, optimizer=optimizer, score_strategy="customized")
    embstore.load(tmp_path / "back", {"sok": {"user": twin}}, optim=True)
    np.testing.assert_array_equal(twin.rows().keys, rows.keys)
    np.testing.assert_array_equal(twin.rows().values, rows.values)
    np.testing.assert_array_equal(twin.rows().states, rows.states)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("lost", ["item_0-key", "item_0-weight"])
def test_a_table_whose_file_is_lost_is_not_left_out(tmp_path: Path, lost: str, manifest: bool) -> None:
    tables = {name: embstore.Table(name, dim=5) for name in ("user", "item")}
    for table in tables.values():
        table.find_or_insert([1, 2, 3])
    embstore.dump(tmp_path / "dump", {"model": tables})
    convert(tmp_path / "dump", tmp_path / "sok", "--to", "sok")
    (tmp_path / "sok" / lost).unlink()
    if not manifest:
        (tmp_path / "sok" / "manifest.json").unlink()
    arguments = ["convert", str(tmp_path / "sok"), str(tmp_path / "back"), "--to", "v1a"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3 and f"{lost}: is missing" in done.output
    assert not (tmp_path / "back").exists()
