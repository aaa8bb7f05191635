"""A wrapped model trains exactly as a static twin with room for all ids."""

import json

import numpy as np
import pytest
from faces.torchrec_dynamic_embedding import ranks, twins
from faces.torchrec_dynamic_embedding.models import batches, trainer

import torchrec_dynamic_embedding as tde


@pytest.mark.parametrize("num_prefetch", [0, 1, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_a_window_of_a_tenth_of_the_ids_trains_as_a_table_with_all(sharding, optimizer, num_prefetch):
    twins.compare(
        f"memory://twin-{sharding}-{optimizer}-{num_prefetch}",
        kind="ec" if num_prefetch == 1 else "ebc",
        sharding=sharding,
        optimizer=optimizer,
        num_prefetch=num_prefetch,
    )


@pytest.mark.parametrize("num_prefetch", [0, 4])
@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_it_does_so_over_redis(redis, layout, num_prefetch):
    url = f"redis://{redis.where}/?prefix=twin-{num_prefetch}&layout={layout}&num_threads=2&chunk_size=7"
    twins.compare(url, sharding="column_wise", optimizer="rowwise_adagrad", num_prefetch=num_prefetch)


def test_it_does_so_over_files(tmp_path):
    twins.compare(f"ssd://{tmp_path}", sharding="table_wise", optimizer="adagrad", num_prefetch=2)


def test_the_comparison_notices_slots_that_are_given_away_too_early(monkeypatch):
    from torchrec_dynamic_embedding.in_flight import InFlight

    monkeypatch.setattr(InFlight, "oldest", lambda self, default: (default, default))
    monkeypatch.setattr(InFlight, "replacing", lambda self, frontier: None)
    with pytest.raises((AssertionError, RuntimeError)):
        twins.compare("memory://unpinned", num_prefetch=4, steps=40, epochs=1)


@pytest.mark.multirank
@pytest.mark.timeout(300)
def test_two_ranks_train_as_two_ranks_with_room_for_all_ids(redis):
    ranks.launch("twins", redis.where, world=2, seconds=280)


@pytest.mark.multirank
def test_a_failure_of_one_rank_reaches_all_and_the_next_epoch_works(redis):
    ranks.launch("failing_rank", redis.where, world=2)


@pytest.mark.multirank
def test_a_new_process_with_the_same_url_continues_with_the_same_losses(redis, tmp_path):
    losses = []
    for _ in range(2):
        paths = str(tmp_path / "parts.pt"), str(tmp_path / "parts.json")
        url = f"redis://{redis.where}/?prefix=parts"
        ranks.launch("interrupted", url, 9, *paths)
        losses += json.loads((tmp_path / "parts.json").read_text())
    paths = str(tmp_path / "whole.pt"), str(tmp_path / "whole.json")
    ranks.interrupted(f"redis://{redis.where}/?prefix=whole", 18, *paths)
    assert losses == json.loads((tmp_path / "whole.json").read_text())


@pytest.mark.multirank
@pytest.mark.parametrize(("how", "code"), [("raise", 7), ("stay", 0)])
def test_the_interpreter_exits_by_itself_in_mid_epoch(how, code):
    found, output = ranks.in_a_new_interpreter("leaves_early", how, seconds=60)
    assert found == code, output[-2000:]


def test_training_goes_on_where_another_model_saved():
    data = batches(10, 300, seed=2)
    whole, first, second = (trainer(48) for _ in range(3))
    expected = twins.train(
        whole, tde.wrap("memory://whole", twins.loader_of(data), whole.model, {"emb": whole.configs})
    )
    losses = []
    for part, model in ((data[:5], first), (data[5:], second)):
        if losses:
            model.model.module.dense.load_state_dict(first.model.module.dense.state_dict())
        loader = tde.wrap("memory://parts", twins.loader_of(part), model.model, {"emb": model.configs})
        losses += twins.train(model, loader)
        tde.save(model.model)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
