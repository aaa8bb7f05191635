"""Options of a variable that decide which rows stay: ttl, bytes, importance, shared rows."""

import json
from datetime import datetime, timezone
from pathlib import Path

import forked_programs
import numpy as np
import pytest
import tensorflow as tf
from faces.sparse_operation_kit import retention_ranks
from faces.sparse_operation_kit.retention_ranks import FREQUENT, KINDS, bits, continues, made, train

import embstore
import sparse_operation_kit as sok


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_that_was_dumped_and_loaded_keeps_the_same_rows(kind, tmp_path):
    stats = continues(kind, tmp_path).table.stats()
    assert stats.expired + stats.evictions > 20


@pytest.mark.multirank
def test_so_do_the_parts_of_two_ranks(tmp_path):
    output = forked_programs.run(
        [Path(retention_ranks.__file__), tmp_path],
        ranks=2,
        needs=["sparse_operation_kit", "torch.distributed"],
        seconds=100,
    )
    assert output.count("all well") == 2, output[-6000:]
    # One rank goes on with the rows and the shared rows of both.
    variable, optimizer = made("frequency", "frequency")
    with pytest.warns(UserWarning, match="dropped 64 rows while 128 were loaded"):
        sok.load(tmp_path / "frequency", variable, optimizer)
    assert len(variable.table.shared_rows()) == 2 and len(variable.table) > 0


def test_rows_that_no_lookup_used_for_a_while_expire():
    for options, older in (({}, 3600), ({"var_type": "hbm"}, 3600)):
        variable = sok.DynamicVariable(dimension=2, ttl=older, **options)
        table = variable.table
        table.insert_or_assign([1, 2], np.ones((2, 2)), scores=table.score - np.array([3700, 3500]) * 10**9)
        tf.nn.embedding_lookup(variable, tf.constant([3], tf.int64))
        assert variable.indices.numpy().tolist() == [2, 3]


def test_a_variable_stays_within_its_bytes_also_when_the_optimizer_takes_a_share():
    variable = sok.DynamicVariable(dimension=8, max_bytes=60_000)
    for first in range(0, 5000, 100):
        tf.nn.embedding_lookup(variable, tf.range(first, first + 100, dtype=tf.int64))
    plain, rows = variable.table.options.max_capacity, variable.table.rows()
    assert len(rows) == plain and variable.table.stats().bytes <= 60_000
    variable.use_optimizer(embstore.Adam(), ("m", "v"))
    fewer = variable.table.options.max_capacity
    latest = rows.keys[np.lexsort((rows.keys, rows.scores))[-fewer:]]
    assert sorted(variable.table) == sorted(latest.tolist()) and variable.table.stats().refusals == 0
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    optimizer.reset_slots([variable])
    for first in range(0, 5000, 100):
        with tf.GradientTape() as tape:
            keys = tf.range(first, first + 100, dtype=tf.int64)
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, keys))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    stats = variable.table.stats()
    assert 128 <= stats.max_capacity < plain / 1.5 and 40_000 < stats.bytes <= 60_000
    assert "max_capacity" not in variable.config_dict and variable.config_dict["max_bytes"] == 60_000


def test_the_first_optimizer_takes_over_what_was_counted_before_it():
    variable, _ = made("frequency", "counted")
    for _ in range(3):
        tf.nn.embedding_lookup(variable, tf.range(64, dtype=tf.int64))
    tf.nn.embedding_lookup(variable, tf.range(1000, 1030, dtype=tf.int64))
    before = variable.table.admission_counters().tobytes(), variable.table.score
    variable.use_optimizer(embstore.Adagrad(), ("accumulator",))
    assert variable.table.options.optimizer.engine_name == "adagrad"
    assert (variable.table.admission_counters().tobytes(), variable.table.score) == before


def test_a_plain_variable_has_the_files_of_the_original_alone(tmp_path):
    variable = sok.DynamicVariable(dimension=2, name="plain")
    tf.nn.embedding_lookup(variable, tf.range(9, dtype=tf.int64))
    sok.dump(tmp_path / "dump", variable)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["manifest.json", "plain_0-key", "plain_0-weight"]
    assert "tables" not in json.loads((tmp_path / "dump/manifest.json").read_text())


def test_dumping_another_variable_over_a_dump_keeps_what_it_says_of_the_first(tmp_path):
    variable, optimizer = made("importance", "first")
    train(variable, optimizer, 0, 12)
    sok.dump(tmp_path / "dump", variable, optimizer)
    sok.dump(tmp_path / "dump", sok.DynamicVariable(dimension=2, name="second"))
    back, again = made("importance", "first")
    sok.load(tmp_path / "dump", back, again)
    assert bits(back) == bits(variable)


@pytest.mark.parametrize("kind", ["score", "shared.rank_0.world_size_1", "admission.rank_0.world_size_1"])
def test_a_damaged_file_is_refused_before_a_row_changes(kind, tmp_path):
    variable, optimizer = made("frequency", "damaged")
    train(variable, optimizer, 0, 12)
    sok.dump(tmp_path / "dump", variable, optimizer)
    file = tmp_path / f"dump/damaged_0-{kind}"
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x10
    file.write_bytes(content)
    back, again = made("frequency", "damaged")
    with pytest.raises(embstore.CheckpointError, match=f"{file.name}.* checksum"):
        sok.load(tmp_path / "dump", back, again)
    assert len(back.table) == 0


def test_a_dump_converts_with_or_without_such_files(tmp_path):
    variable, optimizer = made("frequency", "converted")
    train(variable, optimizer, 0, 12)
    sok.dump(tmp_path / "dump", variable, optimizer)
    embstore.convert(tmp_path / "dump", tmp_path / "v2", "v2")
    (table,) = embstore.open_dump(tmp_path / "v2").tables
    assert table.rows == len(variable.table)


def test_changes_since_a_moment_need_rows_that_know_theirs():
    variable = sok.DynamicVariable(dimension=2, evict_strategy="kLfu", name="counts")
    tf.nn.embedding_lookup(variable, tf.range(9, dtype=tf.int64))
    with pytest.raises(
        ValueError, match="sok_vars should have evict_strategy 'kLru'.*'counts:0' follows: 'lfu'"
    ):
        sok.incremental_model_dump([variable], datetime(2020, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl should be a number of seconds but is: 0"),
        ({"ttl": 5, "evict_strategy": "kLfu"}, "ttl needs a score strategy with a clock"),
        ({"ttl": 1.5, "evict_strategy": "kStep"}, "ttl should be a number of batches"),
        ({"max_bytes": 10}, "max_bytes should be at least .* but is: 10"),
        (
            {"max_bytes": 10**6, "max_capacity": 1024},
            r"max_bytes should be None beside max_capacity \(1024\)",
        ),
        ({"half_life": 3}, "half_life should be 0 unless"),
        ({"shared_rows": -1}, "shared_rows should be between 0 and 65536 but is: -1"),
        ({"evict_strategy": "lfu"}, "should be one of 'kLru', 'kLfu', 'kStep', 'kImportance' but is: 'lfu'"),
        ({"ttls": 5}, "ttls should not be given: a hybrid variable takes .*, ttl, max_bytes"),
        ({"var_type": "hbm", "max_bytes": 10**6}, "max_bytes should not be given: an hbm variable"),
        ({**FREQUENT, "admission": "rare"}, "admission should be one of 'all', 'frequency' but is: 'rare'"),
    ],
)
def test_an_option_that_cannot_be_followed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sok.DynamicVariable(dimension=4, **options)
