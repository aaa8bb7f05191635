"""`make movielens` on a small world: what it measures, prints and writes."""

import json

import numpy as np
import pytest

from benchmarks import movielens


@pytest.fixture
def small_world(monkeypatch):
    """Ratings of 40 people and 60 films, where a person likes every film with an even id."""
    rng = np.random.default_rng(3)
    users, items = rng.integers(1, 41, 2000), rng.integers(1, 61, 2000)
    stars = np.where(items % 2 == 0, 5, 1)
    monkeypatch.setattr(movielens, "load", lambda: (users, items, stars, np.arange(2000)))


def test_auc_is_the_share_of_pairs_in_the_right_order():
    rng = np.random.default_rng(0)
    scores, liked = rng.permutation(97).astype(float), (rng.random(97) < 0.3).astype(float)
    pairs = [a > b for a in scores[liked > 0.5] for b in scores[liked < 0.5]]
    assert movielens.auc(scores, liked) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    ("package", "strategy"), [(p, s) for p, names in movielens.STRATEGIES.items() for s in names]
)
def test_every_strategy_learns_when_each_id_has_a_row(small_world, package, strategy):
    run = movielens.train(movielens.Run(100, package, strategy, seed=0))
    assert run.auc > 0.9
    if package != "torch":
        assert run.rows == (40, 60)


@pytest.mark.parametrize("package", list(movielens.STRATEGIES))
def test_a_default_table_keeps_to_its_rows(small_world, package):
    strategy = movielens.STRATEGIES[package][0]
    run = movielens.train(movielens.Run(50, package, strategy, seed=0))
    assert run.rows == (20, 30)


def test_the_oracle_gives_own_rows_to_the_most_frequent_ids(small_world):
    data = movielens.ratings(seed=1)
    rows = movielens.make_torch("oracle", data, 20).rows[0].numpy()
    counts = np.bincount(data.train[:, 0], minlength=len(rows))
    own = [id for id in np.unique(data.train[:, 0]) if rows[id] != 7]
    assert len(own) == len({rows[id] for id in own}) == 7
    assert min(counts[own]) >= max(np.delete(counts, own))


def test_runs_are_written_as_a_list_and_printed_as_a_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [
        movielens.Run(share, "torch", strategy, seed, auc, (3, 4))
        for share, strategy, seed, auc in [
            (50, "hashed", 0, 0.7),
            (50, "hashed", 1, 0.72),
            (50, "oracle", 0, 0.8),
            (20, "hashed", 0, 0.6),
        ]
    ]
    movielens.report(runs, tmp_path)
    assert "| torch hashed | 0.710 | 0.600 |" in capsys.readouterr().out
    written = json.loads((tmp_path / "movielens.json").read_text())
    assert written[1] == {
        "share": 50, "package": "torch", "strategy": "hashed", "seed": 1, "auc": 0.72, "rows": [3, 4]
    }  # fmt: skip
    assert (tmp_path / "movielens.svg").stat().st_size > 1000
