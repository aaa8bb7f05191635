"""The small parts that all readers and writers of files share."""

import json
import os
import signal
import socket
import threading
import zlib

import numpy as np
import pytest

import embstore
from embstore.checkpoint import drafts, files
from embstore.checkpoint.drafts import exchange
from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.manifest import Manifest
from embstore.checkpoint.names import KEPT, LONGEST, file_stem, name_of
from embstore.ownership import Blocks

DATA = np.random.default_rng(0).integers(0, 256, 1_050_007, np.uint8)


@pytest.fixture
def no_open_files():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 7, 7, 1023], [0, 500_000, 1_050_006]])
def test_the_checksum_of_pieces_in_any_order_is_that_of_the_whole(cuts):
    ends = [*cuts[1:], len(DATA)]
    pieces = [(a, b - a, files.crc32(DATA[a:b])) for a, b in zip(cuts, ends)]
    assert files.combine(pieces[::-1]) == zlib.crc32(DATA)


def test_pieces_with_a_gap_have_no_checksum():
    with pytest.raises(AssertionError, match="there is a gap at 7: 8"):
        files.combine([(0, 7, 1), (8, 3, 2)])


@pytest.mark.parametrize(("offset", "size"), [(0, None), (7, None), (7, 1023), (1_050_006, 1), (3, 0)])
def test_the_checksum_of_a_range_of_a_file_is_that_of_its_bytes(tmp_path, no_open_files, offset, size):
    (tmp_path / "file").write_bytes(DATA.tobytes())
    end = len(DATA) if size is None else offset + size
    assert files.file_crc32(tmp_path / "file", offset, size) == zlib.crc32(DATA[offset:end])


def test_a_file_that_is_too_short_is_refused_with_what_is_missing(tmp_path, no_open_files):
    (tmp_path / "file").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="the file ends 3 bytes too early"):
        files.file_crc32(tmp_path / "file", 2, 8)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "missing"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, no_open_files, kind, monkeypatch):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("file")
    reason = "is missing" if kind == "missing" else "is not a regular file"
    for read in (files.open_regular, files.file_size, files.file_crc32, files.read_json):
        with pytest.raises(CheckpointError, match=f"{path}: {reason}"):
            read(path)


def test_json_of_the_largest_size_is_read_and_no_larger_one(tmp_path, no_open_files, monkeypatch):
    (tmp_path / "file").write_text('"1234567"')
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 9)
    assert files.read_json(tmp_path / "file") == "1234567"
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 8)
    with pytest.raises(CheckpointError, match="expected at most 8 bytes of JSON, found 9"):
        files.read_json(tmp_path / "file")


def test_what_is_written_durably_is_there(tmp_path, no_open_files):
    files.write_durably(tmp_path / "file", "a\nü")
    assert (tmp_path / "file").read_bytes() == "a\nü".encode()
    files.sync_folder(tmp_path)
    with pytest.raises(NotADirectoryError):
        files.sync_folder(tmp_path / "file")


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_folders_are_durable_before_they_have_a_name_and_the_name_is_after(
    tmp_path, monkeypatch, overwrite
):
    if overwrite:
        (tmp_path / "target").mkdir()
    draft = drafts.Draft(tmp_path / "target", overwrite=overwrite)
    (draft.path / "a" / "b").mkdir(parents=True)
    inode = draft.path.stat().st_ino
    done = []  # what is synced, and whether the target was the draft by then

    def sync(folder):
        target = tmp_path / "target"
        done.append((folder, target.exists() and target.stat().st_ino == inode))

    monkeypatch.setattr(drafts, "sync_folder", sync)
    draft.publish()
    assert sorted(done[:-1]) == [(draft.path / part, False) for part in ("", "a", "a/b")]
    assert done[-1] == (tmp_path, True)


def test_ctrl_c_waits_for_the_end_of_a_step_that_must_not_be_torn_apart():
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), files.interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    assert done and signal.getsignal(signal.SIGINT) is before
    with files.interrupts_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    seen = []

    def step():
        with files.interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_sealed_document_has_its_keys_in_order_in_ascii_and_a_checksum(tmp_path):
    text = files.sealed({"b": "ü", "a": 1})
    assert text == json.dumps({"a": 1, "b": "ü", "crc32": json.loads(text)["crc32"]}, indent=1) + "\n"
    assert text.isascii()
    body = json.dumps({"a": 1, "b": "ü"}, indent=1)
    assert json.loads(text)["crc32"] == zlib.crc32(body.encode())
    (tmp_path / "file").write_text(text)
    assert files.read_sealed(tmp_path / "file") == {"a": 1, "b": "ü"}
    (tmp_path / "file").write_text(text.replace('"a": 1', '"a": 2'))
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        files.read_sealed(tmp_path / "file")


