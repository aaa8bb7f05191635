"""Parameter server plug-ins, compiled against the header that is installed."""

import logging
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from embstore import plugin_store
from embstore.plugin_store import include_dir, load_plugin
from embstore.store_urls import open_store

ROOT = Path(__file__).parents[2]
SIZES = [12, 4]


def compiled(source, to, *options):
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(
        [*command, "-I", include_dir(), *options, str(source), "-o", str(to)], check=True, timeout=100
    )
    return str(to)


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory):
    """The example, which completes from its own thread, and one that completes inside the call."""
    directory = tmp_path_factory.mktemp("plugins")
    loaded = [
        load_plugin(compiled(ROOT / "examples/parameter_server_plugin.cpp", directory / "example.so")),
        load_plugin(compiled(ROOT / "tests/stores/odd_plugin.cpp", directory / "odd.so")),
    ]
    assert loaded == ["example", "odd"]
    return directory


def rows_of(keys, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (len(keys), sum(SIZES)), np.uint8)


def ids(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("address", ["example://a", "odd://a"])
@pytest.mark.parametrize("n", [1, 7, 1023])
def test_rows_come_back_as_they_went_and_new_ids_are_missing(address, n):
    store = open_store(address, table=f"t{n}", tensor_bytes=SIZES)
    keys = np.random.default_rng(n).permutation(ids(*range(n))) * 0x1000000007 - 5
    rows = rows_of(keys)
    assert not store.get(keys)[2].any()
    store.put(keys, rows, np.ones(n, np.uint64))
    asked = np.concatenate([keys[::-1], ids(1, 2), keys[:1]])
    found_rows, _, found = store.get(asked)
    np.testing.assert_array_equal(found, np.isin(asked, keys))
    np.testing.assert_array_equal(found_rows[found], np.concatenate([rows[::-1], rows[:1]]))


def test_tables_and_columns_are_apart():
    stores = [
        open_store("example://apart", table=t, tensor_bytes=SIZES, column=c) for t in "ab" for c in (0, 1)
    ]
    for number, store in enumerate(stores):
        store.put(ids(5), np.full((1, 16), number, np.uint8), np.ones(1, np.uint64))
    assert [int(store.get(ids(5))[0][0, 0]) for store in stores] == [0, 1, 2, 3]


def test_an_id_is_found_only_when_all_of_its_tensors_are():
    store = open_store("odd://forgets states", table="t", tensor_bytes=SIZES)
    store.put(ids(1, 2), rows_of(ids(1, 2)), np.ones(2, np.uint64))
    assert not store.get(ids(1, 2))[2].any()


@pytest.mark.parametrize(
    ("mood", "text"),
    [
        ("throws", "pull of t: the cable is cut"),
        ("short", "tensor 0 of id 8 should have 12 bytes but has: 11"),
        ("beyond", "which was not asked for"),
        ("silent", "not completed within 0.2 seconds"),
    ],
)
def test_a_plugin_that_misbehaves_is_an_exception(mood, text, monkeypatch):
    monkeypatch.setattr(plugin_store, "TIMEOUT_SECONDS", 0.2)
    store = open_store(f"odd://{mood}", table="t", tensor_bytes=SIZES)
    store.put(ids(8), rows_of(ids(8)), np.ones(1, np.uint64))
    with pytest.raises(RuntimeError, match=text):
        store.get(ids(8))


def test_errors_of_the_optional_channel_reach_the_caller():
    store = open_store("example://a", table="full", tensor_bytes=SIZES)
    with pytest.raises(RuntimeError, match="push of full: no room for this table"):
        store.put(ids(8), rows_of(ids(8)), np.ones(1, np.uint64))


def test_a_plugin_may_refuse_its_configuration():
    with pytest.raises(RuntimeError, match="refused to open the table t"):
        open_store("example://refused", table="t", tensor_bytes=SIZES)


def test_the_first_plugin_of_a_type_stays(plugins, caplog):
    path = compiled(ROOT / "tests/stores/odd_plugin.cpp", plugins / "twice.so")
    with caplog.at_level(logging.WARNING):
        assert load_plugin(path) == "odd"
    assert "the type odd is there already" in caplog.text


def test_what_cannot_be_loaded_is_named(plugins):
    with pytest.raises(ValueError, match="nowhere.so"):
        load_plugin(str(plugins / "nowhere.so"))
    path = compiled(ROOT / "tests/stores/odd_plugin.cpp", plugins / "less.so", "-DWITHOUT_FETCH")
    with pytest.raises(ValueError, match="should export IO_Pull but does not"):
        load_plugin(path)
