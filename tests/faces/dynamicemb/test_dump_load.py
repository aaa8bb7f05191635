"""DynamicEmbDump and DynamicEmbLoad: training that was interrupted equals training that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faces.dynamicemb import dump_jobs as jobs
from faces.dynamicemb import ranks
from faces.dynamicemb.models import Spec, all_rows
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import embstore
from dynamicemb import DynamicEmbInitializerArgs, DynamicEmbScoreStrategy

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
ROWWISE = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
UNIFORM = {"initializer_args": DynamicEmbInitializerArgs()}


def specs() -> list[Spec]:
    return [
        Spec("t0", ("f0", "f1"), options={**UNIFORM, "score_strategy": DynamicEmbScoreStrategy.STEP}),
        Spec("t1", ("f2",), options=UNIFORM),
    ]


def whole(answers: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return all_rows([answer[key] for answer in answers])


@pytest.mark.parametrize("kind, params, layout", [("ebc", ADAM, "v1a"), ("ec", ROWWISE, "v2")])
def test_an_interrupted_training_goes_on_to_the_bit(
    tmp_path: Path, kind: str, params: Any, layout: str
) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(2, jobs.dump, path, kind, specs(), params, layout=layout, timeout=150)
    after = ranks.run(2, jobs.load, path, kind, specs(), params, timeout=150)
    for one, other in zip(before, after, strict=True):
        assert one["rows"] == other["rows"] and one["after"] == other["after"]
        assert one["losses"] == other["losses"]
        assert one["score"]["model"]["t0"] == other["score"]["model"]["t0"]
    alone = ranks.run(1, jobs.load, path, kind, specs(), params, timeout=150)
    assert whole(alone, "rows") == whole(before, "rows")
    assert alone[0]["losses"] == pytest.approx(before[0]["losses"], rel=1e-4)


def test_a_dump_in_the_background_is_the_state_at_the_call(tmp_path: Path) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(2, jobs.dump, path, "ebc", specs(), ADAM, async_=True, timeout=150)
    after = ranks.run(2, jobs.load, path, "ebc", specs(), ADAM, timeout=150)
    assert [a["rows"] for a in after] == [b["rows"] for b in before]
    assert [a["losses"] for a in after] == [b["losses"] for b in before]


def test_tables_are_chosen_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "d")
    before = ranks.run(1, jobs.dump, path, "ebc", specs(), ADAM, table_names={"model": ["t1"]}, timeout=150)
    assert list(embstore.open_dump(path)["model"]) == ["t1"]
    (after,) = ranks.run(1, jobs.load, path, "ebc", specs(), ADAM, table_names=["t1"], timeout=150)
    assert after["rows"] == {"t0": {}, "t1": before[0]["rows"]["t1"]}
    (after,) = ranks.run(1, jobs.load, path, "ebc", specs(), ADAM, timeout=150)
    assert after["rows"]["t0"] == {}, "a table that is not in the dump stays as it is"
    named = {"model": ["t0", "t1"]}
    for _, message, _ in ranks.errors(1, jobs.load, path, "ebc", specs(), ADAM, named, timeout=150):
        assert "t0_keys: is missing" in message


def test_files_are_the_documented_ones(tmp_path: Path) -> None:
    ranks.run(2, jobs.dump, str(tmp_path / "d"), "ebc", specs(), ADAM, timeout=150)
    names = {p.name for p in (tmp_path / "d" / "model").iterdir() if p.name.startswith("t1")}
    states = {f"t1_opt_state_{s}_{f}" for s in "mv" for f in ("keys", "values")}
    assert names == {"t1_keys", "t1_values", "t1_scores", "t1_opt_args.json"} | states
    for _, message, _ in ranks.errors(2, jobs.dump, str(tmp_path / "d"), "ebc", specs(), ADAM, timeout=150):
        assert "path should be an empty folder" in message


def test_a_model_without_dynamic_tables_warns_and_does_nothing(tmp_path: Path) -> None:
    ((answers, messages),) = ranks.run(1, jobs.plain_module, str(tmp_path / "d"), timeout=150)
    assert answers == [None, None, None] and len(messages) == 3
    assert list(tmp_path.iterdir()) == []
