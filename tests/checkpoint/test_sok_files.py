"""Files of SparseOperationKit, byte by byte."""

import os

import numpy as np
import pytest

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import read_sealed, sealed
from embstore.formats import sok
from embstore.formats.sok import DumpReader, FileKind


def write(folder, name="user", rows=3, optimizer="Adam", slots=("m", "v")):
    folder.mkdir(exist_ok=True)
    writer = sok.TableWriter(folder, name, np.int64, optimizer, slots)
    keys = np.arange(rows)
    writer.append(keys, np.ones((rows, 5), np.float32), [np.ones((rows, 5), np.float32) for _ in slots])
    return {file.name: file.close() for file in writer.files}


def seal(folder, files, **more):
    document = {"format": sok.MANIFEST_FORMAT, "version": 1, "files": files, **more}
    (folder / sok.MANIFEST).write_text(sealed(document))


def test_a_header_has_room_for_a_state_of_32_bytes_and_no_more():
    data = sok.pack_header(FileKind.STATE, np.float32, "s" * 32)
    assert len(data) == sok.HEADER_BYTES and sok.parse_header(data) == (
        FileKind.STATE,
        np.dtype("<f4"),
        "s" * 32,
    )
    with pytest.raises(ValueError, match="slot should have at most 32 bytes"):
        sok.pack_header(FileKind.STATE, np.float32, "s" * 33)


@pytest.mark.parametrize(("at", "value"), [(256, len(FileKind)), (292, len(sok._DTYPES))])
def test_a_header_of_an_unknown_kind_or_type_is_refused(at, value):
    data = bytearray(sok.pack_header(FileKind.KEY, np.int64))
    data[at : at + 4] = value.to_bytes(4, "big")
    with pytest.raises(CheckpointError, match="expected a known kind and element type"):
        sok.parse_header(bytes(data), "file")


def test_a_file_that_changed_since_its_manifest_is_refused(tmp_path):
    seal(tmp_path, write(tmp_path))
    assert len(DumpReader(tmp_path).table("user")) == 3
    raw = bytearray((tmp_path / "user-weight").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "user-weight").write_bytes(raw)
    with pytest.raises(CheckpointError, match="user-weight: its checksum is wrong"):
        DumpReader(tmp_path).table("user")
    assert len(DumpReader(tmp_path).table("user", verify=False)) == 3
    (tmp_path / "user-weight").write_bytes(raw[:-20])
    with pytest.raises(CheckpointError, match="user-weight: expected 356 bytes, found 336"):
        DumpReader(tmp_path).table("user")


def test_states_count_only_when_all_of_an_optimizer_are_there(tmp_path):
    write(tmp_path)
    assert DumpReader(tmp_path).table("user").engine_states() == ("adam", ["Adam-m", "Adam-v"])
    (tmp_path / "user-Adam-v").unlink()
    assert DumpReader(tmp_path).table("user").engine_states() == ("sgd", [])


def test_one_file_of_rows_makes_a_folder_a_dump(tmp_path):
    assert not sok.is_sok_dump(tmp_path)
    (tmp_path / "user-key").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert not sok.is_sok_dump(tmp_path)
    (tmp_path / "user-weight").write_bytes(b"")
    assert sok.is_sok_dump(tmp_path)


def test_a_table_without_rows_is_read_again(tmp_path):
    write(tmp_path, rows=0)
    table = DumpReader(tmp_path).table("user")
    assert len(table) == 0 and table.dim == 0 and table.keys.shape == (0,)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_arrays_of_different_lengths_are_refused_and_change_nothing(tmp_path, wrong):
    writer = sok.TableWriter(tmp_path, "user", np.int64, "Adagrad", ["accumulator"])
    arrays = [np.arange(3), np.ones((3, 2)), np.ones((3, 2))]
    arrays[wrong] = arrays[wrong][:2]
    with pytest.raises(ValueError, match="states should be 1 arrays of "):
        writer.append(arrays[0], arrays[1], [arrays[2]])
    with pytest.raises(ValueError, match="states should be 1 arrays of 3 rows"):
        writer.append(np.arange(3), np.ones((3, 2)))
    sizes = [file.close()["bytes"] for file in writer.files]
    assert sizes == [sok.HEADER_BYTES] * 3


def test_files_are_closed_when_they_are_written_or_given_up(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    write(tmp_path)
    writer = sok.TableWriter(tmp_path, "item", np.int64, "Adagrad", ["accumulator"])
    for file in writer.files:
        file.abandon()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("files", "more", "reason"),
    [
        ({"a/b": {"bytes": 0, "crc32": 0}}, {}, "files should be names in the folder but one is: 'a/b'"),
        (
            {"a\0b": {"bytes": 0, "crc32": 0}},
            {},
            "files should be names in the folder but one is: 'a\\\\x00b'",
        ),
        ({"..": {"bytes": 0, "crc32": 0}}, {}, "files should be names in the folder but one is: '..'"),
        ({"f": {"bytes": -1, "crc32": 0}}, {}, "bytes should be .* but is: -1"),
        ({"f": {"bytes": 0, "crc32": 1 << 32}}, {}, "crc32 should be .* but is: 4294967296"),
        ({}, {"iterations": -1}, "iterations should be .* but is: -1"),
        ({}, {"tables": {"user": {"score": 0}}}, "score should be .* but is: 0"),
        ({}, {"tables": {"user": {"score": 1 << 64}}}, "score should be .* but is: 18446744073709551616"),
        (
            {},
            {"tables": {"user": {"shared_rows": 0, "state_width": 0}}},
            "shared_rows should be .* but is: 0",
        ),
        (
            {},
            {"tables": {"user": {"shared_rows": 65537, "state_width": 0}}},
            "shared_rows should be .* but is: 65537",
        ),
    ],
)
def test_a_wrong_manifest_is_refused_by_its_field(tmp_path, files, more, reason):
    seal(tmp_path, files, **more)
    assert read_sealed(tmp_path / sok.MANIFEST)["version"] == 1
    with pytest.raises(CheckpointError, match=f"{sok.MANIFEST}: {reason}"):
        DumpReader(tmp_path)


