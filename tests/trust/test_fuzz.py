"""Short version of trust.fuzz: every kept input, and some mutations of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import fuzz
from trust.fuzz_targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_every_reader_refuses_damaged_input_as_documented(name):
    assert fuzz.replay(name, mutations=60) > 60
