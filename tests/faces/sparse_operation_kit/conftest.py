import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

import sparse_operation_kit as sok


@pytest.fixture(autouse=True, scope="session")
def _initialised():
    sok.init("single")
