"""The examples of the guides run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["guide.md", "stores.md", "one_embedding.md", "serving.md"])
def test_the_examples_of_a_guide_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})
