"""The files of an SSD store: golden ones, those of the original, damaged and hostile ones."""

import filecmp
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from embstore.stores import SsdStore

GOLDEN = Path(__file__).parent / "golden"
CHUNK = "000000000000"
KEYS = np.r_[np.arange(-50, 47), np.iinfo(np.int64).min, np.iinfo(np.int64).max]
ROWS_OF_SEGMENT = (1 << 20) // 512 * 42  # of 12 bytes, in blocks of 512
LIMITS = pytest.mark.timeout(20)  # a hang is what these look for


def rows_of(keys, version):
    keys = np.asarray(keys, np.int64)
    return (keys[:, None] % 1000 * 31 + version * 7 + np.arange(3)).astype(np.float32)


def write_golden(store):
    """What the golden directories hold: two snapshots."""
    store.put(KEYS, rows_of(KEYS, 1), np.arange(1, 100))
    store.snapshot("first")
    store.put(KEYS[::3], rows_of(KEYS[::3], 2), np.full(33, 7))
    store.erase(KEYS[1::9])
    store.snapshot("second")


def golden_rows(snapshot):
    """{key: (row, score)}."""
    rows = {k: (rows_of([k], 1)[0], s + 1) for s, k in enumerate(KEYS.tolist())}
    if snapshot == "second":
        rows.update({k: (rows_of([k], 2)[0], 7) for k in KEYS[::3].tolist()})
        for k in KEYS[1::9].tolist():
            del rows[k]
    return rows


def check(store, expected, scores_too=True):
    keys = np.array(list(expected), np.int64)
    rows, scores, found = store.get(keys)
    assert found.all() and len(store) == len(expected)
    np.testing.assert_array_equal(rows.view(np.float32), [row for row, _ in expected.values()])
    wanted = [score if scores_too else 1 for _, score in expected.values()]
    np.testing.assert_array_equal(scores, wanted)
    seen = {k: s for block in store.scan(7) for k, s in zip(block[0].tolist(), block[2].tolist())}
    assert seen == dict(zip(keys.tolist(), wanted))


def opened(path, **options):
    return SsdStore(path, 12, physical_block_bytes=512, **options)


def copy_of(tmp_path, name):
    shutil.copytree(GOLDEN / name, tmp_path / "store")
    for folder in ("values", "keys", "meta", "snapshots"):
        (tmp_path / "store" / folder).mkdir(exist_ok=True)
    return tmp_path / "store"


def original(tmp_path):
    """A directory as OneEmbedding itself writes it."""
    path = copy_of(tmp_path, "ssd_1")
    shutil.rmtree(path / "meta")
    for snapshot in ("first", "second"):
        (path / "snapshots" / snapshot / "CHECKSUMS").unlink()
    return path


@pytest.mark.parametrize("name", ["ssd_1", "ssd_2"])
@pytest.mark.parametrize("create", [True, False])
def test_golden_files_of_every_format_load(tmp_path, name, create):
    with opened(copy_of(tmp_path, name), create=create) as store:
        for snapshot in ("first", "second"):
            store.load_snapshot(snapshot)
            check(store, golden_rows(snapshot))


def test_new_files_have_the_golden_bytes(tmp_path):
    with opened(tmp_path) as store:
        write_golden(store)
    files = [p.relative_to(GOLDEN / "ssd_2") for p in (GOLDEN / "ssd_2").rglob("*") if p.is_file()]
    assert len(files) == 15
    assert {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()} == set(files)
    for file in files:
        assert filecmp.cmp(tmp_path / file, GOLDEN / "ssd_2" / file, shallow=False), file


def test_a_directory_of_an_older_version_goes_on_in_its_format(tmp_path):
    path = copy_of(tmp_path, "ssd_1")
    more = np.arange(1000, 1300)
    with opened(path) as store:
        store.load_snapshot("second")
        store.put(more, rows_of(more, 3), np.full(300, 9))
        store.snapshot("third")
    expected = golden_rows("second") | {k: (rows_of([k], 3)[0], 9) for k in more.tolist()}
    with opened(path) as store:
        store.load_snapshot("third")
        check(store, expected)
        store.load_snapshot("first")
        check(store, golden_rows("first"))
    assert not (path / "FORMAT").exists()


@pytest.mark.parametrize("create", [True, False])
def test_a_directory_of_the_original_loads(tmp_path, create):
    with opened(original(tmp_path), create=create) as store:
        store.load_snapshot("second")
        check(store, golden_rows("second"), scores_too=False)


