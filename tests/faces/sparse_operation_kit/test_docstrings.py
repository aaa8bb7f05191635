"""Public names of sparse_operation_kit explain themselves, and their examples run."""

import docstrings
import pytest

import sparse_operation_kit as sok

NAMES = docstrings.public_names(sok)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_explains_every_argument_and_its_example_runs(name):
    docstrings.require_explained(NAMES[name])
    docstrings.require_example(NAMES[name])


def test_the_reference_has_every_public_name():
    docstrings.require_listed("api_sparse_operation_kit.md", NAMES)
