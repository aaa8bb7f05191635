"""Snapshots of OneEmbedding from a dump of embstore and back, by the command line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import embstore
import one_embedding
from embstore.cli.commands import app

OPTIMIZERS = (
    embstore.SGD(),
    embstore.SGD(momentum=0.9),
    embstore.Adagrad(),
    embstore.Adam(),
    embstore.Ftrl(paper_sign=False),
)
KEYS = np.array([-(2**63), -7, 0, 3, 2**63 - 1])


def convert(*arguments: object, fails: str = "") -> None:
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == (2 if fails else 0), done.output
    assert fails in done.output


def trained(optimizer: embstore.Optimizer) -> embstore.Table:
    table = embstore.Table("user", dim=5, optimizer=optimizer)
    table.find_or_insert(KEYS)
    table.apply_gradients(KEYS[1:], np.ones((4, 5), np.float32))
    return table


def test_a_dump_without_states_becomes_vectors_alone(tmp_path: Path) -> None:
    rows = (table := trained(embstore.Adagrad())).rows()
    embstore.dump(tmp_path / "dump", {"model": {"user": table}})
    convert(tmp_path / "dump", tmp_path / "oe", "--to", "one_embedding", "--snapshot", "s")
    kinds = (np.int64, np.float32, 5)
    with one_embedding.make_persistent_table_reader(str(tmp_path / "oe/user/0-1"), "s", *kinds) as reader:
        (block,) = list(reader)
    order = np.argsort(block[0])
    np.testing.assert_array_equal(block[0][order], rows.keys)
    np.testing.assert_array_equal(block[1][order], rows.values)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.engine_name)
def test_rows_and_states_survive_the_way_there_and_back(
    tmp_path: Path, optimizer: embstore.Optimizer
) -> None:
    table = trained(optimizer)
    rows, width = table.rows(), 5 + table.state_width
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    convert(tmp_path / "dump", tmp_path / "oe", "--to", "one_embedding", "--snapshot", "s")
    kinds = (np.int64, np.float32, width)
    with one_embedding.make_persistent_table_reader(str(tmp_path / "oe/user/0-1"), "s", *kinds) as reader:
        (block,) = list(reader)
    order = np.argsort(block[0])
    np.testing.assert_array_equal(block[0][order], rows.keys)
    np.testing.assert_array_equal(block[1][order], np.concatenate([rows.values, rows.states], axis=1))

    options = ("--dim", 5, "--optimizer", type(optimizer).__name__)
    if optimizer.engine_name == "momentum":  # the name alone stands for SGD without it
        convert(tmp_path / "oe", tmp_path / "back", "--to", "v1a", *options, fails="rows of 10 floats")
        assert not (tmp_path / "back").exists()
        return
    convert(tmp_path / "oe", tmp_path / "back", "--to", "v1a", *options)
    twin = embstore.Table("user", dim=5, optimizer=optimizer, score_strategy="customized")
    embstore.load(tmp_path / "back", {"one_embedding": {"user": twin}}, optim=True)
    np.testing.assert_array_equal(twin.rows().keys, rows.keys)
    np.testing.assert_array_equal(twin.rows().values, rows.values)
    np.testing.assert_array_equal(twin.rows().states, rows.states)


def test_a_trained_embedding_of_several_directories_becomes_a_dump(tmp_path: Path) -> None:
    kinds = (np.int64, np.float32, 6)
    paths = [str(tmp_path / "model" / f"{rank}-3") for rank in range(3)]
    values = np.random.default_rng(0).random((5, 6), np.float32)
    with one_embedding.make_persistent_table_writer(paths, "epoch-1", *kinds) as writer:
        writer.write(KEYS, values)
    convert(tmp_path / "model", tmp_path / "dump", "--to", "v2", "--dim", 2, "--optimizer", "Adam")
    table = embstore.Table("model", dim=2, optimizer=embstore.Adam(), score_strategy="customized")
    embstore.load(tmp_path / "dump", {"one_embedding": {"model": table}}, optim=True)
    np.testing.assert_array_equal(table.rows().keys, KEYS)
    np.testing.assert_array_equal(table.rows().values, values[:, :2])
    np.testing.assert_array_equal(table.rows().states, values[:, 2:])


def test_a_converted_snapshot_is_loaded_by_an_embedding(tmp_path: Path) -> None:
    table = trained(embstore.Adam())
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    convert(tmp_path / "dump", tmp_path / "oe", "--to", "one_embedding")
    embedding = one_embedding.MultiTableEmbedding(
        "converted-user",
        5,
        torch.float,
        torch.int64,
        [one_embedding.make_table(one_embedding.make_uniform_initializer(-1, 1))],
        one_embedding.make_cached_ssd_store_options(1, str(tmp_path / "oe/user"), size_factor=3),
    )
    embedding.load_snapshot("converted")
    vectors = embedding.eval()(torch.from_numpy(KEYS)).numpy()
    np.testing.assert_array_equal(vectors, table.find(KEYS)[0])


def test_what_is_unclear_or_missing_is_named(tmp_path: Path) -> None:
    table = trained(embstore.SGD())
    embstore.dump(tmp_path / "dump", {"model": {"user": table}}, optim=True)
    convert(tmp_path / "dump", tmp_path / "oe", "--to", "one_embedding", "--snapshot", "a")
    back = (tmp_path / "oe", tmp_path / "back", "--to", "v2")
    convert(*back, "--snapshot", "b", fails="--snapshot should be one of ['a']")
    convert(*back, "--dim", 4, fails="make rows of 5 floats")
    convert(*back, "--optimizer", "Nadam", fails="Nadam")
    with embstore.stores.SsdStore(tmp_path / "oe/user/0-1", 20) as store:
        store.snapshot("b")
    convert(*back, fails="--snapshot should name one of")
    assert not (tmp_path / "back").exists()