def test_rows_of_the_original_live_beside_ours(tmp_path):
    path = original(tmp_path)
    more = np.arange(1000, 1300)
    with opened(path) as store:
        store.put(more, rows_of(more, 3))  # in the same chunk
        store.snapshot("ours")
        store.load_snapshot("second")
        store.put(more, rows_of(more, 4))
        store.snapshot("both")
    mixed = golden_rows("second") | {k: (rows_of([k], 4)[0], 1) for k in more.tolist()}
    with opened(path) as store:
        for name, expected in (("both", mixed), ("first", golden_rows("first"))):
            store.load_snapshot(name)
            check(store, expected, scores_too=False)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("create", [True, False])
def test_a_damaged_score_is_reported_wherever_it_is_read(tmp_path, direct, create):
    path = copy_of(tmp_path, "ssd_2")
    with opened(path, direct=direct, create=create) as store:
        store.load_snapshot("first")
        flip(path / "meta" / f"meta-{CHUNK}", 12 * 40 + 2)  # the score of row 40
        store.get(KEYS[:40])
        store.get(KEYS, with_scores=False)
        with pytest.raises(RuntimeError, match="score of row 40 does not match its checksum in .*meta-0"):
            store.get(KEYS)
        with pytest.raises(RuntimeError, match="score of row 40"):
            list(store.scan())
    with opened(path, direct=direct, create=create) as store:
        store.load_snapshot("first")
        store.get(KEYS[:40])
        with pytest.raises(RuntimeError, match="row 40 of key -10 does not match its checksum"):
            store.get(KEYS, with_scores=False)


def remove_sums(path):
    (path / "snapshots/first/CHECKSUMS").unlink()


def remove_meta(path):
    (path / "meta" / f"meta-{CHUNK}").unlink()


def cut_meta(path):
    os.truncate(path / "meta" / f"meta-{CHUNK}", 12 * 50)


def cut_keys(path):
    os.truncate(path / "keys" / f"key-{CHUNK}", 8 * 50)


def remove_index(path):
    (path / f"snapshots/first/index-{CHUNK}").unlink()


def remove_all_checksums(path):
    remove_sums(path)
    remove_meta(path)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("ssd_2", remove_sums, "CHECKSUMS is missing"),
        ("ssd_2", remove_all_checksums, "CHECKSUMS is missing"),
        ("ssd_2", remove_meta, f"meta-{CHUNK} is missing"),
        ("ssd_2", cut_meta, f"meta-{CHUNK} ends before row 98"),
        ("ssd_2", cut_keys, f"key-{CHUNK} ends before row 98"),
        ("ssd_2", remove_index, f"index-{CHUNK} is missing"),
        ("ssd_1", remove_meta, f"meta-{CHUNK} is missing"),
        ("ssd_1", cut_meta, f"meta-{CHUNK} ends before row 98"),
        ("ssd_1", remove_index, f"index-{CHUNK} is missing"),
    ],
)
@pytest.mark.parametrize("create", [True, False])
def test_files_without_the_checksums_they_promise_are_refused(tmp_path, name, damage, text, create):
    path = copy_of(tmp_path, name)
    damage(path)
    with opened(path, create=create) as store:
        with pytest.raises(RuntimeError, match=text):
            store.load_snapshot("first")
        assert len(store) == 0


def test_a_directory_that_lost_its_mark_is_refused_as_damaged(tmp_path):
    path = copy_of(tmp_path, "ssd_2")
    (path / "FORMAT").unlink()
    with opened(path) as store:
        store.load_snapshot("first")
        with pytest.raises(RuntimeError, match="is damaged"):
            store.get(KEYS)


@pytest.mark.parametrize("text", ["3\n", "", "two\n", "2" * 1000])
def test_an_unknown_format_is_named(tmp_path, text):
    path = copy_of(tmp_path, "ssd_2")
    (path / "FORMAT").write_text(text)
    with pytest.raises((ValueError, RuntimeError), match="format|FORMAT"):
        opened(path)


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def endless(path):
    path.symlink_to("/dev/zero")


def huge(path):
    path.touch()
    os.truncate(path, 1 << 43)


@LIMITS
@pytest.mark.parametrize("replace", [fifo, folder, endless, huge])
@pytest.mark.parametrize("file", ["LIST", "CHECKSUMS", f"index-{CHUNK}"])
def test_a_snapshot_that_is_no_file_or_has_no_end_is_refused_and_keeps_its_rows(tmp_path, file, replace):
    path = copy_of(tmp_path, "ssd_2")
    kept = tmp_path / "kept"
    broken = path / "snapshots/first" / file
    broken.rename(kept)
    replace(broken)
    with (
        opened(path, create=False) as store,
        pytest.raises(RuntimeError, match=f"{file}.* (should|expected)"),
    ):
        store.load_snapshot("first")
    with opened(path) as store:
        with pytest.raises(RuntimeError, match=f"{file}.* (should|expected)"):
            store.load_snapshot("first")
        more = np.arange(100_000)
        store.put(more, rows_of(more, 5))
        store.snapshot("more")
        store.load_snapshot("second")
        check(store, golden_rows("second"))
    broken.rmdir() if replace is folder else broken.unlink()
    kept.rename(broken)
    with opened(path) as store:
        store.load_snapshot("first")
        check(store, golden_rows("first"))


