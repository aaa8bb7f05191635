"""Hooks of `make docs`: pages written for the repository work on the site too.

Pages that other changes bring get their place in the navigation, and links to files outside of docs/, such as
examples, become plain text: the site is read without the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
THEIR_SHIM = "https://unpkg.com/iframe-worker/shim"
# Pages that have a place of their own as soon as they are written.
PLACES = {"sizing.md": ("Sizing and strategies", 2), "compatibility.md": ("Compatibility", 3)}


def on_config(config: Any) -> Any:
    for page, (title, place) in sorted(PLACES.items(), key=lambda item: item[1][1]):
        if (DOCS / page).exists():
            config.nav.insert(place, {title: page})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "figures.md":
        more = re.split(r"^(?=## )", markdown, maxsplit=1, flags=re.MULTILINE)[1:]
        markdown = "\n".join(["# Figures\n", _section_of_readme("Figures"), *more])
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"`\1`", markdown)


def _section_of_readme(title: str) -> str:
    readme = (DOCS.parent / "README.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError(f"README.md should have a section {title!r}")
    # Links of the README start in the folder above.
    return re.sub(r"\]\((?!http|#)(?:docs/)?([^)]+\.md[^)]*)\)", r"](\1)", section[1])


def on_post_page(output: str, **_: Any) -> str:
    """The theme fetches a script for the search of pages on the disk; ours is in the site."""
    return output.replace(THEIR_SHIM, "assets/worker_on_disk.js")


def on_post_template(output_content: str, **_: Any) -> str:
    return on_post_page(output_content)
