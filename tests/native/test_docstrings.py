"""Every public name explains itself: what it does, its arguments, its errors, and an example that runs."""

import doctest
import inspect
import re

import pytest

import embstore

MODULES = {name for name in embstore.__all__ if inspect.ismodule(getattr(embstore, name))}
NAMES = sorted(set(embstore.__all__) - MODULES)


def parts_of(name):
    text = inspect.getdoc(getattr(embstore, name)) or ""
    return text, set(re.findall(r"^(Args|Returns|Raises|Examples):$", text, re.MULTILINE))


def arguments_of(name):
    thing = getattr(embstore, name)
    if inspect.isclass(thing) and (issubclass(thing, (int, Exception)) or thing.__init__ is object.__init__):
        return []
    parameters = inspect.signature(thing).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_and_explains_every_argument(name):
    text, parts = parts_of(name)
    assert re.match(r"\S.*[.:]$|\S.*\S", text.splitlines()[0]), "a summary should come first"
    assert "Examples" in parts
    counters = name == "Stats"  # made by tables alone; its text explains the fields
    if arguments_of(name) and not counters:
        assert {"Args"} <= parts, parts
        described = set(re.findall(r"^    \**(\w+): ", text.partition("Args:")[2], re.MULTILINE))
        assert set(arguments_of(name)) <= described, set(arguments_of(name)) - described


RAISES_NOTHING = {"Stats", "Rows", "Debug", "Initializer", "isa", "get_num_threads"}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_raises(name):
    thing = getattr(embstore, name)
    if inspect.isclass(thing) and issubclass(thing, (int, Exception)) or name in RAISES_NOTHING:
        return
    assert "Raises" in parts_of(name)[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name):
    thing = getattr(embstore, name)
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    (test,) = finder.find(thing, name, module=False, globs={})
    assert test.examples
    output = []
    runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("name", ["to_arrow", "to_pandas", "plot"])
def test_examples_of_views_run(name):
    method = getattr(embstore.Table, name)
    runner = doctest.DocTestRunner()
    (test,) = doctest.DocTestFinder(recurse=False).find(method, name, module=False, globs={})
    assert test.examples
    output = []
    runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)
