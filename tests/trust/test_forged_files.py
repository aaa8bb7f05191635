"""Files whose checksums are right but whose contents no embstore wrote: refused by name, before rows change.

The fuzzers found them; `forge` changes a folder as an attacker does, who can compute a checksum as well.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import embstore
from embstore.checkpoint.admission import restore_counters
from embstore.checkpoint.converting import convert
from embstore.checkpoint.replaying import open_any
from embstore.checkpoint.shared import read_records
from embstore.checkpoint.spec import TableSpec
from embstore.serving import Reader, prepare
from embstore.stores import SsdStore
from trust.fuzz_folders import sealed

KEYS = [7, -1, 12]
COUNTED = {"admission_threshold": 2, "shared_rows": 2, "score_strategy": "lfu"}
FREQUENT = {"admission": "frequency", "score_strategy": "lfu", "max_capacity": 128}
ADMISSION = "user_admission.rank_0.world_size_1"
CHANGES = "user_admission_changes.rank_0.world_size_1"


def forge(folder, file, data):
    """Puts a file into a folder and makes all checksums right; `data` may be made of what was there."""
    names = [path for path in folder.rglob("*") if path.is_file()]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in names}
    name = next(name for name in files if name.endswith(file))
    files[name] = data(files[name]) if callable(data) else data
    for each, contents in sealed(files, {name}).items():
        (folder / each).write_bytes(contents)


def a_table(options, keys=KEYS):
    table = embstore.Table("user", dim=3, init_capacity=128, **options)
    for _ in range(2):
        table.find_or_insert(keys)
    return table


def dumped(path, options):
    embstore.dump(path, {"model": {"user": a_table(options)}}, optim=True)
    return path


def logged(path, options):
    tables = {"model": {"user": a_table(options)}}
    log = embstore.IncrementLog.create(path, tables)
    tables["model"]["user"].find_or_insert([31])
    log.append(tables)
    return path


def refused_before_rows_change(path, options, file):
    """Loading keeps the rows that were there, in a table with rows and in one without."""
    for keys in ([5], []):
        table = a_table(options, keys)
        with pytest.raises(embstore.CheckpointError, match=file):
            embstore.load(path, {"model": {"user": table}}, optim=True)
        assert sorted(table) == keys


def record(number):
    return struct.pack("<q3f", number, 1, 2, 3)


@pytest.mark.parametrize(
    "data", [record(2), record(-1), record(1 << 40), record(0) * 2, record(0)[:-1]], ids=range(5)
)
def test_shared_rows_of_no_table_are_refused(tmp_path, data):
    path, file = dumped(tmp_path / "d", COUNTED), "user_shared.rank_0.world_size_1"
    prepare(path, tmp_path / "base")
    forge(path, file, data)
    forge(tmp_path / "base", "user.shared", data)
    refused_before_rows_change(path, COUNTED, file)
    with pytest.raises(embstore.CheckpointError, match=file):
        Reader(path, cache=tmp_path / "cache")
    with pytest.raises(embstore.CheckpointError, match=file):
        convert(path, tmp_path / "out", "v2")
    with pytest.raises(embstore.CheckpointError, match="user.shared"):
        Reader(tmp_path / "base")
    with pytest.raises(embstore.CheckpointError, match="a file of SOK"):
        read_records(np.frombuffer(data, np.uint8), TableSpec.of(a_table(COUNTED)), 0, "a file of SOK")


@pytest.mark.parametrize(
    ("options", "data"),
    [
        (COUNTED, b""),
        (COUNTED, struct.pack("<H", 2) + bytes(2 * 1000)),  # no power of two
        (FREQUENT, struct.pack("<HQ", 0x5CE7, 1)),  # a moment that no clock had
    ],
)
def test_admission_counters_of_no_table_are_refused(tmp_path, options, data):
    path = dumped(tmp_path / "d", options)
    forge(path, ADMISSION, data)
    refused_before_rows_change(path, options, ADMISSION)
    with pytest.raises(embstore.CheckpointError, match="a file of SOK"):
        restore_counters(a_table(options), np.frombuffer(data, np.uint8), "a file of SOK")


def changes(size, header=(2,), parts=b"", form=0x5CE8):
    """What changed of counters: `size` bytes of them, all 0 but for the parts."""
    return struct.pack(f"<HHQH{len(header)}H", form, 1, size, len(header), *header) + parts


@pytest.mark.parametrize(
    "data",
    [
        b"",
        changes(2048)[:8],
        changes(2048, form=1),
        changes(2048, parts=b"x" * 66),
        changes(2000),
        changes(2048, parts=struct.pack("<I", 32) + bytes(64)),
        changes(2048)[:12] + struct.pack("<H", 34),  # ends in its header, by the size of a part
    ],
    ids=range(7),
)
def test_changes_of_admission_counters_of_no_table_are_refused(tmp_path, data):
    path = logged(tmp_path / "log", COUNTED)
    forge(path, CHANGES, data)
    table = a_table(COUNTED, [5])
    with pytest.raises(embstore.CheckpointError, match=CHANGES):
        embstore.IncrementLog(path).load({"model": {"user": table}})
    assert list(table) == [5]
    with pytest.raises(embstore.CheckpointError, match=CHANGES):
        convert(path, tmp_path / "out", "v2")


def test_a_few_words_that_tell_of_counters_without_end_take_no_memory(tmp_path):
    path = logged(tmp_path / "log", COUNTED)
    forge(path, CHANGES, changes(1 << 50))
    table = a_table(COUNTED, [])
    embstore.IncrementLog(path).load({"model": {"user": table}})
    assert sorted(table) == [-1, 7, 12] and table.admission_counters().nbytes < 1 << 20
    convert(path, tmp_path / "out", "v2")
    assert not list((tmp_path / "out").rglob("*_admission.*"))


@pytest.mark.parametrize("value", [1 << 61, (1 << 62) - 1, 65537])
def test_vectors_that_no_memory_holds_are_refused(tmp_path, value):
    """4 * 2**61 bytes of a vector are 0 bytes in 64 bits."""
    prepare(dumped(tmp_path / "d", {}), tmp_path / "base")

    def wide(data):
        document = json.loads(data)
        (facts,) = document["tables"]["model"].values()
        facts["spec"]["dim"] = value
        facts["rows"] = 0
        return json.dumps(document).encode()

    forge(tmp_path / "base", "serving.json", wide)
    with pytest.raises(embstore.CheckpointError, match="dim should be"):
        Reader(tmp_path / "base")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 1 << 70, "x", None, 2.5])
@pytest.mark.parametrize("field", ["number", "taken_ns", "rows", "keys_crc32", "bytes", "states"])
def test_numbers_of_a_base_that_are_none_are_refused(tmp_path, field, value):
    prepare(dumped(tmp_path / "d", {"optimizer": embstore.Adam()}), tmp_path / "base")

    def odd(data):
        document = json.loads(data)
        (facts,) = document["tables"]["model"].values()
        if field == "states":
            facts["spec"]["states"][0][1] = value
        else:
            holder = next(d for d in (document, facts, facts["files"]["user.rows"]) if field in d)
            holder[field] = value
        return json.dumps(document).encode()

    forge(tmp_path / "base", "serving.json", odd)
    with pytest.raises(embstore.CheckpointError, match=r"serving\.json"):
        Reader(tmp_path / "base")


def test_keys_without_a_byte_of_vectors_are_refused(tmp_path):
    path = logged(tmp_path / "log", {})
    forge(path, "increment-000000000001/model/user_values", b"")
    for read in (open_any, lambda path: Reader(path, cache=tmp_path / "cache")):
        with pytest.raises(embstore.CheckpointError, match="user_values: is truncated"):
            read(path)


@pytest.mark.parametrize("file", ["FORMAT", "VALUE_SIZE", "snapshots/s/LIST"])
def test_a_file_of_a_store_that_is_no_text_is_quoted_in_the_error(tmp_path, file):
    with SsdStore(tmp_path / "s", row_bytes=12) as store:
        store.put(KEYS, np.ones((3, 3), np.float32))
        store.snapshot("s")
    forge(tmp_path / "s", file, b"\xff\xfe/\n")
    with (
        pytest.raises((RuntimeError, ValueError), match=r"\\xff\\xfe") as caught,
        SsdStore(tmp_path / "s", row_bytes=12, create=False) as store,
    ):
        store.load_snapshot("s")
    assert not isinstance(caught.value, UnicodeError)


def test_a_folder_whose_name_is_no_text_is_no_snapshot(tmp_path):
    with SsdStore(tmp_path / "s", row_bytes=12) as store:
        store.snapshot("s")
        (tmp_path / "s" / "snapshots" / "\udcff").mkdir()
    with SsdStore(tmp_path / "s", row_bytes=12, create=False) as store:
        assert store.snapshots() == ["s"]


def test_a_list_of_no_rows_is_an_empty_snapshot(tmp_path):
    """UBSan (`make sanitize-python`) found a copy to no memory."""
    with SsdStore(tmp_path / "s", row_bytes=12) as store:
        store.put(KEYS, np.ones((3, 3), np.float32))
        store.snapshot("s")
    forge(tmp_path / "s", "snapshots/s/index-000000000000", b"")
    with SsdStore(tmp_path / "s", row_bytes=12, create=False) as store:
        store.load_snapshot("s")
        assert len(store) == 0


def test_a_moment_that_no_aged_table_had_is_refused(tmp_path):
    aged = {"score_strategy": "aged_lfu"}

    def earlier(data):
        manifest = json.loads(data)
        manifest["tables"]["user"]["score"] = 1
        return json.dumps(manifest).encode()

    for path in (dumped(tmp_path / "d", aged), logged(tmp_path / "log", aged)):
        forge(path, "embstore.json", earlier)
        with pytest.raises(
            embstore.CheckpointError, match="score should be an integer from 1152921504606846976"
        ):
            open_any(path)
    refused_before_rows_change(tmp_path / "d", aged, "embstore.json")


def column_file(path, columns):
    """A file of columns that describes no table, in the format of its suffix."""
    import pyarrow as pa
    import pyarrow.parquet
    from safetensors.numpy import save_file

    if path.suffix == ".safetensors":
        names = {"key": "keys", "vector": "values", "score": "scores"}
        save_file({names.get(name, f"state.{name}"): column for name, column in columns.items()}, path)
        return
    arrays = [
        column
        if isinstance(column, pa.Array)
        else pa.array(column)
        if column.ndim == 1
        else pa.FixedSizeListArray.from_arrays(column.ravel(), column.shape[1])
        for column in columns.values()
    ]
    pyarrow.parquet.write_table(pa.table(arrays, names=list(columns)), path)


ORDINARY = {
    "key": np.array(KEYS),
    "vector": np.arange(9, dtype=np.float32).reshape(3, 3),
    "score": np.array([1, 2, 3]),
    "Gt": np.ones((3, 3), np.float32),
}


def convert_columns(folder, suffix, columns):
    source = folder / "source" / "model"
    source.mkdir(parents=True, exist_ok=True)
    column_file(source / f"user.{suffix}", columns)
    convert(folder / "source", folder / "out", "v2")


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("key", np.ones(3, np.float32), "integer keys"),
        ("vector", np.ones((3, 3), np.int32), r"vectors \(n, width\) of floats, found int32 \(3, 3\)"),
        ("Gt", np.ones((3, 3), np.int32), r"Gt \(n, width\) of floats, found int32"),
        ("score", np.array([1, -2, 3]), "scores"),
        ("score", np.array([1.0, np.nan, 3.0]), "scores"),
        ("score", np.array([1.0, 2.0**64, 3.0]), "scores"),
    ],
)
def test_columns_of_other_kinds_are_refused(tmp_path, suffix, name, column, message):
    with pytest.raises(embstore.CheckpointError, match=message):
        convert_columns(tmp_path, suffix, {**ORDINARY, name: column})
    assert not (tmp_path / "out").exists()
    convert_columns(tmp_path, suffix, ORDINARY)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("Gt", np.ones(3, np.float32), r"Gt \(n, width\) of floats, found float32 \(3,\)"),
        ("score", np.array([1, 2]), "3 scores, one for each key, found 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, name, column, message):
    with pytest.raises(embstore.CheckpointError, match=message):
        convert_columns(tmp_path, "safetensors", {**ORDINARY, name: column})


def test_keys_of_no_dimension_are_refused(tmp_path):
    columns = {"key": np.array(7), "vector": ORDINARY["vector"]}
    with pytest.raises(embstore.CheckpointError, match=r"integer keys \(n\), found int64 \(\)"):
        convert_columns(tmp_path, "safetensors", columns)


@pytest.mark.parametrize("name", ["vector", "Gt"])
def test_columns_of_text_and_nulls_are_refused(tmp_path, name):
    import pyarrow as pa

    for values, message in (
        ([b"1"] * 9, "of floats"),
        ([1.0, None, 2.0] * 3, f"no nulls in the column {name}"),
    ):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values), 3)
        with pytest.raises(embstore.CheckpointError, match=message):
            convert_columns(tmp_path, "parquet", {**ORDINARY, name: lists})


CLAIMED_ROWS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from pathlib import Path
from embstore.formats import parquet
print(len(parquet.read(Path(sys.argv[1])).keys))
"""


def test_a_row_group_that_claims_more_rows_than_it_has_takes_no_memory_for_them():
    """The fuzzer made the file: pyarrow asks for 256 GiB to read its four rows at once."""
    file = Path(__file__).parent / "data" / "too_many_rows.parquet"
    command = [sys.executable, "-c", CLAIMED_ROWS, str(file)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout == "4\n"