@pytest.mark.parametrize("score", [1, (1 << 64) - 1])
@pytest.mark.parametrize("shared_rows", [1, 65536])
def test_facts_of_a_table_may_be_as_small_and_as_large_as_the_engine_takes(tmp_path, score, shared_rows):
    facts = {"score": score, "shared_rows": shared_rows, "state_width": 0}
    seal(tmp_path, {}, tables={"user": facts})
    assert sok.read_manifest(tmp_path)["tables"] == {"user": facts}


def test_a_part_of_a_rank_is_read_as_its_bytes(tmp_path):
    seal(tmp_path, write(tmp_path))
    table = DumpReader(tmp_path).table("user")
    (tmp_path / sok.part_file(table.prefix, "shared", 1, 2)).write_bytes(bytes(range(7)))
    assert table.part("shared", 0, 2) is None
    assert table.part("shared", 1, 2).tolist() == list(range(7))


def dump(path, *names, rows=3):
    with sok.DumpWriter(path) as writer:
        for name in names:
            writer.table(name, np.int64).append(np.arange(rows), np.full((rows, 2), rows, np.float32))


def test_a_dump_keeps_the_files_of_variables_that_it_does_not_write(tmp_path):
    path = tmp_path / "dump"
    dump(path, "user", "item")
    dump(path, "user", rows=5)
    reader = DumpReader(path)
    assert reader.tables() == ["item", "user"]
    assert len(reader.table("user")) == 5 and len(reader.table("item")) == 3
    assert reader.manifest["files"].keys() == {
        f"{n}-{part}" for n in ("user", "item") for part in ("key", "weight")
    }
    (path / sok.MANIFEST).unlink()  # as the original writes it
    dump(path, "user", rows=7)
    assert DumpReader(path).manifest["files"].keys() == {"user-key", "user-weight"}
    assert len(DumpReader(path).table("item")) == 3


def test_a_dump_that_fails_leaves_the_old_one_and_nothing_open(tmp_path):
    path = tmp_path / "dump"
    dump(path, "user")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="stop"), sok.DumpWriter(path) as writer:
        writer.table("user", np.int64).append(np.arange(9), np.ones((9, 2)))
        raise RuntimeError("stop")
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(DumpReader(path).table("user")) == 3 and os.listdir(tmp_path) == ["dump"]


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    (tmp_path / "dump" / "photos").mkdir(parents=True)
    with pytest.raises(ValueError, match="path should hold a dump alone but .* holds: 'photos'"):
        dump(tmp_path / "dump", "user")
    with pytest.raises(ValueError, match="names of variables should differ in the dump but two are: a_b"):
        dump(tmp_path / "other", "a/b", "a:b")


def test_a_block_ends_where_the_table_ends(tmp_path):
    write(tmp_path, rows=7)
    before = len(os.listdir("/proc/self/fd"))
    table = DumpReader(tmp_path).table("user")
    keys, values, states = table.block(5, 100)
    assert keys.tolist() == [5, 6] and values.shape == (2, 5) and states["Adam-m"].shape == (2, 5)
    assert table.block(0, 3)[0].tolist() == [0, 1, 2]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("file", "size", "reason"),
    [
        ("user-key", 7, "expected a header of 296 bytes, found 7"),
        ("user-key", 296 + 23, "expected whole keys of 8 bytes, found 23 bytes"),
        ("user-weight", 296 + 59, "expected whole rows for 3 keys, found 59 bytes"),
        ("user-weight", 296 + 56, "expected whole rows for 3 keys, found 56 bytes"),
        ("user-Adam-m", 296 + 1, "expected whole rows for 3 keys, found 1 bytes"),
    ],
)
def test_files_that_end_within_a_row_are_refused(tmp_path, file, size, reason):
    write(tmp_path)
    os.truncate(tmp_path / file, size)
    with pytest.raises(CheckpointError, match=f"{file}: {reason}"):
        DumpReader(tmp_path).table("user")


def test_rows_may_be_as_wide_as_a_row_of_the_engine_and_no_wider(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(sok, "MOST_FLOATS", 5)
    assert DumpReader(tmp_path).table("user").dim == 5
    monkeypatch.setattr(sok, "MOST_FLOATS", 4)
    with pytest.raises(CheckpointError, match="expected at most 4 elements for each key, found 5"):
        DumpReader(tmp_path).table("user")
