"""Parameter server plug-ins, compiled against the header that is installed."""

import gc
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import torchrec_dynamic_embedding.register_io  # noqa: F401 - torch.ops.tde
from embstore.stores import plugin as plugin_store
from embstore.stores.plugin import include_dir, load_plugin
from embstore.stores.urls import open_store

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


@pytest.mark.parametrize("mood", ["blocks", "late"])
def test_a_late_call_raises_in_time_and_no_other_runs_beside_it(mood, monkeypatch):
    """The plug-in takes 0.7 s for its first pull, and throws when two calls run at a time."""
    store = open_store(f"odd://{mood}", table="t", tensor_bytes=SIZES)
    keys = ids(8, -1)
    rows = rows_of(keys)
    store.put(keys, rows, np.ones(2, np.uint64))
    monkeypatch.setattr(plugin_store, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="pull of t: not completed within 0.1 seconds"):
        store.get(keys)
    for call in (lambda: store.get(keys), lambda: store.put(keys, rows, np.ones(2, np.uint64))):
        with pytest.raises(RuntimeError, match="waiting for an earlier call: not completed within 0.1"):
            call()
    monkeypatch.setattr(plugin_store, "TIMEOUT_SECONDS", 60.0)
    found_rows, _, found = store.get(keys)
    assert found.all()
    np.testing.assert_array_equal(found_rows, rows)


def test_a_store_may_be_dropped_while_a_call_is_late(monkeypatch):
    monkeypatch.setattr(plugin_store, "TIMEOUT_SECONDS", 0.05)
    for mood in ("blocks", "late", "silent"):
        store = open_store(f"odd://{mood}", table="t", tensor_bytes=SIZES)
        with pytest.raises(RuntimeError, match="not completed"):
            store.get(ids(1))
        del store
    time.sleep(0.8)  # the late answers arrive


def test_exceptions_of_the_plugin_end_no_process(capfd):
    with pytest.raises(RuntimeError, match="refused to open the table t: no such place"):
        open_store("odd://throws at the start", table="t", tensor_bytes=SIZES)
    store = open_store("odd://throws at the end", table="t", tensor_bytes=SIZES)
    store.put(ids(1), rows_of(ids(1)), np.ones(1, np.uint64))
    del store
    gc.collect()
    assert "odd.so threw: the door is stuck" in capfd.readouterr().err


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
    assert "a plug-in of the type odd is loaded already" in caplog.text


def test_what_cannot_be_loaded_is_named(plugins):
    with pytest.raises(ValueError, match="nowhere.so"):
        load_plugin(str(plugins / "nowhere.so"))
    path = compiled(ROOT / "tests/stores/odd_plugin.cpp", plugins / "less.so", "-DWITHOUT_FETCH")
    with pytest.raises(ValueError, match="should export IO_Pull but does not"):
        load_plugin(path)


def test_a_file_of_the_current_folder_is_found(plugins, monkeypatch):
    compiled(ROOT / "tests/stores/odd_plugin.cpp", plugins / "here.so", '-DTYPE="odd-here"')
    monkeypatch.chdir(plugins)
    torch.ops.tde.register_io("here.so")
    open_store("odd-here://a", table="t", tensor_bytes=SIZES)


TAKES_OVER = """
import logging, sys
import numpy as np
from embstore.stores.plugin import PluginStore, load_plugin
from embstore.stores.urls import is_shared, open_store, tiers

logging.basicConfig(stream=sys.stdout, format="%(message)s")
scheme, path = sys.argv[1:]
url = {"memory": "memory://x", "redis": "redis://127.0.0.1:1/", "ssd": "ssd:///x"}[scheme]
load_plugin(path)
load_plugin(path)
store = open_store(url, table="t", tensor_bytes=[8])
assert type(store) is PluginStore and is_shared(url), store
store.put(np.array([5]), np.full((1, 8), 7, np.uint8), np.ones(1, np.uint64))
assert store.get(np.array([5]))[0].tolist() == [[7] * 8]
try:
    from embstore import TableOptions
    tiers(url, url, upper_rows=9)(TableOptions(name="t", dim=2), 0)
except ValueError as error:
    print("TIERS", error)
"""


@pytest.mark.parametrize("scheme", ["memory", "redis", "ssd"])
def test_a_plugin_takes_over_a_built_in_scheme_and_says_so(scheme, plugins):
    path = compiled(ROOT / "tests/stores/odd_plugin.cpp", plugins / f"{scheme}.so", f'-DTYPE="{scheme}"')
    command = [sys.executable, "-c", TAKES_OVER, scheme, path]  # a process of its own: it is for good
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "from now on" in line]
    assert len(said) == 1 and f"opens {scheme}://" in said[0]
    assert "TIERS an upper tier should be a built-in store" in done.stdout