def test_names_up_to_the_longest_are_kept_and_longer_ones_differ():
    fits = "x" * LONGEST
    assert file_stem(fits) == fits and name_of(file_stem(fits)) == fits
    long, other = "x" * (LONGEST + 1), "x" * LONGEST + "y"
    assert file_stem(long) != file_stem(other)
    assert file_stem(long).startswith("x" * KEPT + "%~") and len(file_stem(long)) == KEPT + 2 + 32


@pytest.mark.parametrize(
    ("name", "stem"), [(".", "%2E"), ("..", "%2E%2E"), (".a.b", "%2Ea%2Eb"), ("a.b", "a.b")]
)
def test_no_name_is_hidden_or_leads_out_of_its_folder(name, stem):
    assert file_stem(name) == stem and name_of(stem) == name


def change_table(document, **changes):
    document["tables"]["t"] |= changes


FILE = {"bytes": 0, "crc32": 0}
EDITS = {
    "files should be names in the folder but one is: 'a/b'": {"files": {"a/b": FILE}},
    "files should be names in the folder but one is: 'a\\\\x00b'": {"files": {"a\0b": FILE}},
    "files should be names in the folder but one is: ''": {"files": {"": FILE}},
    "files should be names in the folder but one is: '..'": {"files": {"..": FILE}},
    "bytes should be .* but is: -1": {"files": {"f": {"bytes": -1, "crc32": 0}}},
    "crc32 should be .* but is: 4294967296": {"files": {"f": {"bytes": 0, "crc32": 1 << 32}}},
    "rows_of_rank should be .* but is: -1": {"rows_of_rank": [-1]},
    "rows_of_rank should have 1 numbers but has: 2": {"rows_of_rank": [1, 0]},
    "ownership_rows should be .* but is: 0": {"ownership": "continuous", "ownership_rows": 0},
    "name of table 't' should be the same but is: 'u'": {"name": "u"},
}


@pytest.fixture
def dumped(tmp_path):
    table = embstore.Table("t", dim=2)
    table.find_or_insert([7])
    embstore.dump(tmp_path / "dump", {"model": {"t": table}})
    return tmp_path / "dump" / "model"


def read_changed(folder, change):
    document = files.read_sealed(folder / "embstore.json")
    change(document)
    (folder / "embstore.json").write_text(files.sealed(document))
    return Manifest.read(folder)


@pytest.mark.parametrize("reason", EDITS)
def test_a_manifest_with_a_wrong_table_is_refused_by_its_field(dumped, reason):
    with pytest.raises(CheckpointError, match=f"embstore.json: is not a manifest: {reason}"):
        read_changed(dumped, lambda document: change_table(document, **EDITS[reason]))


@pytest.mark.parametrize(
    ("increment", "reason"),
    [
        ({"number": -1, "log": "x"}, "number should be .* but is: -1"),
        ({"number": 1, "log": 7}, "log should be .* but is: 7"),
        ({"number": 1, "log": "x", "previous": 3}, "previous should be .* but is: 3"),
        ({"number": 1, "log": "x"}, "previous should name the entry before but is missing"),
    ],
)
def test_a_manifest_of_a_log_names_its_place_in_it(dumped, increment, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_changed(dumped, lambda document: document.update(increment=increment))


@pytest.mark.parametrize(
    "increment",
    [
        {"number": 0, "log": "x"},
        {"number": 3, "log": "x", "stands_for": "y"},
        {"number": 3, "log": "x", "previous": "y"},
    ],
)
def test_the_first_entry_and_one_that_stands_for_others_follow_nothing(dumped, increment):
    found = read_changed(dumped, lambda document: document.update(increment=increment))
    assert found.increment == increment and found.tables["t"].rows == 1


def test_a_manifest_keeps_blocks_of_one_row(dumped):
    rule = {"ownership": "continuous", "ownership_rows": 1}
    found = read_changed(dumped, lambda document: change_table(document, **rule))
    assert found.tables["t"].ownership == Blocks(1)


def test_folders_that_cannot_change_places_are_an_error_with_its_cause(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError, match="No such file or directory, so .*other stays as it was"):
        exchange(tmp_path / "one", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
