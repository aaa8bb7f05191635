"""docs/compatibility.md from the list of names.

python tests/compatibility/page.py        writes the page (make docs)
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from compatibility.names import ABSENT, ORIGINALS, Module, Original

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
INTRO = """# Compatibility

What becomes of the public names of the four packages that embstore replaces. This page is written by
`make docs` from `tests/compatibility/names.py`; the tests import every name that is listed as supported, and
check that the others fail as they are said to. Programs that use the packages as their known clients do
(TorchEasyRec, HSTU, EasyRec, Merlin Models, HugeCTR, OneFlow's DeepFM and DLRM, a TDE trainer) run in the
tests on one rank and on two: see `tests/clients`.
"""


def _rows(module: Module) -> list[tuple[str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in module.same.split():
        groups["supported", ""].append(name)
    for name, how in module.differs.items():
        groups["differs", how].append(name)
    for name, absence in module.missing.items():
        shows = "not there" if absence.shows == ABSENT else "raises NotImplementedError"
        groups["not supported", f"{shows}: {absence.why}"].append(name or "(the module)")
    return [
        (", ".join(f"`{name}`" if "(" not in name else name for name in sorted(names)), status, text)
        for (status, text), names in groups.items()
    ]


def _section(original: Original) -> str:
    lines = [
        f"## {original.title}",
        "",
        f"Tested against: {original.version}. Guide: [{original.guide}]({original.guide}).",
        "",
        "| module | names | status | how, or why not |",
        "|---|---|---|---|",
    ]
    for module in original.modules:
        for number, (names, status, text) in enumerate(_rows(module)):
            where = f"`{module.path}`" if number == 0 else ""
            lines.append(f"| {where} | {names} | {status} | {text} |")
    return "\n".join(lines)


def page() -> str:
    return "\n\n".join([INTRO.rstrip(), *(_section(original) for original in ORIGINALS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
