"""Options that current clients use, over ranks: who owns a key, and how all ranks count occurrences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faces.dynamicemb import dump_jobs, jobs, ranks
from faces.dynamicemb.models import Spec
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from dynamicemb import DynamicEmbScoreStrategy, FrequencyAdmissionStrategy, KVCounter

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
COMPOUND = (DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.TIMESTAMP)


def _specs(**options: Any) -> list[Spec]:
    """Two tables whose blocks differ: ids are below 40, so those of t0 are beyond its rows from 30 on."""
    return [
        Spec("t0", ("f0", "f1"), rows=30, options=options),
        Spec("t1", ("f2",), rows=41, options=options),
    ]


def _joined(answers: list[dict[str, Any]], table: str) -> dict[int, list[float]]:
    return {key: row for answer in answers for key, row in answer["rows"][table].items()}


@pytest.mark.parametrize("kind, dedup", [("ebc", False), ("ec", True)])
def test_blocks_of_keys_train_like_any_other_ownership(kind: str, dedup: bool) -> None:
    blocks = ranks.run(2, jobs.train, kind, _specs(dist_type="continuous"), dedup=dedup, steps=3, timeout=150)
    usual = ranks.run(2, jobs.train, kind, _specs(), dedup=dedup, steps=3, timeout=150)
    for table, rows in (("t0", 30), ("t1", 41)):
        ours, theirs = _joined(blocks, table), _joined(usual, table)
        assert ours.keys() == theirs.keys()
        for key in ours:  # owners add up their shares of a bag, so the order differs
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6)
        half = -(-rows // 2)
        for rank, answer in enumerate(blocks):
            owners = {key // half if key < rows else key % 2 for key in answer["rows"][table]}
            assert owners == {rank}


@pytest.mark.parametrize("counter", [None, KVCounter(4096)])
def test_occurrences_of_all_ranks_admit_a_key(counter: KVCounter | None) -> None:
    options = {"admit_strategy": FrequencyAdmissionStrategy(5), "admission_counter": counter}
    (alone,) = ranks.run(1, jobs.train, "ec", _specs(**options), steps=3, timeout=150)
    both = ranks.run(2, jobs.train, "ec", _specs(**options), dedup=True, steps=3, timeout=150)
    for table in ("t0", "t1"):
        keys = alone["rows"][table].keys()
        assert 0 < len(keys) < 40 and keys == _joined(both, table).keys()


@pytest.mark.parametrize("loading", [1, 2])
def test_counts_blocks_and_compound_scores_go_on_with_any_number_of_ranks(
    loading: int, tmp_path: Path
) -> None:
    specs = _specs(
        dist_type="continuous",
        score_strategy=COMPOUND,
        admit_strategy=FrequencyAdmissionStrategy(300),
        admission_counter=KVCounter(4096),
    )
    specs.append(Spec("t2", ("f3",), options={"dist_type": "continuous", "score_strategy": COMPOUND}))
    path = str(tmp_path / "d")
    before = ranks.run(2, dump_jobs.dump, path, "ec", specs, ADAM, layout="v2", timeout=150)
    after = ranks.run(loading, dump_jobs.load, path, "ec", specs, ADAM, timeout=150)
    assert _joined(after, "t2") == _joined(before, "t2") != {}
    if loading == 2:
        assert [a["after"] for a in after] == [b["after"] for b in before]
        assert [a["losses"] for a in after] == [b["losses"] for b in before]
    else:
        assert after[0]["losses"] == pytest.approx(before[0]["losses"], rel=1e-4)
