"""What docstrings say: their parts, the arguments they describe, and whether their examples run."""

import doctest
import inspect
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = ("embstore", "dynamicemb", "one_embedding", "sparse_operation_kit", "torchrec_dynamic_embedding")


def public_names(*modules):
    """{full name: thing} of the classes and functions that are in `__all__`; those of others are theirs."""
    found = {}
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            described = inspect.isclass(thing) or inspect.isfunction(thing)
            if described and thing.__module__.partition(".")[0] in PACKAGES:
                found[f"{module.__name__}.{name}"] = thing
    return found


def parts_of(thing):
    """The text and the names of its sections."""
    text = inspect.getdoc(thing) or ""
    return text, set(re.findall(r"^(Args|Returns|Raises|Examples):$", text, re.MULTILINE))


def _named(callable_):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(callable_).parameters
    return {name for name, parameter in parameters.items() if parameter.kind not in kinds} - {"self"}


def arguments_of(thing):
    """The arguments that a docstring has to describe: not those that a base of another package has."""
    if not inspect.isclass(thing):
        return _named(thing)
    if issubclass(thing, (int, Exception)) or thing.__init__ is object.__init__ or inspect.isabstract(thing):
        return set()
    if not hasattr(thing, "__members__"):
        theirs = [base for base in thing.__mro__ if base.__module__.partition(".")[0] not in PACKAGES]
        inherited = [_named(base.__init__) for base in theirs if base.__init__ is not object.__init__]
        return _named(thing.__init__).difference(*inherited)
    return set()


def described_arguments(thing):
    """Those in the section Args, of its bases too."""
    texts = [base.__doc__ for base in thing.__mro__] if inspect.isclass(thing) else [thing.__doc__]
    sections = [re.split(r"\n(?=\S)", inspect.cleandoc(text)) for text in texts if text]
    args = [part for section in sections for part in section if part.startswith("Args:")]
    return {name for part in args for name in re.findall(r"^    \**(\w+): ", part, re.MULTILINE)}


def require_explained(thing):
    """A summary that stands alone, and every argument."""
    text, parts = parts_of(thing)
    assert re.fullmatch(r"\S.*[.:]", text.split("\n")[0]), "a summary of one line should come first"
    missing = arguments_of(thing) - described_arguments(thing)
    assert not missing, missing


def require_example(thing, **given):
    """There is one, and it runs with nothing but these names."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(thing, thing.__qualname__, module=False, globs=given)
    assert test.examples, "there should be an example"
    output = []
    runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def require_listed(page, names):
    """The reference has these names, and no others."""
    listed = re.findall(r"^::: (\S+)$", (DOCS / page).read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(names)
