"""What the ranks of test_dynamicemb_tiers.py do."""

import numpy as np
import torch.distributed as dist
from faces.dynamicemb.jobs import bags
from faces.dynamicemb.models import Spec, dmp, outputs, tables
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from embstore.stores.urls import tiers

KEYS = 600


def train_over(directory, redis):
    """Trains a small table over files over Redis beside one with room for all rows, and compares them."""
    below = tiers(f"ssd://{directory}", redis, upper_rows=60)
    adam = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    small = dmp("ec", [Spec("t0", ("f0",), rows=128, options={"external_storage": below})], adam)
    large = dmp("ec", [Spec("t0", ("f0",), rows=4096)], adam)
    rng = np.random.default_rng(dist.get_rank())
    for _ in range(20):
        keys = rng.integers(0, KEYS, 40).tolist()
        for model in (small, large):
            (outputs(model(bags(keys)))["f0"] ** 2).sum().backward()
    (table,), (whole,) = tables(small).values(), tables(large).values()
    table.flush()
    found, rows = table.rows(), whole.rows()
    here, there = np.argsort(found.keys), np.argsort(rows.keys)
    return {
        "evictions": table.stats().evictions,
        "keys": rows.keys.tolist(),
        "same": all(
            np.array_equal(getattr(found, part)[here], getattr(rows, part)[there])
            for part in ("keys", "values", "states")
        ),
    }
