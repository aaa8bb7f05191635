"""What the tests of the native API share: small tables, the rows of a table as a dict, comparisons."""

import numpy as np

import embstore


def small_table(dim=4, **keywords):
    """One bucket of 128 rows that cannot grow, with predictable values and scores, unless told otherwise."""
    options = {
        "initializer": embstore.Debug(),
        "score_strategy": "step",
        "init_capacity": 128,
        "max_capacity": 128,
        "max_load_factor": 1.0,
        **keywords,
    }
    return embstore.Table(options.pop("name", "small"), dim=dim, **options)


def as_dict(table, min_score=0):
    """{key: (value bytes, state bytes, score)}: equal when the tables are byte-identical."""
    rows = table.rows(min_score=min_score)
    return {
        int(k): (v.tobytes(), s.tobytes(), int(c))
        for k, v, s, c in zip(rows.keys, rows.values, rows.states, rows.scores)
    }


def everything(table):
    """The rows and every counter that a call could have changed."""
    score = table.score if table.options.score_strategy.name in ("STEP", "CUSTOMIZED") else 0
    return as_dict(table), table.stats(), table.optimizer_step, table.learning_rate, score


def values_of(table):
    """{key: value}."""
    rows = table.rows()
    return dict(zip(rows.keys.tolist(), rows.values))


def hash_of(key):
    """The engine's hash of a key (the murmur3 finalizer): ties of scores are broken by it."""
    mask = (1 << 64) - 1
    h = key & mask
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = ((h ^ (h >> 33)) * factor) & mask
    return h ^ (h >> 33)


def random_keys(n, distinct, seed):
    """Keys with duplicates, scattered over all of int64."""
    rng = np.random.default_rng(seed)
    pool = np.random.default_rng(12345).integers(-(2**63), 2**63, size=distinct, dtype=np.int64)
    return pool[rng.integers(0, distinct, size=n)]
