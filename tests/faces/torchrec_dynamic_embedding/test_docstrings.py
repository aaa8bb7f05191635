"""Public names of torchrec_dynamic_embedding explain themselves, and their examples run."""

import docstrings
import pytest
from faces.torchrec_dynamic_embedding import twins
from faces.torchrec_dynamic_embedding.models import batches, trainer

import torchrec_dynamic_embedding as tde

NAMES = docstrings.public_names(tde)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_explains_every_argument_and_its_example_runs(name):
    docstrings.require_explained(NAMES[name])
    ours = trainer(64)
    given = {"batches": twins.loader_of(batches(4, 200)), "model": ours.model, "configs": ours.configs}
    docstrings.require_example(NAMES[name], **given)


def test_the_reference_has_every_public_name():
    docstrings.require_listed("api_torchrec_dynamic_embedding.md", NAMES)
