"""incremental_dump: exactly the rows whose score is not below the threshold, with their vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faces.dynamicemb import dump_jobs as jobs
from faces.dynamicemb import ranks
from faces.dynamicemb.models import Spec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import DataType

from dynamicemb import DynamicEmbScoreStrategy

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(240)]

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
STRATEGIES = ("TIMESTAMP", "STEP", "CUSTOMIZED", "LFU")


def specs() -> list[Spec]:
    """A table of every strategy in one collection; one of them is half as wide and of bfloat16."""
    return [
        Spec(
            strategy,
            (f"f{number}",),
            dim=4 if strategy == "STEP" else 8,
            dtype=DataType.BF16 if strategy == "STEP" else DataType.FP32,
            options={"score_strategy": DynamicEmbScoreStrategy[strategy]},
        )
        for number, strategy in enumerate(STRATEGIES)
    ]


@pytest.mark.parametrize("world", [1, 3])
def test_the_set_and_the_values_are_exact(world: int) -> None:
    answers = ranks.run(world, jobs.increments, "ebc", specs(), ADAM, timeout=150)
    for step, of_ranks in enumerate(zip(*answers, strict=True)):
        for name in STRATEGIES:
            first = of_ranks[0]
            threshold = first["threshold"] and first["threshold"]["model"][name]
            keys = np.concatenate([answer["stored"][name].keys for answer in of_ranks])
            values = np.concatenate([answer["stored"][name].values for answer in of_ranks])
            scores = np.concatenate([answer["stored"][name].scores for answer in of_ranks])
            wanted = np.flatnonzero(scores >= np.uint64(threshold))
            wanted = wanted[np.argsort(keys[wanted])]
            # Counts are no times, and a customized score that is set again names the rows of both batches.
            if name in ("TIMESTAMP", "STEP"):
                assert len(wanted) > 0 and (step == 0 or len(wanted) < len(keys))
            for answer in of_ranks:
                got_keys, got_values = answer["tensors"]["model"][name]
                assert got_values.dtype == (torch.bfloat16 if name == "STEP" else torch.float32)
                assert got_values.shape == (len(wanted), values.shape[1])
                np.testing.assert_array_equal(got_keys.numpy(), keys[wanted])
                np.testing.assert_array_equal(got_values.float().numpy(), values[wanted])
                assert answer["scores"] == first["scores"], "one threshold for all ranks"


def test_other_thresholds_are_refused() -> None:
    bad = [None, 1.5, "1", -1, True, [1], {"model": 3}, {"model": {"t0": "x"}}, {"model": {1: 2}}]
    for messages in ranks.run(1, jobs.refuse, bad):
        assert len(messages) == len(bad)
        assert all("score_threshold should be" in message for message in messages)
