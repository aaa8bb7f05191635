"""Every test starts with the same number of engine threads and a small one for torch."""

import pytest
import torch

import embstore

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def two_engine_threads():
    """A test may change the number of threads; the next one finds two again."""
    embstore.set_num_threads(2)
    yield
    embstore.set_num_threads(2)
