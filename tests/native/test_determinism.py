"""The same bytes for 1, 2 and 4 threads, with eviction and growth under way."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from native_tables import as_dict, random_keys

import embstore

OPTIMIZERS = [embstore.Adam(lr=0.05), embstore.RowwiseAdagrad(lr=0.05), embstore.SGD(lr=0.05, momentum=0.9)]


def train(threads, dtype, optimizer, strategy):
    embstore.set_num_threads(threads)
    options = [
        embstore.TableOptions(
            name=f"t{t}", dim=dim, dtype=dtype, optimizer=optimizer, initializer=embstore.Normal(0, 1),
            init_capacity=256, max_capacity=max_capacity, score_strategy=strategy, eviction_log="keys",
            seed=t,
        )
        for t, (dim, max_capacity) in enumerate([(5, 2048), (32, 1 << 16), (1, 256)])
    ]  # fmt: skip
    collection = embstore.EmbeddingBagCollection(options, mode="mean")
    outputs = []
    for step in range(20):
        rng = np.random.default_rng(step)
        inputs = {}
        for t in range(3):
            lengths = rng.integers(0, 6, size=(400, 1023, 30)[t])
            keys = random_keys(lengths.sum(), 20000, seed=100 * step + t)
            weights = torch.from_numpy(rng.standard_normal(len(keys)).astype(np.float32))
            offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            inputs[f"t{t}"] = (torch.from_numpy(keys), torch.from_numpy(offsets), weights)
        out = collection(inputs)
        outputs.append(b"".join(v.detach().float().numpy().tobytes() for v in out.values()))
        sum((v.float() ** 2).sum() for v in out.values()).backward()
    logs = [t.evictions().keys.tobytes() for t in collection.tables.values()]
    stats = [t.stats() for t in collection.tables.values()]
    return outputs, [as_dict(t) for t in collection.tables.values()], logs, stats


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("which", range(3))
def test_trained_bytes_are_the_same_for_any_number_of_threads(dtype, which):
    strategy = ("step", "lfu", "step")[which]
    results = [train(threads, dtype, OPTIMIZERS[which], strategy) for threads in (1, 2, 4)]
    assert results[0] == results[1] == results[2]
    stats = results[0][3]
    assert stats[0].evictions > 1000 and stats[1].capacity > 8192 and stats[2].evictions > 500


PROGRAM = """
import hashlib
import numpy as np, embstore
digest = hashlib.sha256()
for dtype in ("float32", "float16", "bfloat16"):
    for kind in ("Adam", "RowwiseAdagrad", "Ftrl", "SGD"):
        optimizer = getattr(embstore, kind)(clip_norm=1.0)
        table = embstore.Table("t", dim=13, dtype=dtype, optimizer=optimizer, max_capacity=1024,
                               initializer=embstore.Normal(0, 1), init_capacity=256, score_strategy="lfu")
        for step in range(10):
            rng = np.random.default_rng(step)
            keys = rng.integers(0, 3000, size=500)
            digest.update(table.find_or_insert(keys).tobytes())
            table.apply_gradients(keys, rng.standard_normal((500, 13)))
        rows = table.rows()
        for array in (rows.keys, rows.values, rows.states, rows.scores):
            digest.update(array.tobytes())
print(embstore.isa(), digest.hexdigest())
"""


def test_the_instruction_set_does_not_change_a_byte():
    digests = {}
    for isa in ("plain", "avx2", "avx512"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "EMBSTORE_ISA": isa},
            capture_output=True,
            text=True,
            timeout=100,
        )
        if run.returncode != 0:
            assert "this machine supports" in run.stderr  # an instruction set that is not there says so
            continue
        name, digests[isa] = run.stdout.split()
        assert name == isa
    assert "plain" in digests and len(set(digests.values())) == 1
