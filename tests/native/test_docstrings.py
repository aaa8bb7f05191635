"""Every public name explains itself: what it does, its arguments, its errors, and an example that runs."""

import inspect
import re

import docstrings
import pytest

import embstore

NAMES = docstrings.public_names(embstore)
RAISES_NOTHING = {"Stats", "Rows", "Debug", "Initializer", "isa", "get_num_threads"}
METHODS = {
    name: method
    for name, method in inspect.getmembers(embstore.Table, inspect.isfunction)
    if not name.startswith("_")
}
PROPERTIES = inspect.getmembers(embstore.Table, lambda member: isinstance(member, property))
# What the modules, ranks and dumps of embstore call.
FOR_EMBSTORE = {
    "admission_counters",
    "apply_gradients_to_shared",
    "assign_shared_rows",
    "exchange",
    "load_state",
    "miss_sample",
    "raise_clock",
    "report_refused",
    "reseed",
    "resident",
    "restore_admission_counters",
    "take_admission_changes",
    "return_admission_changes",
    "apply_admission_changes",
    "sample_misses",
    "set_eviction_log",
    "set_uses",
    "shared_rows",
    "snapshot",
    "snapshot_changes",
    "step_options",
    "take_changes",
}
# They need nothing that an example could show in three lines, or a store.
PLAIN = {"clear", "flush", "load_snapshot", "prefetch", "save_snapshot"}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_explains_every_argument_and_its_example_runs(name):
    docstrings.require_example(NAMES[name])
    if name != "embstore.Stats":  # made by tables alone; its text explains the fields
        docstrings.require_explained(NAMES[name])


def test_the_reference_has_every_public_name_and_every_method_of_a_table():
    places = [name.replace("embstore.Embedding", "embstore.nn.modules.Embedding") for name in NAMES]
    docstrings.require_listed("api.md", places)
    page = (docstrings.DOCS / "api.md").read_text()
    listed = re.findall(r"^        - (\w+)$", page, re.MULTILINE)
    assert set(listed) == METHODS.keys() | {name for name, _ in PROPERTIES if not name.startswith("_")}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_raises(name):
    thing = NAMES[name]
    if inspect.isclass(thing) and issubclass(thing, (int, Exception)) or thing.__name__ in RAISES_NOTHING:
        return
    assert "Raises" in docstrings.parts_of(thing)[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_table_explains_every_argument_and_what_it_returns(name):
    method = METHODS[name]
    docstrings.require_explained(method)
    returns = inspect.signature(method).return_annotation not in ("None", inspect.Signature.empty)
    if returns and name not in FOR_EMBSTORE:
        assert "Returns" in docstrings.parts_of(method)[1]


@pytest.mark.parametrize("name", sorted(METHODS.keys() - FOR_EMBSTORE - PLAIN))
def test_the_example_of_a_method_of_a_table_runs(name):
    docstrings.require_example(METHODS[name])


@pytest.mark.parametrize("name", [name for name, _ in PROPERTIES if not name.startswith("_")])
def test_a_property_of_a_table_says_what_it_is(name):
    assert inspect.getdoc(getattr(embstore.Table, name))
