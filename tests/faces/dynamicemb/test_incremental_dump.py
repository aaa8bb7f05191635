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


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_set_and_the_values_are_exact(strategy: str, world: int) -> None:
    options = {"score_strategy": DynamicEmbScoreStrategy[strategy]}
    specs = [
        Spec("t0", ("f0",), dim=8, options=options),
        Spec("t1", ("f1",), dim=4, options=options, dtype=DataType.BF16),
    ]
    answers = ranks.run(world, jobs.increments, "ebc", specs, ADAM)
    for step, of_ranks in enumerate(zip(*answers, strict=True)):
        for name, dtype in (("t0", torch.float32), ("t1", torch.bfloat16)):
            first = of_ranks[0]
            threshold = first["threshold"] and first["threshold"]["model"][name]
            keys = np.concatenate([answer["stored"][name].keys for answer in of_ranks])
            values = np.concatenate([answer["stored"][name].values for answer in of_ranks])
            scores = np.concatenate([answer["stored"][name].scores for answer in of_ranks])
            wanted = np.flatnonzero(scores >= np.uint64(threshold))
            wanted = wanted[np.argsort(keys[wanted])]
            if strategy != "LFU":
                assert len(wanted) > 0 and (step == 0 or len(wanted) < len(keys))
            for answer in of_ranks:
                got_keys, got_values = answer["tensors"]["model"][name]
                assert got_values.dtype == dtype and got_values.shape == (len(wanted), values.shape[1])
                np.testing.assert_array_equal(got_keys.numpy(), keys[wanted])
                np.testing.assert_array_equal(got_values.float().numpy(), values[wanted])
                assert answer["scores"] == first["scores"], "one threshold for all ranks"


def test_other_thresholds_are_refused() -> None:
    bad = [None, 1.5, "1", -1, True, [1], {"model": 3}, {"model": {"t0": "x"}}, {"model": {1: 2}}]
    for messages in ranks.run(1, jobs.refuse, bad):
        assert len(messages) == len(bad)
        assert all("score_threshold should be" in message for message in messages)
