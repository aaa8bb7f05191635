"""Public names of one_embedding explain themselves, and their examples run."""

import docstrings
import pytest

import one_embedding

NAMES = docstrings.public_names(one_embedding)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_explains_every_argument_and_its_example_runs(name):
    docstrings.require_explained(NAMES[name])
    docstrings.require_example(NAMES[name])


def test_the_reference_has_every_public_name():
    docstrings.require_listed("api_one_embedding.md", NAMES)
