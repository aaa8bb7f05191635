"""The documented bytes: the reader in docs/formats.md, and files of earlier versions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint.tables import make, require_same, train

import embstore

ROOT = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).with_name("golden")


def documented_reader() -> dict[str, object]:
    text = (ROOT / "docs" / "formats.md").read_text()
    (code,) = re.findall(r"```python\n# reader\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 40, "the reader should fit 40 lines"
    assert "embstore" not in "".join(re.findall(r"^.*import.*$", code, re.MULTILINE))
    names: dict[str, object] = {}
    exec(compile(code, "docs/formats.md", "exec"), names)
    return names


@pytest.mark.parametrize("strategy", ["step", "timestamp", "no_eviction", "compound"])
@pytest.mark.parametrize("layout", ["v1a", "v2"])
def test_the_documented_reader_reads_a_dump_without_embstore(
    tmp_path: Path, layout: str, strategy: str
) -> None:
    read = documented_reader()["read"]
    compound = strategy == "compound"
    table = make(score_strategy="timestamp" if compound else strategy, evict_least_used=compound)
    table.score_words = ("lfu", "timestamp") if compound else ()
    train(table, 3)
    embstore.dump(tmp_path / "d", {"model.a/b": {"user": table}}, optim=True, layout=layout)
    if layout == "v2":
        shutil.move(tmp_path / "d", tmp_path / "one")
        from embstore.checkpoint.merging import rewrite

        rewrite(embstore.open_dump(tmp_path / "one"), [], tmp_path / "d", world=3)
    tables = read(tmp_path / "d")  # type: ignore[operator]
    found = tables["model.a/b", "user"]
    rows = table.rows()
    order = np.argsort(found["keys"])
    np.testing.assert_array_equal(found["keys"][order], rows.keys)
    np.testing.assert_array_equal(found["values"][order], rows.values)
    np.testing.assert_array_equal(found["scores"][order], rows.scores)
    np.testing.assert_array_equal(found["states"][order], rows.states)
    path = next((tmp_path / "d").rglob("user*_values*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=re.escape(path.name)):
        read(tmp_path / "d")  # type: ignore[operator]


def golden_table() -> embstore.Table:
    table = make()
    train(table, 3, n=11)
    return table


@pytest.mark.parametrize("name", ["v1a", "v2"])
def test_dumps_of_version_1_load_for_ever(name: str) -> None:
    # Written by the first version; must never be written again.
    back = make()
    embstore.load(GOLDEN / name, {"model": {"user": back}}, optim=True)
    require_same(golden_table(), back)
    assert (back.score, back.optimizer_step) == (4, 3)
    embstore.open_dump(GOLDEN / name).verify()


def test_logs_of_version_1_load_for_ever() -> None:
    table, back = golden_table(), make()
    table.find_or_insert([7, 4242])
    table.erase([0])
    assert embstore.IncrementLog(GOLDEN / "log").load({"model": {"user": back}}) == 1
    require_same(table, back)


def files_by_key(folder: Path) -> dict[str, list[bytes]]:
    """The records of every file in the order of the keys: the order of rows in a dump is free."""
    names = {path.name for path in folder.iterdir()} - {"embstore.json"}
    (keys_file,) = names & {"user_keys", "user_emb_keys.rank_0.world_size_1"}
    keys = np.frombuffer((folder / keys_file).read_bytes(), np.int64)
    files = {}
    for name in names:
        data = (folder / name).read_bytes()
        records = np.frombuffer(data, np.uint8).reshape(1 if name.endswith(".json") else len(keys), -1)
        files[name] = [r.tobytes() for r in (records[np.argsort(keys)] if len(records) > 1 else records)]
    return files


@pytest.mark.parametrize("layout", ["v1a", "v2"])
def test_rows_are_written_byte_for_byte_as_in_version_1(tmp_path: Path, layout: str) -> None:
    embstore.dump(tmp_path / "d", {"model": {"user": golden_table()}}, optim=True, layout=layout)
    assert files_by_key(tmp_path / "d" / "model") == files_by_key(GOLDEN / layout / "model")
