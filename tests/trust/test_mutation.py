"""Short version of trust.mutation: every mutant has its place, and one that matters is noticed."""

from pathlib import Path

import pytest

from trust import mutants, mutation

ROOT = Path(__file__).parents[2]

CPP = """// a < b in a comment
#include <vector>
int f(int a, std::vector<int> b) {
  if (a < 3 && !b.empty()) b.clear();
  a += g("1 + 1", b[0] * 2);
  return std::min(a, 7) == 3 ? a - 1 : true;
}
"""


def test_mutants_of_cpp_are_of_code_alone():
    found = list(mutants.cpp_mutants("f.cpp", CPP))
    changes = [(m.line, m.change) for m in found]
    assert (
        (4, "< becomes <=") in changes and (4, "&& becomes ||") in changes and (4, "! is dropped") in changes
    )
    assert (5, "+= becomes -=") in changes and (5, "* becomes +") in changes
    assert (6, "min becomes max") in changes and (6, "== becomes !=") in changes
    assert (6, "- becomes +") in changes and (6, "true becomes false") in changes
    assert not any(line < 4 for line, _ in changes)
    assert not any("1 + 1" in (m.changed or "") and m.change.startswith("+ ") for m in found)


def test_all_mutants_of_cpp_fit_into_one_file_and_keep_its_lines():
    found = dict(enumerate(mutants.cpp_mutants("f.cpp", CPP), 1))
    text = mutants.with_cpp_mutants(CPP, found)
    assert all(f"EMBSTORE_MUTANT({number})" in text for number in found)
    assert text.count("\n") == CPP.count("\n") + 2  # the header, and #line
    assert mutants.with_cpp_mutants(CPP, {}).endswith(CPP)


PYTHON = '''
"""1 + 1 in a docstring."""
from __future__ import annotations


def f(a: int = 3, *b: list[1]) -> int:
    done.append(a)
    if a < 5 and not b:
        raise ValueError(f"{a + 1}")
    return max(a, len(b)) * 2
'''


def test_mutants_of_python_run_and_change_the_result():
    found = mutants.python_mutants("f.py", PYTHON)
    assert {m.change for m in found} == {
        "3 becomes 4",
        "call of done.append is dropped",
        "and becomes or",
        "< becomes <=",
        "5 becomes 6",
        "not is dropped",
        "* becomes +",
        "max becomes min",
        "2 becomes 3",
    }
    text = mutants.with_python_mutants("f.py", PYTHON, {m: n for n, m in enumerate(found)})
    text = text.replace("from embstore_mutant import EMBSTORE_MUTANT", "")

    def result(chosen):
        space = {"done": [], "EMBSTORE_MUTANT": lambda number: number == chosen}
        exec(compile(text, "f.py", "exec"), space)
        outcome = []
        for arguments in ((), (7,), (7, 1, 2), (5,), (2,)):
            try:
                outcome.append(space["f"](*arguments))
            except ValueError:
                outcome.append("refused")
        return outcome, space["done"]

    right = result(-1)
    for number, mutant in enumerate(found):
        assert result(number) != right, mutant.change


@pytest.mark.parametrize("file", mutation.files())
def test_every_file_has_mutants_that_the_parser_accepts(file):
    found = mutation.mutants_of(file)
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        changed = mutants.with_python_mutants(file, text, {m: n for n, m in enumerate(found, 1)})
        compile(changed, file, "exec")
    else:
        changed = mutants.with_cpp_mutants(text, dict(enumerate(found, 1)))
        for opening, closing in ("()", "{}"):
            assert changed.count(opening) - changed.count(closing) == text.count(opening) - text.count(
                closing
            )
    if found:
        assert "EMBSTORE_MUTANT(" in changed


def test_a_sample_depends_on_its_seed_alone():
    first, again, other = (mutation.sampled([], 50, seed) for seed in (1, 1, 2))
    assert first == again != other and list(first) == list(range(1, 51))


def test_equivalent_mutants_name_code_that_is_there():
    for file, change, code in mutation.equivalents():
        lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert code in lines, f"{file}: {code}"
        assert change == "*" or any(
            m.change == change and m.code == code for m in mutation.mutants_of(file)
        ), f"{file}: {change}: {code}"