def test_a_snapshot_may_name_as_many_rows_as_the_values_have_places(tmp_path):
    path = copy_of(tmp_path, "ssd_2")
    blocks = (path / "values" / f"value-{CHUNK}").stat().st_size // 512 + 1  # of which one may be cut off
    index = path / f"snapshots/first/index-{CHUNK}"
    for rows, said in ((42 * blocks, "does not match its checksum"), (42 * blocks + 1, "expected at most")):
        os.truncate(index, 8 * rows)
        with opened(path) as store, pytest.raises(RuntimeError, match=said):
            store.load_snapshot("first")


@pytest.mark.parametrize("row", [ROWS_OF_SEGMENT, 2**32 - 2, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("create", [True, False])
def test_a_snapshot_that_names_rows_beyond_the_values_is_refused(tmp_path, row, create):
    path = original(tmp_path)
    np.array([0, row], np.uint64).tofile(path / f"snapshots/first/index-{CHUNK}")
    with opened(path, create=create) as store:
        with pytest.raises(RuntimeError, match=f"'first' .* names row {row}, which the values files do not"):
            store.load_snapshot("first")
        store.load_snapshot("second")
        check(store, golden_rows("second"), scores_too=False)


def test_a_snapshot_has_a_list_of_rows_for_each_chunk(tmp_path):
    """Chunks of values are 4 GiB, here mostly holes; the second one begins with three rows."""
    path = original(tmp_path)
    first, more = (4 << 30) // 512 * 42, np.array([7001, 7002, 7003])
    for folder, rows in (("values/value", rows_of(more, 9)), ("keys/key", more)):
        rows.tofile(path / f"{folder}-000000000001")
    os.truncate(path / "values/value-000000000001", 512)
    np.arange(first, first + 3).tofile(path / "snapshots/first/index-000000000001")
    (path / "snapshots/first/LIST").write_text(f"index-{CHUNK}\nindex-000000000001\n")
    expected = golden_rows("first") | {k: (rows_of([k], 9)[0], 1) for k in more.tolist()}
    with opened(path) as store:
        store.load_snapshot("first")
        check(store, expected, scores_too=False)
        store.snapshot("again")
        store.load_snapshot("again")
        check(store, expected, scores_too=False)
    again = path / "snapshots/again"
    assert (again / "LIST").read_text() == (path / "snapshots/first/LIST").read_text()
    for number, rows in enumerate((np.arange(len(KEYS)), np.arange(first, first + 3))):
        np.testing.assert_array_equal(np.fromfile(again / f"index-{number:012}", np.uint64), rows)


def test_a_draft_that_could_not_be_removed_is_in_nobodys_way(tmp_path):
    with opened(tmp_path / "store") as store:
        write_golden(store)
        left = tmp_path / "store/snapshots/.unfinished-0"
        left.mkdir()
        (left / "index-000000000000").write_text("half")
        store.delete_snapshot("first")
        store.snapshot("third")
        assert store.snapshots() == ["second", "third"]
        store.load_snapshot("third")
        check(store, golden_rows("second"))
    with opened(tmp_path / "store"):  # removes it
        assert not left.exists()


@LIMITS
@pytest.mark.parametrize("replace", [fifo, folder, endless])
@pytest.mark.parametrize("file", ["KEY_SIZE", "FORMAT", f"keys/key-{CHUNK}", f"values/value-{CHUNK}"])
@pytest.mark.parametrize("create", [True, False])
def test_a_file_of_a_store_that_is_no_file_is_refused(tmp_path, file, replace, create):
    path = copy_of(tmp_path, "ssd_2")
    (path / file).unlink()
    replace(path / file)
    with (
        pytest.raises(RuntimeError, match="should be a regular file|is damaged"),
        opened(path, create=create) as store,
    ):
        store.load_snapshot("first")


@LIMITS
def test_a_list_that_names_a_path_is_refused(tmp_path):
    path = original(tmp_path)
    (path / "snapshots/first/LIST").write_text("../../../../dev/zero\n")
    with opened(path) as store, pytest.raises(RuntimeError, match="LIST names a path"):
        store.load_snapshot("first")
