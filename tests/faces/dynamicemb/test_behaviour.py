"""What a training script can see of dynamic tables: storage, scores, optimizers, errors on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from faces.dynamicemb import jobs, option_jobs, ranks
from faces.dynamicemb.models import CONSTANT, all_rows
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from dynamicemb import DynamicEmbCheckMode

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_reads_zero_for_missing_keys_and_changes_nothing(world: int) -> None:
    results = ranks.run(world, jobs.evaluate_after_training)
    for result in results:
        assert result["same"]
        assert (result["answer"][:2] != 0).all() and (result["answer"][2] == 0).all()
    assert set().union(*(r["stored"] for r in results)) == {2, 3, 1000}


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_a_sharded_module_shows_the_rows_of_its_tables_on_this_rank(kind: str) -> None:
    ((shown),) = ranks.run(1, jobs.shown, kind)
    assert "(t0): PlaceOfTable(Table('t0', dim=8" in shown["empty"] and "rows=0 of" in shown["empty"]
    assert "rows=1 of at most 1,024" in shown["trained"] and "hit rate" in shown["trained"]
    assert shown["html"].count("<tr>") == 2 and "t0" in shown["html"]
    assert "t0.weight" in shown["names"] and "t1.weight" in shown["names"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_bucket_full_of_one_batch_refuses_the_rest_and_says_how_many(world: int) -> None:
    ignored = ranks.run(world, option_jobs.overfill, DynamicEmbCheckMode.IGNORE)
    warned = ranks.run(world, option_jobs.overfill, DynamicEmbCheckMode.WARNING)
    for results in (ignored, warned):
        assert (results[0]["zeros"], results[0]["refusals"], results[0]["size"]) == (72, 72, 128)
    assert not any(r["warnings"] for r in ignored)
    assert len(warned[0]["warnings"]) == 1 and " 72 " in warned[0]["warnings"][0]
    for kind, message, _ in ranks.errors(world, option_jobs.overfill, DynamicEmbCheckMode.ERROR):
        assert kind == "RefusedKeysError" and " 72 " in message


@pytest.mark.parametrize("world", [1, 2])
def test_strategies_mix_in_one_collection_and_each_keeps_its_scores(world: int) -> None:
    results = ranks.run(world, option_jobs.mixed_scores)
    for result in results:
        first, second, third = (result[name]["model"] for name in ("first", "second", "third"))
        assert (first["t_CUSTOMIZED"], first["t_LFU"], third["t_LFU"]) == (0, 1, 1)
        assert (first["t_STEP"], second["t_STEP"], third["t_STEP"]) == (1, 3, 4)
        assert first["t_TIMESTAMP"] < second["t_TIMESTAMP"] < third["t_TIMESTAMP"]
        assert (second["t_CUSTOMIZED"], third["t_CUSTOMIZED"]) == (70, 7)
        assert len(result["warned"]) == 1 and "below" in result["warned"][0]
    stored: dict[str, dict[int, int]] = {}
    for result in results:
        for name, scores in result["stored"].items():
            stored.setdefault(name, {}).update(scores)
    assert stored["t_STEP"] == {1: 1, 2: 3} | ({3: 2} if world == 2 else {})
    assert stored["t_CUSTOMIZED"] == {1: 70, 2: 7} | ({3: 70} if world == 2 else {})
    assert stored["t_LFU"] == {1: 2 * world, 2: 2 * world} | ({3: 1} if world == 2 else {})
    assert stored["t_TIMESTAMP"][1] < stored["t_TIMESTAMP"][2]


@pytest.mark.parametrize("set_on", [[], [0]])
def test_a_customized_table_without_a_score_raises_on_every_rank(set_on: list[int]) -> None:
    for kind, message, _ in ranks.errors(2, option_jobs.customized_without_score, set_on):
        assert kind == "RuntimeError" and "'t0'" in message and "score" in message


def test_a_wrong_score_is_named() -> None:
    ((timestamp, zero, fraction, boolean, shape),) = ranks.run(1, option_jobs.wrong_scores)
    assert "TIMESTAMP" in timestamp and "0" in zero and "1.5" in fraction and "True" in boolean
    assert "'model'" in shape


@pytest.mark.parametrize("world", [1, 2])
def test_a_scheduler_on_the_fused_optimizer_reaches_the_rows(world: int) -> None:
    for result in ranks.run(world, jobs.schedule):
        first, second = result["moves"]
        # every rank has the key once, and gradients are averaged over ranks
        assert math.isclose(first, 0.5, rel_tol=1e-5) and math.isclose(second, 0.05, rel_tol=1e-4)
        assert result["keys"] == ["embeddings.t0.weight"] and "state" in result["state"]


def test_optimizers_applied_in_backward_are_taken_over() -> None:
    (args,) = ranks.run(1, jobs.optimizer_in_backward)
    assert (args["t0"]["opt_type"], args["t0"]["lr"]) == ("sgd", 0.25)
    assert (args["t1"]["opt_type"], args["t1"]["lr"], args["t1"]["iters"]) == ("adam", 0.125, 0)


def test_an_unknown_fused_parameter_warns_and_an_unknown_optimizer_raises() -> None:
    (warned,) = ranks.run(1, jobs.fused_params_of, {"lr": 0.1, "learning_rate": 0.2})
    assert len(warned) == 1 and "'lr'" in warned[0]
    for kind, message, _ in ranks.errors(1, jobs.fused_params_of, {"optimizer": EmbOptimType.LAMB}):
        assert kind == "ValueError" and "EXACT_ADAGRAD" in message and "LAMB" in message.upper()


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_state_dict_round_trips_beside_static_tables(kind: str) -> None:
    for result in ranks.run(2, jobs.state_dict_round_trip, kind):
        assert result["static"] and result["kept"]
        assert [key.split(".")[-2] for key in result["keys"]] == ["dynamic", "static"]


@pytest.mark.parametrize("dedup", [False, True])
def test_the_sparse_pipeline_trains_the_same_rows(dedup: bool) -> None:
    for result in ranks.run(2, jobs.pipeline, dedup):
        assert result["same"] and result["size"] > 0


@pytest.mark.parametrize(("kind", "dedup"), [("ec", False), ("ec", True), ("ebc", False)])
def test_ranks_may_have_different_batches_or_none(kind: str, dedup: bool) -> None:
    alone = all_rows([r["rows"] for r in ranks.run(1, jobs.uneven, kind, dedup)])
    for world in (2, 3):
        results = ranks.run(world, jobs.uneven, kind, dedup)
        assert all(shape[0] == 0 for shape in results[0]["shapes"])
        together = all_rows([r["rows"] for r in results])
        assert {t: k.keys() for t, k in together.items()} == {t: k.keys() for t, k in alone.items()}
        for name, of_table in together.items():
            for key, row in of_table.items():
                assert row == pytest.approx(alone[name][key], abs=1e-6)


def test_ranks_may_have_different_batches_beside_a_row_wise_static_table() -> None:
    (alone,) = ranks.run(1, jobs.uneven_with_static)
    both = ranks.run(2, jobs.uneven_with_static)
    together = all_rows([result["rows"] for result in both])["t0"]
    assert together.keys() == alone["rows"]["t0"].keys()
    for key, row in together.items():
        assert row == pytest.approx(alone["rows"]["t0"][key], abs=1e-5)
    static = torch.cat([result["static"]["t1"][1] for result in both])[:64]
    torch.testing.assert_close(static, alone["static"]["t1"][1])


@pytest.mark.parametrize("world", [1, 2])
def test_several_collections_and_shared_features_live_side_by_side(world: int) -> None:
    for result in ranks.run(world, jobs.several_collections):
        assert result["paths"] == {"model.bags": ["a", "b"], "model.inner.0": ["c", "d"]}
        assert result["pooled"] == {"f0@a": (6, 4), "f0@b": (6, 12), "f1": (6, 12)}
        assert result["single"] == ["f2@c", "f2@d"]
        assert result["scores"].keys() == {"model.bags", "model.inner.0"}


@pytest.mark.parametrize("world", [1, 2])
def test_tables_may_be_half_precision_and_outputs_too(world: int) -> None:
    for result in ranks.run(world, jobs.half_tables, None):
        assert result == {"dtype": {torch.float32}, "tables": ["FLOAT16", "BFLOAT16"]}
    for result in ranks.run(world, jobs.half_tables, SparseType.FP16):
        assert result["dtype"] == {torch.float16}


@pytest.mark.parametrize("kind", ["ec", "ebc"])
def test_bad_input_on_one_rank_raises_on_all(kind: str) -> None:
    errors = ranks.errors(2, jobs.bad_input_on_rank_one, kind)
    assert "float" in errors[1][1] and errors[0][1] == f"{errors[1][1]} (on rank 1)"


@pytest.mark.parametrize("about", ["options", "rows", "optimizer"])
def test_ranks_that_disagree_about_a_table_all_say_so(about: str) -> None:
    for kind, message, _ in ranks.errors(2, jobs.disagree, about):
        assert kind == "ValueError" and "'t0'" in message and "rank 1" in message


@pytest.mark.parametrize("world", [1, 2])
def test_a_key_is_stored_once_it_was_seen_often_enough(world: int) -> None:
    results = ranks.run(world, option_jobs.admission, 3 * world)
    # key 1 comes twice a batch on every rank, key 2 once
    merged = [sorted(key for r in results for key in r["sizes"][step]) for step in range(3)]
    assert merged == [[], [1], [1, 2]]
    for result in results:
        assert (result["answers"][0] == CONSTANT.value).all()
        assert (result["answers"][2][2] == CONSTANT.value).all(), (
            "gradients of a key without a row are dropped"
        )
        assert (result["answers"][2][0] < CONSTANT.value).all()


@pytest.mark.parametrize("world", [1, 2])
def test_dropping_duplicates_on_the_wire_does_not_change_counts(world: int) -> None:
    counts = {key: score for r in ranks.run(world, option_jobs.count_with_dedup) for key, score in r.items()}
    assert counts == {5: 3 * world, 6: world}


def test_rows_evicted_to_a_store_come_back() -> None:
    (result,) = ranks.run(1, option_jobs.over_a_store)
    assert result["vectors"] == [CONSTANT.value - 1.0]
    assert result["evictions"] >= 300 - 128


@pytest.mark.parametrize(
    ("caching", "budget_rows", "capacity"),
    [(True, 300, 256), (True, 1, 128), (True, 0, 4096), (True, 10**6, 4096), (False, 300, 4096)],
)
def test_with_caching_memory_holds_what_fits_the_budget(
    caching: bool, budget_rows: int, capacity: int
) -> None:
    (result,) = ranks.run(1, option_jobs.with_caching, budget_rows, caching)
    assert result["max_capacity"] == capacity and result["same"]
    assert result["in_memory"] <= capacity
    assert result["in_memory"] + result["below"] >= 400
    assert (result["below"] > 0) == (capacity < 400)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_id_of_64_bits_is_legal_whatever_num_embeddings_says(
    world: int, kind: str, dtype: torch.dtype
) -> None:
    results = ranks.run(world, jobs.any_id, kind, dtype)
    stored: dict[str, set[int]] = {"t0": set(), "t1": set()}
    for result in results:
        assert result["heard"] == []
        for name, keys in result["keys"].items():
            stored[name].update(keys)
    assert stored == {"t0": {5, -1, -(2**63)}, "t1": {1 << 62, 7}}
    bags = results[0]["answer"]
    lengths = {"f0": [2, 1], "f1": [0, 3]} if kind == "ebc" else {"f0": [1, 1, 1], "f1": [1, 1, 1]}
    for name, expected in lengths.items():
        assert (bags[name] == 0.25 * torch.tensor(expected).unsqueeze(1)).all()
